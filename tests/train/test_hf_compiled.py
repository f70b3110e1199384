"""Compiled models on a ring: one graph, the eager numbers, and no new graph for every batch."""

from __future__ import annotations

import pytest
import torch
from hf_rings import ALTERNATE, VOCAB, build
from torch._dynamo.testing import CompileCounterWithBackend

from ringspun import Causal, Documents
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, Loopback

pytestmark = pytest.mark.timeout(240)
FRAMES = 2
"""What depends on a plan, of all that is compiled of a model: the check of its call, and its forward."""


def batch(context: ContextParallel, model, seq_len: int, lengths: list[int], kind: str):
    """A call's arguments: new documents."""
    documents = Documents([*lengths, seq_len - sum(lengths)])
    part = context.partition(seq_len, documents=documents)
    mask = Causal() & documents
    plan = part.plan(mask) if kind == "one plan" else plans(model, part, mask)
    ids = torch.arange(seq_len)[None] * 7 % VOCAB
    return part.shard_batch({"input_ids": ids}) | {"ringspun_plan": plan}


def results(call, model, given):
    model.zero_grad()
    logits = call(**given).logits
    logits.square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize(
    ("family", "kind", "backend"),
    [("llama", "one plan", "aot_eager"), ("gemma3", "one for each kind of layer", "eager")],
)
def test_new_documents_in_every_batch_are_one_graph_more_and_a_new_length_one_more(family, kind, backend):
    """`fullgraph`: a break would raise. Numbers equal to eager, bit for bit."""
    torch._dynamo.reset()
    layers = {} if family == "llama" else {"layer_types": ALTERNATE[:2]}
    model = prepare(build(family, num_hidden_layers=2, **layers))
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    context, graphs = ContextParallel(Loopback(2)), []
    for seq_len, i in [*((40, i) for i in range(12)), *((52, i) for i in range(4)), *((64, i) for i in range(4))]:
        given = batch(context, model, seq_len, [5 + i, 7], kind)
        found, right = results(compiled, model, given), results(model, model, given)
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
        graphs.append(counter.frame_count)
    first = graphs[0]
    assert graphs == [first] + 11 * [first + FRAMES] + 8 * [first + 2 * FRAMES]


def test_a_compiled_call_with_positions_of_one_process_is_refused():
    """A graph cannot branch on numbers; it asserts."""
    torch._dynamo.reset()
    model = prepare(build("llama"))
    part = ContextParallel(Loopback(2)).partition(24)
    given = {"input_ids": torch.arange(24)[None], "ringspun_plan": part.plan(Causal())}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    right = part.positions()[None]
    assert torch.equal(compiled(**given, position_ids=right).logits, model(**given, position_ids=right).logits)
    with pytest.raises(RuntimeError, match="position_ids must be this shard's global positions; got 0, 1, 2"):
        compiled(**given, position_ids=torch.arange(24)[None])


def test_a_plan_of_a_time_before_transformers_was_known_can_still_be_given():
    part = ContextParallel(Loopback(2)).partition(24)
    plan = part.plan(Causal())
    plan._companions.clear()
    model = prepare(build("llama"))
    given = {"input_ids": torch.arange(24)[None], "position_ids": part.positions()[None]}
    assert torch.equal(
        model(**given, ringspun_plan=plan).logits, model(**given, ringspun_plan=part.plan(Causal())).logits
    )
