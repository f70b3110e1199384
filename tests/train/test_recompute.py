"""Activation checkpointing by policy: the same gradients, fewer messages, less memory; undone, and refused in words."""

from __future__ import annotations

from typing import Any

import hf_rings as hf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ringspun import Causal, Zigzag
from ringspun.core.route import Ring
from ringspun.core.wire import Format
from ringspun.errors import ConfigError
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, Loopback, Partition, Plan
from ringspun.torch.memory import peak_memory
from ringspun.train.memory import recompute
from ringspun.train.memory.recompute import POLICIES, apply_checkpointing

HEADS, WIDTH, S = 2, 8, 22
R = 3
LAPS = {"none": 1, "layer": 2, "attention": 1, "ring_step": 1}
"""How often keys and values go round beside once in backward."""


class Block(nn.Module):
    """Attention of a plan or, without one, PyTorch's own; dropout; a feed-forward layer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.project, self.widen, self.narrow = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.attention_dropout = 0.0

    def forward(self, x: Tensor, plan: Plan | None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        if plan is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.attention_dropout)
        else:
            y = plan.attention(q, k, v)
        x = x + self.dropout(y.transpose(1, 2).flatten(-2))
        return x + self.dropout(self.narrow(self.widen(x).relu()))


class Stack(nn.Module):
    """Two blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.double()

    def forward(self, x: Tensor, plan: Plan | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, plan)
        return x


def a_plan(policy: str = "none", seq_len: int = S, ring_size: int = R) -> Plan:
    route = Ring(kept_hops=1) if policy == "ring_step" else "auto"
    context = ContextParallel(Loopback(ring_size, seed=0), layout=Zigzag(), route=route, backward="keys")
    return context.plan(seq_len, Causal())


def checkpointed(model: nn.Module, policy: Any, plan: Plan, **options: Any) -> recompute.Applied:
    return apply_checkpointing(model, policy, plan=plan if policy == "ring_step" else None, **options)


def gradients(model: nn.Module, *args: Any, seq_len: int = S) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(1, seq_len, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x, *args).sin().sum().backward()
    found = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad(set_to_none=True)
    return found


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_have_the_same_bits_and_messages_are_as_many_as_the_policy_says(policy: str) -> None:
    """Dropout draws the same numbers again; the ring runs again under "layer" alone."""
    model, plan = Stack(0.3), a_plan(policy)
    right = gradients(model, a_plan())
    checkpointed(model, policy, plan, layers=Block)
    counts = plan.partition.context.driver.counts.messages
    before = sum(counts.values())
    assert same(gradients(model, plan), right)
    hops, kept = R * (R - 1), R * (policy == "ring_step")
    assert sum(counts.values()) - before == 2 * (hops * (LAPS[policy] + 1) - kept + hops)


def hf_gradients(model: Any, part: Partition) -> dict[str, Tensor]:
    batch = part.shard_batch({"input_ids": hf.token_ids(), "labels": hf.token_ids()})
    model(**batch, ringspun_plan=plans(model, part, Causal())).loss.backward()
    found = hf.gradients(model)
    model.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_hugging_face_models_on_a_ring(family: str) -> None:
    """Without a word of their layers; windows, softcap and sinks included; against the same model on the same ring."""
    model = prepare(hf.build(family))
    rings = (ContextParallel(Loopback(R, seed=0), route=Ring(kept_hops=n), backward="keys") for n in (None, 1))
    part, keeping = (ring.partition(hf.S) for ring in rings)
    right = hf_gradients(model, part)
    for policy in ("layer", "attention", "ring_step"):
        one = keeping if policy == "ring_step" else part
        applied = checkpointed(model, policy, one.plan(Causal()))
        assert len(applied.layers) == hf.LAYERS
        found = hf_gradients(model, one)
        assert all(torch.equal(found[name], right[name]) for name in right), policy
        applied.undo()


def test_a_hugging_face_model_in_one_process_fills_its_cache_once() -> None:
    """`use_cache` is on by default; a layer that ran twice would see its keys twice."""
    model, ids = hf.build("llama"), hf.token_ids()

    def run() -> dict[str, Tensor]:
        model(input_ids=ids).logits.sin().sum().backward()
        found = hf.gradients(model)
        model.zero_grad(set_to_none=True)
        return found

    right = run()
    applied = apply_checkpointing(model, "layer")
    again = run()
    applied.undo()
    assert all(torch.equal(again[name], right[name]) for name in right)
    assert not any(getattr(m, "gradient_checkpointing", False) for m in model.modules())


def test_a_model_that_takes_no_plan_runs_on_the_ring_again() -> None:
    """Under `as_sdpa`; backward comes when the block is over."""
    model, plan = Stack(), a_plan()
    right = gradients(model, plan)
    for policy in ("layer", "attention"):
        applied = checkpointed(model, policy, plan, layers=Block)

        def on_ring(x: Tensor) -> Tensor:
            with plan.as_sdpa():
                return model(x)

        x = torch.randn(1, S, WIDTH, dtype=torch.float64, generator=torch.manual_seed(1), requires_grad=True)
        on_ring(x).sin().sum().backward()
        assert same([x.grad, *(p.grad for p in model.parameters())], right)
        model.zero_grad(set_to_none=True)
        applied.undo()


@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
def test_attention_without_a_ring_is_kept_unless_it_drops(attention_dropout: float) -> None:
    """A kept dropout would leave its random numbers to the next: the gradients tell."""
    model = Stack(0.3)
    for block in model.blocks:
        block.attention_dropout = attention_dropout
    right = gradients(model)
    apply_checkpointing(model, "attention", layers=Block)
    assert same(gradients(model), right)


def kept_bytes(policy: str, plan: Plan) -> int:
    """What is alive between forward and backward."""
    model = Stack()
    checkpointed(model, policy, plan, layers=Block)
    x = torch.randn(1, plan.queries.core.seq_len, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x, plan).sum().backward()  # the pool has its buffers now
    with peak_memory() as peak:
        out = model(x, plan)
    assert out.requires_grad
    return peak.left


def test_what_is_kept_is_what_the_policy_says() -> None:
    """In float64, elements of every token: of a layer its input, 8; out and lse, 8 and 2; and one hop's blocks."""
    row = 512 * 8
    plans_of = {policy: a_plan(policy, 512, ring_size=4) for policy in POLICIES}
    everything, layer, attention, ring_step = (kept_bytes(policy, plan) for policy, plan in plans_of.items())
    wire = Format(1, HEADS, HEADS, 4, 4, "float64", 8, 8)
    blocks = sum(s.kept_bytes(wire) for s in plans_of["ring_step"].schedules)
    slack = 12 * 1024  # a state of random numbers for each layer, 5 KiB, and numbers of calls
    assert 0 <= layer - 2 * WIDTH * row <= slack  # the second's input, and the output
    assert abs(attention - layer - 2 * (WIDTH + HEADS) * row) <= 64
    assert abs(ring_step - attention - 2 * blocks) <= 64 and blocks > 0.8 * 2 * WIDTH * row
    assert abs(everything - 2 * (WIDTH + 24 + WIDTH + HEADS + WIDTH + 32) * row) <= 64


def test_undone_it_is_as_it_was() -> None:
    model, plan = Stack(), a_plan()
    names, blocks = list(model.state_dict()), list(model.blocks)
    applied = checkpointed(model, "attention", plan, layers=[model.blocks[1]])
    assert [type(b) for b in model.blocks] == [Block, CheckpointWrapper] and applied.layers == (blocks[1],)
    assert list(model.state_dict()) == names
    applied.undo()
    assert list(model.blocks) == blocks
    shared = nn.Sequential(blocks[0], nn.Sequential(blocks[0]))
    apply_checkpointing(shared, "layer", layers=Block)
    assert shared[0] is shared[1][0] and isinstance(shared[0], CheckpointWrapper)


def test_undone_twice_is_undone() -> None:
    model = hf.build("llama")
    applied = apply_checkpointing(model, "attention")
    for _ in range(2):
        applied.undo()
        assert not any(layer.gradient_checkpointing for layer in model.model.layers)


def test_offload_sends_the_layers_inputs_alone_to_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By PyTorch's own hooks, pinned; of tensors that lie nowhere, for shapes are all that is looked at."""
    moved = []

    class Seen(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            def pack(tensor: Tensor) -> Tensor:
                moved.append((tuple(tensor.shape), pin_memory))
                return tensor

            super().__init__(pack, lambda tensor: tensor)

    monkeypatch.setattr(recompute, "save_on_cpu", Seen)
    with torch.device("meta"):
        model, x = Stack(), torch.empty(1, S, WIDTH, dtype=torch.float64, requires_grad=True)
    apply_checkpointing(model, "attention", layers=Block, offload=True)
    model(x).sum().backward()
    assert moved == 2 * [((1, S, WIDTH), True)] and x.grad is not None


def test_what_is_refused() -> None:
    model, plan = Stack(), a_plan()
    for words, policy, options in (
        (r"policy must be one of 'none', 'layer', 'attention', 'ring_step'; got 'full'", "full", {}),
        (r"model must have the layers that shall run again; Stack has none of a Hugging Face model", "layer", {}),
        (r"Stack has none of <class 'torch.nn.modules.conv.Conv1d'>", "layer", {"layers": nn.Conv1d}),
        (r"layers must be inside the model; Block is not", "layer", {"layers": [Block()]}),
        (r"layers must be inside the model; Stack is not", "layer", {"layers": Stack}),
        (r"plan must come with policy 'ring_step'.*got policy 'layer'", "layer", {"layers": Block, "plan": plan}),
        (r"'ring_step' must come with plan=", "ring_step", {"layers": Block}),
        (r"must come with a ring that keeps blocks; got route ring", "ring_step", {"layers": Block, "plan": plan}),
        (r"offload must come with a policy", "none", {"offload": True}),
        (r"offload must move from a device to host memory", "layer", {"layers": Block, "offload": True}),
    ):
        with pytest.raises(ConfigError, match=words):
            apply_checkpointing(model, policy, **options)
    assert list(model.blocks) == [b for b in model.blocks if type(b) is Block], "nothing is changed"
    apply_checkpointing(model, "layer", layers=Block)
    with pytest.raises(ConfigError, match="model must not be checkpointed already"):
        apply_checkpointing(model, "layer", layers=Block)
