"""Activation checkpointing by policy: the same gradients, fewer messages, less memory; undone, and refused in words."""

from __future__ import annotations

from typing import Any

import hf_rings as hf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from ringspun import Causal, Zigzag
from ringspun.core.route import Ring
from ringspun.errors import ConfigError
from ringspun.torch import ContextParallel, Loopback, Plan
from ringspun.torch.memory import peak_memory
from ringspun.train import recompute
from ringspun.train.recompute import POLICIES, apply_checkpointing

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
        if next(self.parameters()).device.type == "cpu":
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


@pytest.mark.parametrize("policy", ["layer", "attention", "ring_step"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_hugging_face_models_on_a_ring(family: str, policy: str) -> None:
    """Without a word of their layers; windows, softcap and sinks included."""
    route = Ring(kept_hops=1) if policy == "ring_step" else "auto"
    part = ContextParallel(Loopback(R, seed=0), layout=Zigzag(), route=route).partition(hf.S)
    model = hf.build(family)
    applied = checkpointed(model, policy, part.plan(Causal()))
    assert len(applied.layers) == hf.LAYERS
    with hf.Wide():  # what runs in backward too
        found = hf.on_ring(part, model, hf.token_ids(), hf.token_ids(), Causal())
    errors = found.worst(hf.alone(hf.build(family), hf.token_ids(), [hf.S]))
    assert max(errors.values()) < 1e-11, errors


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


def kept_bytes(policy: str, seq_len: int = 512) -> int:
    """What is alive between forward and backward."""
    model, plan = Stack(), a_plan(policy, seq_len, ring_size=4)
    checkpointed(model, policy, plan, layers=Block)
    x = torch.randn(1, seq_len, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x, plan).sum().backward()  # the pool has its buffers now
    with peak_memory() as peak:
        out = model(x, plan)
    assert out.requires_grad
    return peak.left


def test_what_is_kept_is_what_the_policy_says() -> None:
    """In float64: of a layer its input, 8 wide; and out and lse; and a block of keys and values, 16 wide."""
    row = 512 * 8  # an element of every token
    layer, attention, ring_step, everything = map(kept_bytes, ("layer", "attention", "ring_step", "none"))
    print(layer, attention, ring_step, everything, row)
    slack = 40 * 1024  # random states (5 KB each) and plain numbers
    assert 2 * WIDTH * row <= layer <= 2 * WIDTH * row + slack  # the second's input, and the output
    assert abs(attention - layer - 2 * (WIDTH + HEADS) * row) <= slack
    assert abs(ring_step - attention - 2 * 2 * WIDTH * row) <= slack
    assert everything > layer + 2 * (24 + 2 * 32) * row


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


def test_offload_keeps_inputs_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone, of tensors that pretend to lie on a GPU."""
    moved = []

    class Seen(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory)
            assert pin_memory
            pack = self.pack_hook

            def seen(tensor: Tensor) -> Any:
                packed = pack(tensor)
                moved.append((tensor.device.type, tuple(tensor.shape), packed[1].device.type))
                return packed

            self.pack_hook = seen

    monkeypatch.setattr(recompute, "save_on_cpu", Seen)
    monkeypatch.setattr(nn.Linear, "reset_parameters", lambda self: None)  # needs a GPU
    with FakeTensorMode():
        with torch.device("cuda"):
            model, x = Stack(), torch.empty(1, S, WIDTH, requires_grad=True)
        apply_checkpointing(model, "layer", layers=Block, offload=True)
        model(x)
    assert moved == 2 * [("cuda", (1, S, WIDTH), "cpu")]


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
