"""Training and evaluating Hugging Face models on a ring: the cases H4, H6, H10 and H11."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hf_rings as hf
import pytest
import torch
from hf_rings import S

from ringspun import Causal, Contiguous, Documents, Layout, Zigzag
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, Partition

STEPS = 5


def sgd_step(part: Partition, model: Any, seed: int) -> float:
    """One step of SGD on tokens drawn alike on every rank; the mean loss."""
    ids = torch.randint(0, hf.VOCAB, (1, S), generator=torch.manual_seed(seed))
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    loss = model(**batch, ringspun_plan=plans(model, part, Causal())).loss
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.05 * part.context.driver.all_reduce(parameter.grad)
    return float(part.context.driver.all_reduce(loss.detach()))


def evaluate(part: Partition, model: Any) -> float:
    model.eval()
    ids = hf.token_ids()
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    with torch.no_grad():
        loss = model(**batch, ringspun_plan=plans(model, part, Causal())).loss
    model.train()
    return float(part.context.driver.all_reduce(loss))


def trained(ring_rank: int, family: str) -> dict[str, torch.Tensor]:
    """The weights after five steps, on whatever ring this process is part of."""
    torch.set_num_threads(1)
    model, part = prepare(hf.build(family)), ContextParallel().partition(S)
    for step in range(STEPS):
        sgd_step(part, model, step)
    return {name: x.detach() for name, x in model.named_parameters()}


@pytest.mark.processes
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_H4_weights_are_the_same_on_all_ranks_and_as_in_one_process(family: str, pools) -> None:
    """SGD, so that a wrong scale of a gradient shows; nothing sums gradients but the caller."""
    first, second = pools(2).run(trained, family)
    one, start = trained(0, family), dict(hf.build(family).named_parameters())
    for name, weight in one.items():
        assert torch.equal(first[name], second[name]), name
        moved = float((weight - start[name].detach()).abs().max())
        assert float((first[name] - weight).abs().max()) < 1e-5 * moved, name  # the model's own loss is float32


def test_H6_evaluation_changes_nothing_and_a_saved_model_goes_on(tmp_path: Path) -> None:
    """Train 2 steps, evaluate, save, load, train 2 more: the losses of 4 steps without interruption."""
    part = hf.loopback(2).partition(S)
    straight = prepare(hf.build("gemma2"))
    expected = [sgd_step(part, straight, step) for step in range(4)]

    model = prepare(hf.build("gemma2"))
    losses = [sgd_step(part, model, step) for step in range(2)]
    with hf.unchanged(model):
        found = evaluate(part, model)
    whole = hf.loopback(1).partition(S)
    assert found == pytest.approx(evaluate(whole, model), rel=1e-6)
    model.save_pretrained(tmp_path)
    again = prepare(type(model).from_pretrained(tmp_path, dtype=torch.float64))
    assert again.state_dict().keys() == model.state_dict().keys()
    losses += [sgd_step(part, again, step) for step in range(2, 4)]
    assert losses == expected


def one_layer(ring_rank: int, heads: int, rows: int, seq_len: int, layout: Layout) -> torch.Tensor:
    torch.set_num_threads(1)
    part = ContextParallel(layout=layout).partition(seq_len)
    model = prepare(hf.build("llama", num_attention_heads=heads, num_hidden_layers=1))
    local = part.shard(hf.token_ids(rows, seq_len), dim=1)
    with torch.no_grad():
        return part.gather(model(input_ids=local, ringspun_plan=part.plan(Causal())).logits, dim=1)


@pytest.mark.processes
@pytest.mark.parametrize("layout", [Zigzag(), Contiguous()], ids=str)
@pytest.mark.parametrize(("heads", "rows", "seq_len"), [(2, 1, 8), (2, 2, 16), (4, 1, 16), (4, 2, 8)])
def test_H10_causal_on_processes_of_a_cpu(heads: int, rows: int, seq_len: int, layout: Layout, pools) -> None:
    expected = one_layer(0, heads, rows, seq_len, layout)
    for found in pools(2).run(one_layer, heads, rows, seq_len, layout):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_H11_targets_are_counted_once(size: int) -> None:
    """Not once per rank: every rank divides by the count of the whole batch."""
    part = hf.loopback(size).partition(S, documents=Documents([9, 1, 12]))
    batch = part.shard_batch({"input_ids": hf.token_ids(2), "labels": hf.token_ids(2)})
    assert batch["num_items_in_batch"] == 2 * (8 + 0 + 11)


def test_a_prepared_model_can_be_copied_and_prepared_again() -> None:
    part, model = hf.loopback(2).partition(S), prepare(prepare(hf.build("gpt_oss")))
    batch = part.shard_batch({"input_ids": hf.token_ids(), "labels": hf.token_ids()})
    chosen = plans(model, part, Causal())
    one, two = (m(**batch, ringspun_plan=chosen).loss for m in (model, copy.deepcopy(model)))
    assert torch.equal(one, two)


def test_recomputed_layers_give_the_same_gradients() -> None:
    part, found = hf.loopback(2).partition(S), []
    for recompute in (False, True):
        model = prepare(hf.build("gemma3")).train()
        if recompute:
            model.gradient_checkpointing_enable()
        batch = part.shard_batch({"input_ids": hf.token_ids(), "labels": hf.token_ids()})
        model(**batch, ringspun_plan=plans(model, part, Causal())).loss.backward()
        found.append(hf.gradients(model))
    assert all(torch.equal(x, found[1][name]) for name, x in found[0].items())


def test_compiled_layers_are_one_graph() -> None:
    """The checks of a call are done before its first layer: nothing in a layer breaks the graph."""
    from torch._dynamo.utils import counters

    part, model = hf.loopback(2).partition(S), prepare(hf.build("gemma3"))
    call = {"input_ids": part.shard(hf.token_ids(), dim=1), "position_ids": part.positions()[None]}
    call |= {"ringspun_plan": plans(model, part, Causal())}
    expected = model(**call).logits
    counters.clear()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(**call).logits, expected)
    compiled(**call | {"ringspun_plan": plans(model, part, Causal())})
    assert counters["stats"]["unique_graphs"] <= 3  # one per layer and more, if something did
