"""One transformer block on several ranks, by every way to share its sequence or its heads: what each sends and takes.

    ring, ulysses, usp     the sequence is cut; weights are whole on every rank, their gradients are summed
    tp                     heads and feed-forward are cut; the sequence is whole on every rank (tensor parallel)
    tp+sp                  and between them the sequence is cut (Megatron's sequence parallel); both by DTensor

Source: arXiv 1909.08053 and 2205.05198 (Megatron), 2310.01889 (ring), 2309.14509 (Ulysses), 2405.07719 (USP).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode

from ringspun.core.mask import Causal
from ringspun.testing.timing import threads_per_rank
from ringspun.torch import ContextParallel
from ringspun.torch.memory import peak_memory

STRATEGIES = ("ring", "ulysses", "usp", "tp", "tp+sp")


@dataclass(frozen=True)
class Model:
    """A block and its input.

    Args:
        seq_len: S (tokens). heads, kv_heads, head_size: H, K, D; the width is H times D. hidden_size: of the
            feed-forward layer. dtype: name.
    """

    seq_len: int = 4096
    heads: int = 8
    kv_heads: int = 4
    head_size: int = 32
    hidden_size: int = 1024
    dtype: str = "float32"

    @property
    def width(self) -> int:
        """C."""
        return self.heads * self.head_size


class Measured(NamedTuple):
    """Of one rank, a forward + backward.

    Args:
        seconds: of the last of two. peak_bytes: above weights and input, of the first. sent_bytes: by this rank for
            activations. gradient_bytes: for gradients of weights. loss: this rank's share of a sum over the output.
    """

    seconds: float
    peak_bytes: int
    sent_bytes: float
    gradient_bytes: float
    loss: float


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Attending(nn.Module):
    """Projections around an attention; rotary positions are left out, for they send nothing."""

    def __init__(self, model: Model, attention: Attention) -> None:
        super().__init__()
        self.head_size, self.attention = model.head_size, attention
        wide, narrow = model.width, model.kv_heads * model.head_size
        self.q, self.k, self.v, self.o = (_linear(wide, n) for n in (wide, narrow, narrow, wide))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return out


class _FeedForward(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up, self.gate = (_linear(model.width, model.hidden_size) for _ in range(2))
        self.down = _linear(model.hidden_size, model.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """Pre-norm, without biases: ``[B, T, C]`` to the same."""

    def __init__(self, model: Model, attention: Attention) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(model.width), nn.RMSNorm(model.width)
        self.attending, self.feed_forward = _Attending(model, attention), _FeedForward(model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attending(self.norm_1(x))
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out


_linear = partial(nn.Linear, bias=False)


class Sent(TorchDispatchMode):
    """Bytes that this rank sends in PyTorch's functional collectives, by the ring algorithm's count."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes, self._others = 0.0, (ranks - 1) / ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        passes = {"all_reduce": 2.0, "all_gather_into_tensor": 1.0, "reduce_scatter_tensor": 1.0}
        if func.namespace == "_c10d_functional" and func._opname in passes:
            self.bytes += passes[func._opname] * self._others * max(args[0].nbytes, out.nbytes)
        return out


def largest_degree(strategy: str, model: Model) -> str:
    """How many ranks it can use, in words."""
    return {
        "ring": "any",
        "ulysses": f"{model.heads} (query heads; KV heads are replicated beyond {model.kv_heads})",
        "usp": f"any times {model.heads}",
        "tp": f"{model.kv_heads} (KV heads)",
        "tp+sp": f"{model.kv_heads} (KV heads)",
    }[strategy]


def alone(model: Model) -> float:
    """The loss in one process: what the ranks' losses add up to."""
    block, x = made(model, plain)
    return float(_loss(block(x)).detach())


def on_rank(rank: int, strategy: str, model: Model) -> Measured:
    """On every rank of a pool: a first forward + backward for its memory, a second for its time."""
    ranks = dist.get_world_size()
    torch.set_num_threads(threads_per_rank(ranks))
    if strategy.startswith("tp"):
        block, x = made(model, plain)
        cut = strategy == "tp+sp"
        tensor_parallel(block, init_device_mesh("cpu", (ranks,)), cut=cut)
        x = x.chunk(ranks, 1)[rank].clone() if cut else x
        counted: ContextParallel | None = None
    else:
        counted = ContextParallel(ulysses={"ring": 1, "ulysses": ranks, "usp": 2}[strategy])
        plan = counted.plan(model.seq_len, Causal())
        block, x = made(model, plan.attention)
        x = plan.partition.shard(x, dim=1)
    with peak_memory() as peak:
        _run(block, x)
    before = 0 if counted is None else _sent(counted)
    dist.barrier()
    start = time.perf_counter()
    with Sent(ranks) as sent:
        loss = _run(block, x)
    seconds = time.perf_counter() - start
    own = sent.bytes if counted is None else float(_sent(counted) - before)
    if strategy == "tp":
        loss /= ranks  # every rank has the whole output
    return Measured(seconds, peak.bytes, own, _gradient_bytes(block, ranks, strategy), loss)


def made(model: Model, attention: Attention) -> tuple[Block, Tensor]:
    """A block with this attention and its whole input, the same wherever it is called."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, model.dtype)
    block = Block(model, attention).to(dtype)
    for weight in block.parameters():
        if weight.ndim == 2:
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
    return block, torch.randn(1, model.seq_len, model.width, generator=generator).to(dtype)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in one process."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def tensor_parallel(block: Block, mesh: DeviceMesh, *, cut: bool) -> None:
    """Cut heads and the feed-forward layer over a mesh; what is between them too, where the sequence is `cut`."""
    between = Shard(1) if cut else Replicate()
    whole = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    first, last = ColwiseParallel(input_layouts=Replicate()), RowwiseParallel(output_layouts=between)
    plan: dict[str, Any] = {"attending": whole, "feed_forward": whole}
    plan |= {f"attending.{name}": first for name in "qkv"} | {"attending.o": last, "feed_forward.down": last}
    plan |= {f"feed_forward.{name}": first for name in ("up", "gate")}
    if cut:
        plan |= {"norm_1": SequenceParallel(), "norm_2": SequenceParallel()}
    parallelize_module(block, mesh, plan)


def _run(block: Block, x: Tensor) -> float:
    x = x.detach().requires_grad_()
    block.zero_grad(set_to_none=True)
    loss = _loss(block(x))
    loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _loss(y: Tensor) -> Tensor:
    return y.float().square().sum()


def _sent(context: ContextParallel) -> int:
    me = context.driver.ring_ranks[0]
    return sum(n for (sender, _), n in context.driver.counts.bytes.items() if sender == me)


def _gradient_bytes(block: Block, ranks: int, strategy: str) -> float:
    """Of an all-reduce of the gradients of weights that are whole on every rank."""
    whole = [w for name, w in block.named_parameters() if not strategy.startswith("tp") or "norm" in name]
    return 2 * (ranks - 1) / ranks * sum(w.numel() * w.element_size() for w in whole)
