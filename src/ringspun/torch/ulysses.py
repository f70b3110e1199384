"""Ulysses and USP: a plan whose ranks split heads as well as the sequence.

q, k, v --to_heads--> all rows of a ring's share, some heads --its own plan--> out --to_rows--> this rank's rows

The exchanges are two ops, each the other's backward; between them lies an ordinary plan over one ring of the hybrid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringspun.core.accounting import exchanged
from ringspun.core.degrees import HeadSplit
from ringspun.core.mask import Mask, RowMasks
from ringspun.core.partition import Sides
from ringspun.core.route import Route
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format
from ringspun.torch import inputs
from ringspun.torch.bias import of_heads
from ringspun.torch.exchange import Exchange, Kind, held
from ringspun.torch.execution import described, wire_of
from ringspun.torch.explain import Explanation
from ringspun.torch.kernels import Call, choose
from ringspun.torch.ops import EXCHANGES
from ringspun.torch.plan import Asked, Plan

QUERIES_ALONE = (Kind(False, 0),)
ALL = (Kind(False, 0), Kind(True, 1), Kind(True, 1))
OUT_AND_LSE = (Kind(False, 0), Kind(False, 0))

Told = tuple[HeadSplit, str, float, float]
"""How heads are split, what is asked (``name=value`` a line), scale, softcap."""


class HybridPlan(Plan):
    """A `Plan` of a context whose degrees are two; made and called like any other.

    Args:
        sides: who of the whole group holds what. plans: of each ring that this process plays.
    """

    def __init__(
        self, context: Any, sides: Sides, mask: Mask | RowMasks, plans: tuple[Plan, ...], route: Route
    ) -> None:
        super().__init__(context, sides, mask, plans[0].schedules, route)
        self._plans = plans
        self._exchange = Exchange(
            context.driver, context.pool, context.degrees, sides, self._calls.plan_id, context.checks
        )
        self._exchange_handle = EXCHANGES.add(context.key, self._exchange)
        self._columns, side = self._exchange.columns, self._exchange.sides_here  # a cached property cannot be traced
        self._lengths = [side[0].column_rows, side[1].column_rows, side[0].local_rows, side[1].local_rows]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, return_lse: bool, refused: dict[str, object] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        try:
            inputs.refuse(refused or {})
            q, k, v = inputs.autocast(q, k, v)
            rule, values, call = self._checked(q, k, v, asked)
            split = HeadSplit(q.shape[1], k.shape[1], self._context.degrees.ulysses)
            for u in self._columns:
                kernel = choose(replace(call, heads=held(split, False, u), kv_heads=held(split, True, u)), asked.kernel)
        except Exception as failure:
            self._fail(failure)
            raise
        shared = f"sinks={described(asked.sinks)}\nbias tensor={described(values)}"
        kind = "None" if rule is None else rule.name  # a traced call can write no more of it
        words = f"kernel={kernel.name}\nbias={kind}\n{shared}"
        told = split, words, call.scale, call.softcap
        shares = self._to_heads([q, k, v], ALL, told)
        found: list[Tensor] = []
        for i, (u, plan) in enumerate(zip(self._columns, self._plans, strict=True)):
            mine = shares[3 * i], shares[3 * i + 1], shares[3 * i + 2]
            result = plan._attend(*mine, _of_heads(asked, split, u), return_lse)
            found += (result,) if isinstance(result, Tensor) else result
        made = self._to_rows(found, OUT_AND_LSE if return_lse else QUERIES_ALONE, told)
        return (made[0], made[1]) if return_lse else made[0]

    def _fail(self, failure: Exception) -> None:
        if self._exchange.agreed:
            self._context.driver.report(failure)
        else:
            self._calls.fail(failure)

    def _to_heads(self, xs: list[Tensor], kinds: Sequence[Kind], told: Told) -> list[Tensor]:
        made: list[Tensor]
        *made, _ = to_heads_op(xs, *self._told(kinds, told), None)
        return made

    def _to_rows(self, ys: list[Tensor], kinds: Sequence[Kind], told: Told) -> list[Tensor]:
        made: list[Tensor]
        *made, _ = to_rows_op(ys, *self._told(kinds, told), None)
        return made

    def _told(self, kinds: Sequence[Kind], told: Told) -> tuple[Any, ...]:
        """What the ops are told beside tensors."""
        of_each = [k.keys for k in kinds], [k.message for k in kinds]
        split, *asked = told
        shared = self._exchange_handle, list(self._columns), self._lengths
        return *of_each, [split.heads, split.kv_heads, split.degree], *shared, *asked

    def _ring_wire(self, q: Tensor, k: Tensor, v: Tensor) -> Format:
        split, mine = HeadSplit(q.shape[1], k.shape[1], self._context.degrees.ulysses), self._context.ulysses_rank
        return replace(wire_of(q, k, v), heads=held(split, False, mine), kv_heads=held(split, True, mine))

    def _explained(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, call: Call, rank: int) -> Explanation:
        """Of the ring of a rank; and the bytes that it exchanges for heads."""
        degrees = self._context.degrees
        split = HeadSplit(q.shape[1], k.shape[1], degrees.ulysses)
        place, mine = degrees.place(rank)
        plan = self._plans[0]
        rows = plan._rows
        some = [
            x.new_empty(()).expand(x.shape[0], held(split, keys, mine), rows[keys], x.shape[3])
            for x, keys in ((q, False), (k, True), (v, True))
        ]
        found = plan.explain(*some, **_of_heads(asked, split, mine)._asdict(), ring_rank=place)
        bytes_of = exchanged(split, degrees, self._sides, rank, wire_of(q, k, v))
        return replace(found, exchanged=bytes_of, degrees=degrees, weighed_degrees=self._context.weighed_degrees)


def _of_heads(asked: Asked, split: HeadSplit, ulysses_rank: int) -> Asked:
    """What is asked of the heads of a rank."""
    first, last = split.queries(ulysses_rank)
    sinks = None if asked.sinks is None else asked.sinks[first:last]
    bias = None if asked.bias is None else of_heads(asked.bias, first, last)
    return asked._replace(sinks=sinks, bias=bias)


def hybrid_plan(
    context: Any, sides: Sides, mask: Mask | RowMasks, schedules: tuple[Schedule, ...], route: Route
) -> HybridPlan:
    """The plan of a context with two degrees; `schedules`: of the ring ranks that it plays."""
    plans = tuple(Plan(ring, sides.of_rings, mask, schedules, route) for ring in context.rings)
    return HybridPlan(context, sides, mask, plans, route)


# -- the ops ---------------------------------------------------------------------------------------------------------


def _kinds(keys: Sequence[bool], numbers: Sequence[int]) -> list[Kind]:
    return [Kind(bool(k), int(n)) for k, n in zip(keys, numbers, strict=True)]


def _asked(words: str, scale: float, softcap: float) -> dict[str, str]:
    named = dict(line.split("=", 1) for line in words.split("\n"))
    return {**named, "scale": repr(scale), "softcap": repr(softcap)}


def _number(of: Tensor | None) -> int | None:
    return None if of is None else int(of)


@torch.library.custom_op("ringspun::to_heads", mutates_args=())
def to_heads_op(
    xs: list[Tensor], keys: list[bool], numbers: list[int], split: list[int], handle: int, columns: list[int],
    lengths: list[int], asked: str, scale: float, softcap: float, of: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """`Exchange.to_heads` of a plan; last the number of the call, which ties its backward to it.

    Args:
        keys, numbers: the `Kind` of each of `xs`. split: a `HeadSplit`'s three. columns: that this process plays.
        lengths: rows of queries and of keys in a column; of queries and of keys in this process.
        asked, scale, softcap: what all ranks ask of the attention. of: in backward, the number of the forward call.
    """
    facts = _asked(asked, scale, softcap)
    made, call = EXCHANGES.get(handle).to_heads(xs, _kinds(keys, numbers), HeadSplit(*split), facts, _number(of))
    return [*made, torch.tensor(call)]


@to_heads_op.register_fake
def _(
    xs: list[Tensor], keys: list[bool], numbers: list[int], split: list[int], handle: int, columns: list[int],
    lengths: list[int], asked: str, scale: float, softcap: float, of: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    parts = HeadSplit(*split)
    made = [
        x.new_empty((x.shape[0], held(parts, bool(of_keys), u), lengths[int(of_keys)], *x.shape[3:]))
        for u in columns
        for x, of_keys in zip(xs, keys, strict=True)
    ]
    return [*made, torch.empty((), dtype=torch.int64, device="cpu")]


@torch.library.custom_op("ringspun::to_rows", mutates_args=())
def to_rows_op(
    xs: list[Tensor], keys: list[bool], numbers: list[int], split: list[int], handle: int, columns: list[int],
    lengths: list[int], asked: str, scale: float, softcap: float, of: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """`Exchange.to_rows` of a plan; arguments, and what comes last, as `to_heads_op`."""
    facts = _asked(asked, scale, softcap)
    made, call = EXCHANGES.get(handle).to_rows(xs, _kinds(keys, numbers), HeadSplit(*split), facts, _number(of))
    return [*made, torch.tensor(call)]


@to_rows_op.register_fake
def _(
    xs: list[Tensor], keys: list[bool], numbers: list[int], split: list[int], handle: int, columns: list[int],
    lengths: list[int], asked: str, scale: float, softcap: float, of: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    made = [
        x.new_empty((x.shape[0], split[int(of_keys)], lengths[2 + int(of_keys)], *x.shape[3:]))
        for x, of_keys in zip(xs[: len(keys)], keys, strict=True)
    ]
    return [*made, torch.empty((), dtype=torch.int64, device="cpu")]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, *ctx.told, _ = inputs
    ctx.save_for_backward(output[-1])


def _to_heads_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *made, _ = to_rows_op(grads[:-1], *ctx.told, *ctx.saved_tensors)
    return made, *[None] * (1 + len(ctx.told))


def _to_rows_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    *made, _ = to_heads_op(grads[:-1], *ctx.told, *ctx.saved_tensors)
    return made, *[None] * (1 + len(ctx.told))


to_heads_op.register_autograd(_to_heads_backward, setup_context=_save)
to_rows_op.register_autograd(_to_rows_backward, setup_context=_save)
