"""The op pair: ``ringspun::attention`` and ``ringspun::attention_backward``.

Eager, compiled and checkpointed runs all go through these two. Plans enter as int handles: a distinct string or object
per call would recompile a graph for every new plan, an int does not. The registry also holds the plans used last,
because backward may come after the caller dropped its plan.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ringspun.errors import NotDifferentiable, RingspunError
from ringspun.torch.kernels.base import Terms, accumulator_dtype
from ringspun.torch.recent import Recent

if TYPE_CHECKING:
    from ringspun.torch import halo
    from ringspun.torch.exchange import Exchange

KEPT_PER_CONTEXT = 1024
KEPT_CONTEXTS = 64
KEPT_FUNCTIONS = 256


class Held(Protocol):
    """What a handle stands for."""

    @property
    def holds_function(self) -> bool:
        """Whether it holds a bias function, and so whatever that holds."""

    @property
    def n_bytes(self) -> int:
        """About what it takes in memory."""


H = TypeVar("H", bound=Held)


class Executable(Held, Protocol):
    """A plan with the options of a call fixed."""

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, kept: Tensor
    ) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """``(out, lse)`` of the rows that this process holds; the number of the call, and a mark of its bias. `kept`,
        where it is not empty, is filled with what backward wants of the blocks that came."""

    def run_backward(
        self,
        grads: Grads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        out: Tensor,
        lse: Tensor,
        call: tuple[int, int],
        kept: Tensor,
    ) -> tuple[Tensor, ...]:
        """``(dq, dk, dv, dsinks, dbias)``, the last two this process's shares and in the accumulators' dtype (empty
        where there is no such input); `call` and `kept` are what the forward call gave."""


class Grads(NamedTuple):
    """Incoming gradients of out and lse, and which of q, k, v, sinks and bias need theirs."""

    dout: Tensor
    dlse: Tensor | None
    needs: tuple[bool, ...]


class Registry(Generic[H]):
    """What ops are told of by handle: executables, exchanges. One lives as long as its plan does; and without its plan,
    for a backward that is still to come, while it is among the last that its context used (`kept`, and 256 MiB of them;
    of those with a bias function, `kept_functions`), and the context among the last `contexts`."""

    def __init__(
        self, kept: int = KEPT_PER_CONTEXT, contexts: int = KEPT_CONTEXTS, kept_functions: int = KEPT_FUNCTIONS
    ) -> None:
        self._numbers = itertools.count(1)
        self._alive: weakref.WeakValueDictionary[int, H] = weakref.WeakValueDictionary()
        self._context_of: dict[int, int] = {}
        self._recent: OrderedDict[int, tuple[Recent[int, H], Recent[int, H]]] = OrderedDict()
        self._kept, self._contexts, self._kept_functions = kept, contexts, kept_functions

    def add(self, context: int, executable: H) -> int:
        """A new handle."""
        handle = next(self._numbers)
        self._alive[handle] = executable
        self._context_of[handle] = context
        weakref.finalize(executable, self._context_of.pop, handle, None)
        self._use(handle, executable)
        return handle

    def get(self, handle: int) -> H:
        """The executable of a handle, now the one used last.

        Raises:
            RingspunError: gone.
        """
        found = self._alive.get(handle)
        if found is None:
            raise RingspunError(
                f"plan must be held or recently used; got handle {handle}, whose plan was dropped (and {self._kept} "
                f"others of its context, or {self._contexts} other contexts, used since), whose bias function was (and "
                f"{self._kept_functions} others used since), or which is not made yet (a kernel= first named inside a "
                "compiled function). Hold the plan until backward is done, and one bias function for all calls; call "
                "once uncompiled with that kernel."
            )
        self._use(handle, found)
        return found

    def _use(self, handle: int, executable: H) -> None:
        context = self._context_of[handle]
        if context not in self._recent:
            self._recent[context] = Recent(self._kept), Recent(self._kept_functions)
        self._recent[context][executable.holds_function].use(handle, executable, executable.n_bytes)
        self._recent.move_to_end(context)
        if len(self._recent) > self._contexts:
            self._recent.popitem(last=False)


REGISTRY: Registry[Executable] = Registry()
EXCHANGES: Registry[Exchange] = Registry()
HALOS: Registry[halo.Exchange] = Registry()


@torch.library.custom_op("ringspun::attention", mutates_args=())
def attention_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    handle: int,
    scale: float,
    softcap: float,
    kept_bytes: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ring attention of one plan: ``(out, lse, call, kept)``; `call` ties its backward to it: the call's number, and a
    mark of its bias; `kept` are the blocks that the plan leaves to backward, `kept_bytes` long (0: none are)."""
    kept = q.new_empty(kept_bytes, dtype=torch.uint8)
    out, lse, call = REGISTRY.get(handle).run_forward(q, k, v, Terms(scale, softcap, sinks, bias), kept)
    return out, lse, torch.tensor(call), kept


@attention_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    handle: int,
    scale: float,
    softcap: float,
    kept_bytes: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=accumulator_dtype(q.dtype))
    return out, lse, torch.empty(2, dtype=torch.int64, device="cpu"), q.new_empty(kept_bytes, dtype=torch.uint8)


@torch.library.custom_op("ringspun::attention_backward", mutates_args=())
def attention_backward_op(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    call: Tensor,
    kept: Tensor,
    handle: int,
    scale: float,
    softcap: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attention_op` by q, k, v, sinks and bias; those not needed come back empty, because an op cannot
    return None."""
    inputs = (q, k, v, sinks, bias)
    given, terms = Grads(dout, dlse, tuple(needs)), Terms(scale, softcap, sinks, bias)
    numbers = int(call[0]), int(call[1])
    grads = REGISTRY.get(handle).run_backward(given, q, k, v, terms, out, lse, numbers, kept)
    dq, dk, dv, dsinks, dbias = (
        g.to(x.dtype) if need and x is not None else q.new_empty(0)
        for g, need, x in zip(grads, needs, inputs, strict=True)
    )
    return dq, dk, dv, dsinks, dbias


@attention_backward_op.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, bias: Tensor | None,
    out: Tensor, lse: Tensor, call: Tensor, kept: Tensor, handle: int, scale: float, softcap: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv, dsinks, dbias = (
        torch.empty_like(x, memory_format=torch.contiguous_format) if need and x is not None else q.new_empty(0)
        for x, need in zip((q, k, v, sinks, bias), needs, strict=True)
    )
    return dq, dk, dv, dsinks, dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.handle, ctx.scale, ctx.softcap, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse, call, kept = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    needs = list(ctx.needs_input_grad[:5])
    saved = *tensors, out, lse, call, kept
    grads = attention_backward_op(dout, dlse, *saved, ctx.handle, ctx.scale, ctx.softcap, needs)
    return (*(g if need else None for g, need in zip(grads, needs, strict=True)), None, None, None, None)


def _refuse_second_derivative(ctx: Any, *grads: Tensor | None) -> None:
    raise NotDifferentiable(
        "second derivatives of ring attention must not be asked for; they are not defined. "
        "Use create_graph=False; for gradient penalties use scaled_dot_product_attention in one process."
    )


attention_op.register_autograd(_backward, setup_context=_save)
attention_backward_op.register_autograd(_refuse_second_derivative)
