"""Exchanges of heads for rows among ranks that hold one share of the sequence together (Ulysses).

    to_heads     [B, H, t, D] of every rank  ->  [B, H of the rank, T, D]       t: its rows; T: those of all of them
    to_rows      the way back, and the backward of the other; KV heads that several ranks held are summed

Messages are those of `ringspun.core.wire`, moved by the group's driver: headers, checksums, timeouts and step logs are
the ring's.

Source: DeepSpeed-Ulysses, arXiv 2309.14509; with a ring, USP, arXiv 2405.07719.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspun.core.checks import Checks
from ringspun.core.degrees import Degrees, HeadSplit
from ringspun.core.partition import Partition, Sides
from ringspun.core.wire import Payload
from ringspun.torch import sharding
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers import Driver
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.kernels.base import accumulator_dtype
from ringspun.torch.swap import Swap, swapped
from ringspun.torch.uploads import uploaded

TOPIC = "an exchange of heads"


class Kind(NamedTuple):
    """What a tensor of an exchange is: heads and rows of queries, or of keys and values; `message`: which tensors
    travel together (those of one number, counted from 0)."""

    keys: bool
    message: int


@dataclass(eq=False)
class Exchange:
    """The exchanges of one plan.

    Args:
        driver: of the whole group. degrees: its two. sides: who of the group holds which query and key. plan_id:
            7 bytes.
    """

    driver: Driver
    pool: BufferPool
    degrees: Degrees
    sides: Sides
    plan_id: int
    checks: Checks
    agreed: dict[str, str] = field(default_factory=dict)
    holds_function = False
    n_bytes = 1024

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """The Ulysses ranks that this process plays."""
        return tuple(sorted({self.degrees.place(rank)[1] for rank in self.driver.ring_ranks}))

    def to_heads(
        self, xs: Sequence[Tensor], kinds: Sequence[Kind], split: HeadSplit, asked: dict[str, str], of: int | None
    ) -> tuple[list[Tensor], int]:
        """Rows of all heads -> all rows of some: per column of this process a tensor for each of `xs`; and the number
        of the call.

        Args:
            asked: what all ranks ask of the attention. of: in backward, the number of the forward call.
        """
        self._agree(xs, kinds, split, asked)
        count = len(xs)
        made = [
            x.new_empty((x.shape[0], held(split, kind.keys, u), self._side(kind).column_rows, *x.shape[3:]))
            for u in self.columns
            for x, kind in zip(xs, kinds, strict=True)
        ]

        def of_rank(rank: int) -> Swap:
            ring_rank, mine = self.degrees.place(rank)
            row, into = self.degrees.row(ring_rank), made[self.columns.index(mine) * count :][:count]

            def put(v: int, i: int, x: Tensor) -> None:
                rows, copies = self._side(kinds[i]).in_column(row[v]), list(split.held(mine))
                copied = kinds[i].keys and copies != list(range(x.shape[1]))
                into[i][:, :, rows] = x[:, copies] if copied else x

            sent = [
                [_heads(x, split, k.keys, v)[:, :, self._side(k).here(rank)] for x, k in zip(xs, kinds, strict=True)]
                for v in range(len(row))
            ]
            shapes = [
                [
                    _shape(x, _span(split, k.keys, mine), self._side(k).tokens(peer))
                    for x, k in zip(xs, kinds, strict=True)
                ]
                for peer in row
            ]
            return Swap(Payload.HEADS, rank, mine, row, sent, shapes, put)

        return made, self._run(of_rank, kinds, xs[0].device, of)

    def to_rows(
        self, ys: Sequence[Tensor], kinds: Sequence[Kind], split: HeadSplit, asked: dict[str, str], of: int | None
    ) -> tuple[list[Tensor], int]:
        """All rows of some heads -> rows of all; `ys`: per column of this process, as `to_heads` gives them."""
        count = len(kinds)
        first = ys[:count]
        self._agree(first, kinds, split, asked)
        summed = [kind.keys and split.shared for kind in kinds]
        made = []
        for y, kind, sums in zip(first, kinds, summed, strict=True):
            shape = _shape(y, split.kv_heads if kind.keys else split.heads, self._side(kind).local_rows)
            made.append(y.new_zeros(shape, dtype=accumulator_dtype(y.dtype)) if sums else y.new_empty(shape))

        def of_rank(rank: int) -> Swap:
            ring_rank, mine = self.degrees.place(rank)
            row, column = self.degrees.row(ring_rank), ys[self.columns.index(mine) * count :][:count]
            own = [_folded(y, split, mine) if kind.keys else y for y, kind in zip(column, kinds, strict=True)]

            def put(v: int, i: int, x: Tensor) -> None:
                into = _heads(made[i], split, kinds[i].keys, v)[:, :, self._side(kinds[i]).here(rank)]
                if summed[i]:
                    into += x
                else:
                    into.copy_(x)

            sent = [
                [y[:, :, self._side(kind).in_column(peer)] for y, kind in zip(own, kinds, strict=True)] for peer in row
            ]
            shapes = [
                [
                    _shape(y, _span(split, k.keys, v), self._side(k).tokens(rank))
                    for y, k in zip(own, kinds, strict=True)
                ]
                for v in range(len(row))
            ]
            return Swap(Payload.HEADS, rank, mine, row, sent, shapes, put)

        number = self._run(of_rank, kinds, first[0].device, of)
        return [x.to(y.dtype) for x, y in zip(made, first, strict=True)], number

    def _run(self, of_rank: Callable[[int], Swap], kinds: Sequence[Kind], device: torch.device, of: int | None) -> int:
        state = self.driver.state
        number, state.calls = state.calls, state.calls + 1
        phase = 0 if of is None else 1 + of  # as in a ring: ranks must not go backward through different calls
        ranks = zip(self.driver.ring_ranks, state.logs, strict=True)
        numbers = [kind.message for kind in kinds]
        deferred = self.driver.defers(device)
        told = self.plan_id, number, phase, self.checks.sums(number), deferred
        self.driver.run([swapped(of_rank(rank), numbers, self.pool, *told, log) for rank, log in ranks])
        return number

    def _agree(self, xs: Sequence[Tensor], kinds: Sequence[Kind], split: HeadSplit, asked: dict[str, str]) -> None:
        """Agree with all ranks on what is exchanged, whenever it changes: gloo aborts a process for a wrong length. And
        on what is asked of the attention between: ranks of one ring alone agree on it there."""
        fields = asked | {"heads": str(split), "tensors": str([str(k) for k in kinds])}
        fields |= {"dtypes": str([str(x.dtype) for x in xs]), "sizes": str([(x.shape[0], *x.shape[3:]) for x in xs])}
        topic = f"{TOPIC} of {len(kinds)}"
        text, sizes = repr(sorted(fields.items())), repr((TOPIC, self.plan_id))
        if self.agreed.get(topic) == text and self.driver.state.agreed_sizes == sizes:
            return
        self.driver.agree(topic, digest_of((topic, text, sizes)), fields)
        self.agreed[topic] = text
        self.driver.state.agreed_sizes = sizes

    def _side(self, kind: Kind) -> Side:
        return self.sides_here[kind.keys]

    @cached_property
    def sides_here(self) -> tuple[Side, Side]:
        """Where rows of queries lie in the tensors of this process, and rows of keys."""
        return Side(self.sides.queries, self.degrees, self.driver), Side(self.sides.keys, self.degrees, self.driver)


@dataclass(frozen=True)
class Side:
    """Where the rows of queries, or of keys, lie in the tensors of this process.

    Args:
        part: who of the group holds which.
    """

    part: Partition
    degrees: Degrees
    driver: Driver

    @cached_property
    def local_rows(self) -> int:
        """Rows that this process holds."""
        return self.part.rows_of(self.driver.ring_ranks)

    @cached_property
    def column_rows(self) -> int:
        """Rows of a column of this process: the shares of all its ring ranks."""
        return sum(self.tokens(peer) for ring_rank in self._ring_ranks for peer in self.degrees.row(ring_rank))

    @cached_property
    def _ring_ranks(self) -> list[int]:
        return sorted({self.degrees.place(rank)[0] for rank in self.driver.ring_ranks})

    @cached_property
    def _here(self) -> dict[int, slice]:
        ranks = self.driver.ring_ranks
        return dict(zip(ranks, sharding.slices(self.part, ranks), strict=True))

    @cached_property
    def _in_column(self) -> dict[int, slice]:
        order = [peer for ring_rank in self._ring_ranks for peer in self.degrees.row(ring_rank)]
        return dict(zip(order, sharding.slices(self.part, order), strict=True))

    def tokens(self, rank: int) -> int:
        """Rows of a rank."""
        return int(self.part.tokens[rank])

    def here(self, rank: int) -> slice:
        """Of a rank of this process among its rows."""
        return self._here[rank]

    def in_column(self, rank: int) -> slice:
        """Of any rank of a row of this process among the rows of a column."""
        return self._in_column[rank]


def held(split: HeadSplit, keys: bool, ulysses_rank: int) -> int:
    """Heads that a rank computes with."""
    return len(split.held(ulysses_rank)) if keys else _span(split, keys, ulysses_rank)


def _span(split: HeadSplit, keys: bool, ulysses_rank: int) -> int:
    first, last = split.keys(ulysses_rank) if keys else split.queries(ulysses_rank)
    return last - first


def _heads(x: Tensor, split: HeadSplit, keys: bool, ulysses_rank: int) -> Tensor:
    """The heads of a rank, out of all."""
    first, last = split.keys(ulysses_rank) if keys else split.queries(ulysses_rank)
    return x[:, first:last]


def _folded(y: Tensor, split: HeadSplit, ulysses_rank: int) -> Tensor:
    """Gradients of the KV heads that a rank computed with, summed over those that are the same one."""
    copies, span = split.held(ulysses_rank), _span(split, True, ulysses_rank)
    if copies == tuple(range(span)):
        return y
    wide = y.new_zeros((y.shape[0], span, *y.shape[2:]), dtype=accumulator_dtype(y.dtype))
    wide.index_add_(1, uploaded(np.array(copies), y.device), y.to(wide.dtype))
    return wide.to(y.dtype)


def _shape(x: Tensor, heads: int, rows: int) -> tuple[int, ...]:
    return (x.shape[0], heads, rows, *x.shape[3:])
