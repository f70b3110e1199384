"""When ranks compare the facts of a call: at its plan's first use, and whenever they differ from the call before."""

from __future__ import annotations

import torch

from ringspun import Causal
from ringspun.torch import ContextParallel, Loopback

S, H, D = 12, 2, 4


class Listening(Loopback):
    """A loopback that writes down what is agreed on."""

    def __init__(self, size):
        super().__init__(size)
        self.topics = []

    def agree(self, topic, digest, fields, failure=None):
        self.topics.append((topic, fields.get("batch")))
        super().agree(topic, digest, fields, failure)


def test_every_change_of_shape_is_agreed_on_and_no_repetition():
    """Shapes A and B both agreed on long ago; then one rank calls with A, another with B: gloo aborts the process."""
    ring = Listening(3)
    plan = ContextParallel(ring, backward="keys").plan(S, Causal())
    ring.topics.clear()
    for batch in (1, 1, 3, 3, 1):
        x = torch.randn(batch, H, S, D, requires_grad=True)
        plan.attention(x, x, x).square().sum().backward()
    forward, backward = (
        [batch for topic, batch in ring.topics if ("backward" in topic) == wanted] for wanted in (False, True)
    )
    assert forward == backward == ["1", "3", "1"]


def test_queries_that_travel_are_agreed_on_between_forward_and_backward():
    """Messages of keys and of queries are of two lengths: a rank may not go on to backward while another is not."""
    ring = Listening(3)
    plan = ContextParallel(ring, backward="queries").plan(S, Causal())
    ring.topics.clear()
    x = torch.randn(1, H, S, D, requires_grad=True)
    for layers in (1, 2):
        outs = [plan.attention(x, x, x) for _ in range(layers)]
        sum(out.sum() for out in outs).backward()
    assert ["backward" in topic for topic, _ in ring.topics] == [False, True, False, True], "once for both layers"
