"""Checkpointed and compiled blocks: the same gradients, the same messages on all ranks, and as many as they say."""

from __future__ import annotations

import pytest
import torch
from on_ranks_checkpointed import BLOCKS, compiled_on_rank_1, gradients, gradients_on_rank, in_turn

from ringspun import Causal, Zigzag
from ringspun.torch import ContextParallel, Loopback

LAPS = {"no checkpoint": 1, "reentrant": 2, "recomputed": 2, "attention kept": 1}
"""How often keys and values go round in forward."""


@pytest.mark.parametrize("how", BLOCKS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_C2_checkpointed_attention_on_one_thread(size, how):
    """A view or stride error, by how attention is called; or gradients of another call's."""
    right, _ = gradients(ContextParallel(Loopback(size), layout=Zigzag()).plan(22, Causal()), "no checkpoint")
    plan = ContextParallel(Loopback(size), layout=Zigzag()).plan(22, Causal())
    found, sent = gradients(plan, how)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    layers, ring = 2, size * (size - 1)  # blocks sent in a lap, of all ranks together
    laps_of_blocks = layers * (LAPS[how] + 1)
    laps_of_gradients = layers
    assert sum(sent.values()) == ring * (laps_of_blocks + laps_of_gradients)


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", BLOCKS)
def test_C2_ranks_send_the_same_when_they_recompute(pools, how):
    plan = ContextParallel(Loopback(2), layout=Zigzag()).plan(22, Causal())
    right, _ = gradients(plan, "no checkpoint")
    found = pools(2).run(gradients_on_rank, how, timeout_s=30)
    for name, whole in enumerate(right):
        gathered = [grads[name] for grads, _ in found]
        if name < 2:  # weights: every rank has its share
            torch.testing.assert_close(sum(gathered), whole, rtol=1e-12, atol=1e-12)
        else:
            torch.testing.assert_close(torch.cat(gathered, 1), whole, rtol=1e-12, atol=1e-12)
    counts = [sent for _, sent in found]
    assert counts[0] == counts[1] == 2 * (LAPS[how] + 1) + 2


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_C1_one_rank_compiles_and_the_length_changes_and_changes_back(pools):
    """A graph that breaks, compiles for ever, or hangs where only one rank compiles."""
    lengths = [64, 96, 64, 80]
    right = in_turn(ContextParallel(Loopback(2), layout=Zigzag()), lengths)
    found = pools(2).run(compiled_on_rank_1, lengths, timeout_s=90)
    for (out, dx, weight), *ranks in zip(right, *found, strict=True):
        outs, dxs, weights = zip(*ranks, strict=True)
        torch.testing.assert_close(torch.cat(outs, 1), out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat(dxs, 1), dx, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sum(weights), weight, rtol=1e-12, atol=1e-12)
