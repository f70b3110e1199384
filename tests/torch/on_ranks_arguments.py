"""What the ranks of a pool are asked to do with arguments that differ. Every function gets its ring rank first."""

from __future__ import annotations

from typing import Any

import torch
from on_ranks import PATIENCE_S, caught
from torch import distributed as dist

from ringspun import Causal, Contiguous, Full, Window, Zigzag
from ringspun.core.buckets import Buckets
from ringspun.testing.cases import bias_of_positions
from ringspun.torch import ContextParallel
from ringspun.torch.bias import Alibi, RelativeTable

S, KEYS, HEADS = 12, 9, 2
ROWS = (Causal(), Full())


def differ(rank: int, odd: int, what: str) -> tuple[str, str]:
    """Rank `odd` alone asks for something else; what this rank hears."""
    mine = DIFFERENCES[what] if rank == odd else {}
    return caught(lambda: one_call(**mine))


def one_call(
    *, mask: Any = ROWS, key_len: int | None = KEYS, key_layout: Any = None, query_start: int = 2, **changed: Any
) -> None:
    """Cross-attention with a mask per row and every argument, forward and backward, over the default group."""
    context = ContextParallel(dist.group.WORLD, layout=Zigzag(), timeout_s=PATIENCE_S)
    plan = context.plan(S, mask, key_len=key_len, key_layout=key_layout, query_start=query_start)
    batch = changed.pop("batch", 2)
    q = torch.ones(batch, HEADS, plan.queries.local_tokens, 4, requires_grad=True)
    k, v = (torch.ones(batch, 1, plan.keys.local_tokens, size, requires_grad=True) for size in (4, 3))
    asked = {"sinks": ones(HEADS), "softcap": 2.0, "bias": Alibi(ones(HEADS))} | changed
    plan.attention(q, k, v, **asked).sum().backward()


def ones(*shape: int, **options: Any) -> torch.Tensor:
    return torch.ones(shape, **{"requires_grad": True} | options)


def table(rows: int) -> RelativeTable:
    """A table that fits its own buckets."""
    return RelativeTable(ones(rows, HEADS), Buckets.clipped(rows - 1))


def in_the_trial(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    raise LookupError("not for any positions")


def at_real_positions(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Fails as soon as it sees positions of the sequence."""
    if q.max() > 2:
        raise LookupError("not for these positions")
    return (q - k).float()


def in_the_ring(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Fails only where it is computed, not where it is tried: at neighbours beyond the first few."""
    if ((q[1:] - q[:-1] == 1) & (q[1:] > 3)).any():
        raise LookupError("not for these positions")
    return (q - k).float()


DIFFERENCES: dict[str, dict[str, Any]] = {
    "sinks": {"sinks": None},
    "softcap": {"softcap": 3.0},
    "scale": {"scale": 0.3},
    "bias": {"bias": bias_of_positions},
    "bias tensor": {"bias": Alibi(ones(HEADS, dtype=torch.float64))},
    "gradients of q, k, v, sinks, bias": {"sinks": ones(HEADS, requires_grad=False)},
    "key_len": {"key_len": KEYS + 1},
    "key_layout": {"key_layout": Contiguous()},
    "query_start": {"query_start": 3},
    "mask": {"mask": (Causal(), Window(3))},
    "the order of the masks": {"mask": ROWS[::-1]},
    # wrong on one rank alone
    "sinks of another shape": {"sinks": ones(HEADS + 1)},
    "a table that does not fit": {"bias": RelativeTable(ones(3, HEADS), Buckets.clipped(4))},
    "a dense bias": {"bias": ones(S, KEYS)},
    "another batch": {"batch": 3},
    "no softcap": {"softcap": 0.0},
    "a kernel that cannot": {"kernel": "aten_cpu"},
    "a function that raises": {"bias": in_the_trial},
}


def one_rank_has_other_keys(rank: int, odd: int, sides: dict[str, Any]) -> tuple[str, str]:
    """All plan self-attention, rank `odd` something else."""
    context = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S)
    return caught(lambda: context.plan(S, Full(), **(sides if rank == odd else {})))


def functions_differ(rank: int) -> tuple[str, str]:
    """One name, and another slope on every rank."""
    return caught(lambda: one_call(bias=lambda q, k: -(rank + 1) * (q - k).abs().float()))


def tables_differ(rank: int, odd: int) -> tuple[str, str]:
    """All have a table; rank `odd` another number of buckets."""
    return caught(lambda: one_call(bias=table(5 if rank == odd else 4)))


def function_raises_late(rank: int, odd: int, how: str) -> list[tuple[str, str]]:
    """Rank `odd`'s function fails in the middle of the ring; then all call once more."""
    context = ContextParallel(dist.group.WORLD, timeout_s=5.0)
    plan = context.plan(S, Full())
    x = torch.ones(1, HEADS, plan.partition.local_tokens, 4)
    function = {"tried": at_real_positions, "computed": in_the_ring}[how] if rank == odd else fine
    return [caught(lambda f=f: plan.attention(x, x, x, bias=f)) for f in (function, fine)]


def fine(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (q - k).float()


fine.__qualname__ = at_real_positions.__qualname__ = in_the_ring.__qualname__  # ranks compare it
