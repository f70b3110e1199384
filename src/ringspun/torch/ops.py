"""The op pair: ``ringspun::attention`` and ``ringspun::attention_backward``.

Eager, compiled and checkpointed runs all go through these two. Plans enter as int handles: a distinct string or object
per call would recompile a graph for every new plan, an int does not. The registry holds plans strongly, because
backward may come after the caller dropped its plan.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any, Protocol

import torch
from torch import Tensor

from ringspun.errors import NotDifferentiable, RingspunError
from ringspun.torch.kernels.base import accumulator_dtype

KEPT_PER_CONTEXT = 1024
KEPT_CONTEXTS = 64


class Executable(Protocol):
    """What a handle stands for: a plan with the options of a call fixed."""

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """``(out, lse)`` of the rows that this process holds."""

    def run_backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        scale: float,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """``(dq, dk, dv)``."""


class Registry:
    """Handles of executables, held strongly: the last `kept` of each of the last `contexts` that made any."""

    def __init__(self, kept: int = KEPT_PER_CONTEXT, contexts: int = KEPT_CONTEXTS) -> None:
        self._numbers = itertools.count(1)
        self._all: dict[int, Executable] = {}
        self._of_context: OrderedDict[int, OrderedDict[int, None]] = OrderedDict()
        self._kept, self._contexts = kept, contexts

    def add(self, context: int, executable: Executable) -> int:
        """A new handle; the context's oldest one is dropped when it has more than `kept`."""
        handle = next(self._numbers)
        mine = self._of_context.setdefault(context, OrderedDict())
        mine[handle] = None
        self._all[handle] = executable
        if len(mine) > self._kept:
            self._all.pop(mine.popitem(last=False)[0], None)
        self._of_context.move_to_end(context)
        if len(self._of_context) > self._contexts:
            for old in self._of_context.popitem(last=False)[1]:
                self._all.pop(old, None)
        return handle

    def get(self, handle: int) -> Executable:
        """The executable of a handle.

        Raises:
            RingspunError: dropped, because its context has made more plans since than are kept.
        """
        found = self._all.get(handle)
        if found is None:
            raise RingspunError(
                f"plan must be held; got handle {handle}, which was dropped (after {self._kept} newer plans of its "
                f"context, or {self._contexts} newer contexts) or not yet made (a kernel= first named inside a "
                "compiled function). Run backward sooner and reuse plans; call once uncompiled with that kernel."
            )
        return found


REGISTRY = Registry()


@torch.library.custom_op("ringspun::attention", mutates_args=())
def attention_op(q: Tensor, k: Tensor, v: Tensor, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    """Ring attention of one plan: ``(out, lse)``."""
    return REGISTRY.get(handle).run_forward(q, k, v, scale)


@attention_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int, scale: float) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))


@torch.library.custom_op("ringspun::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention_op`; those not needed come back empty, because an op cannot return None."""
    needs = (needs_q, needs_k, needs_v)
    grads = REGISTRY.get(handle).run_backward(dout, dlse, q, k, v, out, lse, scale, needs)
    dq, dk, dv = (g if need else x.new_empty(0) for g, need, x in zip(grads, needs, (q, k, v), strict=True))
    return dq, dk, dv


@attention_backward_op.register_fake
def _(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    scale: float,
    needs_q: bool,
    needs_k: bool,
    needs_v: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need else x.new_empty(0)
        for x, need in ((q, needs_q), (k, needs_k), (v, needs_v))
    )
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.handle, ctx.scale = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    needs = ctx.needs_input_grad[:3]
    grads = attention_backward_op(dout, dlse, q, k, v, out, lse, ctx.handle, ctx.scale, *needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None)


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise NotDifferentiable(
        "second derivatives of ring attention must not be asked for; they are not defined. "
        "Use create_graph=False, or the `eager` kernel's formulas in one process for gradient penalties."
    )


attention_op.register_autograd(_backward, setup_context=_save)
attention_backward_op.register_autograd(_refuse_second_derivative)
