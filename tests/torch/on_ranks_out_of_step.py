"""What the ranks of a pool are asked to do to get out of step. Every function gets its ring rank first."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ringspun import Contiguous, Full, Window
from ringspun.torch import ContextParallel, Plan

S = 12


def tensors(plan: Plan, value: float) -> list[torch.Tensor]:
    rows = plan.partition.local_tokens
    return [torch.full((1, 2, rows, 4), value, requires_grad=True) for _ in range(3)]


def outcome(action: Callable[[], Any]) -> tuple[str, str]:
    """What an action returned, or the kind and words of its error."""
    try:
        return "ok", str(action())
    except Exception as error:
        return type(error).__name__, str(error)


def carry_on_after_an_error(rank: int, wrong: dict[str, Any], at: int) -> list[tuple[str, str]]:
    """Five calls whose values tell them apart; rank 1 makes a mistake in one and goes on."""
    plan = ContextParallel(layout=Contiguous(), timeout_s=2).plan(S, Full())

    def call(number: int) -> float:
        q, k, v = tensors(plan, float(number))
        if rank == 1 and number == at:
            q = q[:, :, :-1] if "rows" in wrong else q
            return plan.attention(q, k, v, **{n: x for n, x in wrong.items() if n != "rows"}).max().item()
        out = plan.attention(q, k, v)
        out.sum().backward()
        return out.max().item()

    return [outcome(lambda n=n: call(n)) for n in range(1, 6)]


def raise_between_forward_and_backward(rank: int) -> list[tuple[str, str]]:
    plan = ContextParallel(layout=Contiguous(), timeout_s=2).plan(S, Full())

    def call(number: int) -> float:
        out = plan.attention(*tensors(plan, float(number)))
        if rank == 1 and number == 1:
            raise RuntimeError("the user's own")
        out.sum().backward()
        return out.max().item()

    return [outcome(lambda n=n: call(n)) for n in range(1, 6)]


def backward_in_another_order(rank: int) -> tuple[str, str]:
    plan = ContextParallel(layout=Contiguous(), timeout_s=2).plan(S, Full())
    outs = [plan.attention(*tensors(plan, float(n))) for n in (1, 2)]
    return outcome(lambda: [outs[i].sum().backward() for i in ((0, 1) if rank == 0 else (1, 0))])


def two_contexts_in_another_order(rank: int, lengths: tuple[int, int]) -> tuple[str, str]:
    plans = [ContextParallel(timeout_s=2).plan(n, Full()) for n in lengths]
    for plan in plans:
        plan.attention(*tensors(plan, 0.0))
    order = [(plans[0], 1.0), (plans[1], 2.0)]
    return outcome(lambda: [p.attention(*tensors(p, v)).max().item() for p, v in (order if rank else order[::-1])])


def two_masks_in_another_order(rank: int, whole: int) -> tuple[str, str]:
    """Of one partition: their messages hold other rows, and so other numbers of bytes. Rank `whole` sends all first."""
    full = ContextParallel(layout=Contiguous(), timeout_s=2).plan(S, Full())
    near = full.with_mask(Window(2))
    for plan in (full, near):
        plan.attention(*tensors(plan, 0.0))
    order = [(full, 1.0), (near, 2.0)] if rank == whole else [(near, 2.0), (full, 1.0)]
    return outcome(lambda: [p.attention(*tensors(p, v)).max().item() for p, v in order])


def gather_different_things(rank: int, what: str) -> tuple[str, str]:
    context = ContextParallel(layout=Contiguous(), timeout_s=2)
    part = context.partition(S + 2 * rank if what == "partition" else S)
    rows = part.local_tokens
    x = {
        "other dims": torch.ones(rows, 3 + rank),
        "dtype": torch.ones(rows, 4, dtype=(torch.float32, torch.int32)[rank]),
        "dim": torch.ones(rows, rows),
        "partition": torch.ones(rows, 4),
    }[what]
    return outcome(lambda: part.gather(x, dim=rank if what == "dim" else 0))


def come_late_and_fail(rank: int) -> list[tuple[str, str]]:
    """Rank 0 comes after the others' timeout; rank 1's first call is wrong as well."""
    plan = ContextParallel(layout=Contiguous(), timeout_s=1).plan(S, Full())
    if rank == 0:
        time.sleep(2)
    scale = "a" if rank == 1 else None
    first = outcome(lambda: plan.attention(*tensors(plan, 1.0), scale=scale))
    return [first, *(outcome(lambda: plan.attention(*tensors(plan, 1.0))) for _ in range(2))]
