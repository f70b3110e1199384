"""Halos: the rows of this process with the n tokens before each, of which other ranks lend some (`ringspun.core.halo`).

    widen    [.., T, ..]  ->  [.., W, ..]      what is borrowed stands ahead of the tokens that need it
    fold     the way back, and the backward of the other: gradients go home, and are summed there in the order of ranks

Messages are those of `ringspun.core.wire`, moved by the group's driver: one to each rank that borrows, and one back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from ringspun.core import halo as core_halo
from ringspun.core import partition as core_partition
from ringspun.core.halo import Integers
from ringspun.core.host import is_integer
from ringspun.core.text import shown
from ringspun.core.wire import Payload
from ringspun.errors import DtypeError, NotDifferentiable, PlanError, RingspunError, ShapeError
from ringspun.torch import sharding
from ringspun.torch.drivers.base import Driver, digest_of
from ringspun.torch.kernels.base import accumulator_dtype
from ringspun.torch.ops import HALOS, KEPT_PER_CONTEXT
from ringspun.torch.recent import Recent
from ringspun.torch.swap import Swap, swapped
from ringspun.torch.uploads import uploaded

if TYPE_CHECKING:
    from ringspun.torch.context import ContextParallel
    from ringspun.torch.partition import Partition

TOPIC = "a halo"
KEPT_READY = 4
"""Of the last new numbers of tokens asked for, how many a new partition is ready for."""


class Halo(NamedTuple):
    """What `Partition.halo` returns.

    Args:
        wide: the rows of this process and what it borrows ``[.., W, ..]``. rows: where in it each of them lies, int64
            ``[T]``; row ``rows[t] - j`` is the j-th token before token t, zeros where its document has none.
    """

    wide: Tensor
    rows: Tensor


class Exchange:
    """The halos of one partition and number of tokens, on the ranks that this process plays.

    Args:
        context: whose driver moves the rows. part: who holds which token. before: tokens ahead of each n.
    """

    holds_function = False

    def __init__(self, context: ContextParallel, part: core_partition.Partition, before: int) -> None:
        self.context, self.part, self.before = context, part, before
        here = context.driver.ring_ranks
        halos = core_halo.halos(part, before, here)
        self.tokens, self.width = part.rows_of(here), sum(halo.width for halo in halos)
        self._loans = []
        rows, kept, at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for rank, halo, mine in zip(here, halos, sharding.slices(part, here), strict=True):
            rows.append(halo.rows + at)
            kept.append(halo.kept + mine.start)
            self._loans.append(_Loans(rank, _moved(halo.sends, mine.start), _moved(halo.receives, at)))
            at += halo.width
        self.rows, self._kept = (torch.from_numpy(np.concatenate(parts)) for parts in (rows, kept))
        self.n_bytes = 8 * (2 * self.tokens + self.width - len(self._kept))
        self._agreed: dict[str, str] = {}

    @cached_property
    def key(self) -> int:
        """7 bytes that stand for the partition, the number of tokens and the context."""
        inputs = self.part.runs.tobytes(), self.part.documents, self.before, self.context.number
        return int.from_bytes(digest_of(inputs)[:7], "little")

    def widen(self, x: Tensor, dim: int, of: int | None) -> tuple[Tensor, int]:
        """Rows -> rows with those before them; and the number of the call.

        Args:
            of: in the backward of `fold`, the number of its call.
        """
        self._agree(TOPIC, x, dim)
        wide = x.new_zeros(_resized(x, dim, self.width))
        kept, rows = uploaded(self._kept, x.device), uploaded(self.rows[self._kept], x.device)
        wide.index_copy_(dim, rows, x if len(kept) == self.tokens else x.index_select(dim, kept))

        def of_rank(loans: _Loans) -> Swap:
            return self._swap(loans, loans.lent, loans.borrowed, x, dim, wide.index_copy_)

        return wide, self._run(of_rank, x.device, of)

    def fold(self, dwide: Tensor, dim: int, of: int | None) -> tuple[Tensor, int]:
        """Gradients of widened rows -> gradients of rows; and the number of the call."""
        self._agree(f"{TOPIC}, backward", dwide, dim)
        exact = accumulator_dtype(dwide.dtype) if dwide.is_floating_point() else dwide.dtype
        dx = dwide.new_zeros(_resized(dwide, dim, self.tokens), dtype=exact)
        kept, rows = uploaded(self._kept, dx.device), uploaded(self.rows[self._kept], dx.device)
        dx.index_copy_(dim, kept, dwide.index_select(dim, rows).to(exact))

        def of_rank(loans: _Loans) -> Swap:
            return self._swap(loans, loans.borrowed, loans.lent, dwide, dim, dx.index_add_, exact)

        number = self._run(of_rank, dx.device, of)
        return dx.to(dwide.dtype), number

    def _swap(
        self, loans: _Loans, gives: dict[int, Tensor], takes: dict[int, Tensor], x: Tensor, dim: int,
        place: Callable[[int, Tensor, Tensor], Tensor], dtype: torch.dtype | None = None,
    ) -> Swap:  # fmt: skip
        """What a rank sends and receives; `place` puts what came into its rows."""
        row = tuple(sorted({loans.rank, *gives, *takes}))
        none = torch.zeros(0, dtype=torch.int64)

        def put(v: int, i: int, part: Tensor) -> None:
            place(dim, uploaded(takes[row[v]], x.device), part)

        sent = [[x.index_select(dim, uploaded(gives.get(peer, none), x.device)).to(dtype or x.dtype)] for peer in row]
        shapes = [[_resized(x, dim, len(takes.get(peer, none)))] for peer in row]
        return Swap(Payload.HALO, loans.rank, row.index(loans.rank), row, sent, shapes, put)

    def _run(self, of_rank: Callable[[_Loans], Swap], device: torch.device, of: int | None) -> int:
        state, checks = self.context.driver.state, self.context.checks
        number, state.calls = state.calls, state.calls + 1
        phase = 0 if of is None else 1 + of  # as in a ring: ranks must not go backward through different calls
        deferred = self.context.driver.defers(device)
        told = self.context.pool, self.key, number, phase, checks.sums(number), deferred
        each = zip(self._loans, state.logs, strict=True)
        self.context.driver.run([swapped(of_rank(loans), [0], *told, log) for loans, log in each])
        return number

    def _agree(self, topic: str, x: Tensor, dim: int) -> None:
        """Agree with all ranks on what is exchanged, whenever it changes: gloo aborts a process for a wrong length."""
        part, driver, others = self.part, self.context.driver, [n for i, n in enumerate(x.shape) if i != dim]
        fields = {"before": str(self.before), "dim": str(dim), "other sizes": str(others), "dtype": str(x.dtype)}
        text, sizes = repr(fields), repr((topic, self.key))
        if self._agreed.get(topic) == text and driver.state.agreed_sizes == sizes:
            return
        named = {"seq_len": part.seq_len, "layout": part.layout, "documents": part.documents}
        driver.agree(TOPIC, digest_of((text, sizes)), fields | {name: shown(value) for name, value in named.items()})
        self._agreed[topic] = text
        driver.state.agreed_sizes = sizes


class _Loans(NamedTuple):
    """Rows that a rank lends and borrows, per peer, as they lie in this process's tensors."""

    rank: int
    lent: dict[int, Tensor]
    borrowed: dict[int, Tensor]


def _moved(rows: dict[int, Integers], by: int) -> dict[int, Tensor]:
    return {peer: torch.from_numpy(x + by) for peer, x in rows.items()}


def _resized(x: Tensor, dim: int, size: int) -> tuple[int, ...]:
    return (*x.shape[:dim], size, *x.shape[dim + 1 :])


class Ready(NamedTuple):
    """What a call needs to know, as plain values that a traced one can guard on; and what keeps its handle alive."""

    handle: int
    tokens: int
    width: int
    rows: Tensor
    exchange: Exchange


class Halos:
    """The halos of one context; `asked`: the numbers of tokens that later partitions shall be ready for."""

    def __init__(self, context: ContextParallel) -> None:
        self._context = context
        self._kept: Recent[tuple[core_partition.Partition, int], Ready] = Recent(KEPT_PER_CONTEXT)
        self.asked: tuple[int, ...] = ()

    def of(self, part: core_partition.Partition, before: int) -> Ready:
        """That of a partition, made where there is none yet."""
        found = self._kept.get((part, before))
        if found is None:
            made = Exchange(self._context, part, before)
            found = Ready(HALOS.add(self._context.key, made), made.tokens, made.width, made.rows, made)
        self._kept.use((part, before), found, found.exchange.n_bytes)
        if before not in self.asked:
            self.asked = (*self.asked, before)[-KEPT_READY:]
        return found

    def ready(self, part: core_partition.Partition) -> dict[int, Ready]:
        """Those that were asked for, for a partition."""
        return {before: self.of(part, before) for before in self.asked}


def widened(part: Partition, x: Tensor, before: int, dim: int) -> Halo:
    """See `ringspun.torch.Partition.halo`."""
    try:
        ready = _ready(part, before)
        dim = _checked(part, ready.tokens, x, dim)
    except RingspunError as failure:
        tell(part, failure)
        raise
    wide, _ = widen_op(x, ready.handle, dim, [ready.tokens, ready.width], None)
    return Halo(wide, ready.rows.to(x.device))


def tell(part: Partition, failure: RingspunError) -> None:
    """Tell the other ranks of a failure of this one: in their agreement on the call, or, where the last call was such a
    one, so that they may need none, by a note."""
    driver: Driver = part.context.driver
    if TOPIC not in driver.state.agreed_sizes:
        driver.agree(TOPIC, bytes(32), {}, failure)
    driver.report(failure)


def _ready(part: Partition, before: int) -> Ready:
    found = part.halos.get(before) if is_integer(before) and not isinstance(before, bool) else None
    if found is not None:
        return found
    if torch.compiler.is_compiling():
        raise RingspunError(
            f"halo must be called once uncompiled with before={before}; got its first use in a compiled function. "
            "Later partitions of the context need none."
        )
    if not is_integer(before) or before < 0:
        raise PlanError(f"before (of shift: by) must be an integer >= 0 (tokens); got {before!r}.")
    if part.row_documents is not None:
        raise PlanError(
            "halo must know one division into documents for all batch rows; got a plan whose rows differ. Call it per "
            "row, on partitions with the documents of each."
        )
    if part.core.start:
        raise PlanError(
            f"halo must hold a sequence from its first token; got one that starts at {part.core.start}. Use a "
            "partition of these tokens alone: context.partition(seq_len)."
        )
    part.halos[int(before)] = part.context.halos.of(part.core, int(before))
    return part.halos[int(before)]


_NOT_INDEXED = (torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)


def _checked(part: Partition, tokens: int, x: Tensor, dim: int) -> int:
    """`dim` counted from 0; raises unless `x` holds this process's rows there."""
    where, movable = f"(ring rank {part.context.rank})", part.context.driver.devices
    if type(x).__name__ == "DTensor":
        raise DtypeError(f"x must be a plain tensor {where}; got a DTensor. Pass its `.to_local()`.")
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested:
        raise DtypeError(f"x must be a dense tensor {where}; got {x.layout if isinstance(x, Tensor) else type(x)}.")
    if movable is not None and x.device.type not in movable:
        raise DtypeError(f"x must be on {' or '.join(movable)} for this group {where}; got {x.device}.")
    if x.dtype in _NOT_INDEXED:
        raise DtypeError(f"x must be of a dtype whose rows torch can place {where}; got {x.dtype}. Convert it.")
    if not torch.compiler.is_compiling() and forward_ad.unpack_dual(x).tangent is not None:  # type: ignore[no-untyped-call]
        raise NotDifferentiable(
            f"x must not carry a forward-mode tangent {where}; halos have derivatives in reverse mode only. "
            "Use torch.autograd.grad or backward."
        )
    if not is_integer(dim) or not -x.ndim <= dim < x.ndim or x.shape[dim] != tokens:
        raise ShapeError(f"x must hold {tokens} tokens along dim {dim} {where}; got shape {tuple(x.shape)}.")
    return int(dim) % x.ndim


# -- the ops, each the other's backward --------------------------------------------------------------------------------


def _number(of: Tensor | None) -> int | None:
    return None if of is None else int(of)


@torch.library.custom_op("ringspun::widen", mutates_args=())
def widen_op(x: Tensor, handle: int, dim: int, lengths: list[int], of: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Exchange.widen`; last the number of the call, which ties its backward to it.

    Args:
        lengths: rows of this process, and widened. of: in a backward, the number of the forward call.
    """
    wide, call = HALOS.get(handle).widen(x, dim, _number(of))
    return wide, torch.tensor(call)


@widen_op.register_fake
def _(x: Tensor, handle: int, dim: int, lengths: list[int], of: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(_resized(x, dim, lengths[1])), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("ringspun::fold", mutates_args=())
def fold_op(dwide: Tensor, handle: int, dim: int, lengths: list[int], of: Tensor | None) -> tuple[Tensor, Tensor]:
    """`Exchange.fold`; arguments, and what comes last, as `widen_op`."""
    dx, call = HALOS.get(handle).fold(dwide, dim, _number(of))
    return dx, torch.tensor(call)


@fold_op.register_fake
def _(dwide: Tensor, handle: int, dim: int, lengths: list[int], of: Tensor | None) -> tuple[Tensor, Tensor]:
    return dwide.new_empty(_resized(dwide, dim, lengths[0])), torch.empty((), dtype=torch.int64, device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, *ctx.told, _ = inputs
    ctx.save_for_backward(output[1])


def _widen_backward(ctx: Any, dwide: Tensor, _: None) -> tuple[Any, ...]:
    dx, _call = fold_op(dwide, *ctx.told, *ctx.saved_tensors)
    return dx, None, None, None, None


def _fold_backward(ctx: Any, dx: Tensor, _: None) -> tuple[Any, ...]:
    wide, _call = widen_op(dx, *ctx.told, *ctx.saved_tensors)
    return wide, None, None, None, None


widen_op.register_autograd(_widen_backward, setup_context=_save)
fold_op.register_autograd(_fold_backward, setup_context=_save)
