"""The numbers behind a picture of a schedule: what each rank computes and sends at each step, and where in the score
matrix that lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ringspun.core import tiles as tl
from ringspun.core.accounting import bytes_of
from ringspun.core.passes import Pass
from ringspun.core.route.base import NONE, Action, MessageColumn, StepColumn, carried
from ringspun.core.schedule import Schedule
from ringspun.core.ways import Turned
from ringspun.core.wire import Format
from ringspun.pictures.axes import Axes, axes_of, places
from ringspun.pictures.figures.base import MOST_CELLS, Figure, Kind, Rows, cells_note, kinds, one_kind, sums, table
from ringspun.pictures.scene import Scene, edges

MOST_TILES = 4000
"""That are drawn one by one."""
MOST_MESSAGES = 8192
"""As many as a ring of 64 sends in backward, keys and gradients."""


@dataclass(frozen=True)
class PassFigure:
    """One direction. A cell is a rank and a step, or several steps.

    Args:
        travels: "keys" or "queries". steps: edges of the columns.
        kinds: of what is computed ``[rank][column]``. pairs: how many; of one head, as `Pass.pairs` counts them.
        sources: rank that owns the block; -1: several, or none.
        sent: how many messages. messages: each (step that posts it, step that waits for it, whether it is posted
            after the step's tiles, sender, receiver, `Payload`, rank that owns the block, rows, bytes); none where
            there are more than `MOST_MESSAGES`.
        tiles: in the score matrix, each (ring rank, step, place in `ringspun.pictures.figures.base.KINDS`, q0, q1, k0,
            k1, lo, hi), ``lo <= q - k <= hi`` in the coordinates of its axes; none where there are more than
            `MOST_TILES`.
    """

    travels: str
    steps: tuple[int, ...]
    kinds: tuple[tuple[Kind, ...], ...]
    pairs: Rows
    sources: Rows
    sent: int
    messages: Rows
    tiles: Rows


@dataclass(frozen=True)
class ScheduleFigure(Figure):
    """What a ring does, step by step.

    Args:
        ring_size: R. ranks: that are drawn. order: of the axes of the score matrix: "sequence", global positions; or
            "ranks", the rows of rank 0, then those of rank 1, and so on. queries, keys: lengths of the axes (tokens).
        same: whether these are the same tokens, which the same ranks hold (self-attention).
        tokens: query rows of each rank drawn.
    """

    name: ClassVar[str] = "schedule"
    ring_size: int
    ranks: tuple[int, ...]
    order: str
    queries: int
    keys: int
    same: bool
    tokens: tuple[int, ...]
    forward: PassFigure
    backward: PassFigure


def of(scene: Scene, most: int = MOST_CELLS) -> ScheduleFigure:
    """The schedule of a scene, in at most `most` columns of steps."""
    axes = axes_of(scene.sides)
    passes = [_pass(scene, axes, most, backward=backward) for backward in (False, True)]
    count = len(scene.passes(backward=False)[0])
    notes = scene.notes + cells_note(passes[0].steps[1] if len(passes[0].steps) > 1 else 1, "steps", count)
    strides = int(scene.schedules[0].forward.steps[:, StepColumn.STRIDES].max(initial=1))
    strides = min(strides, scene.wire.kv_heads)
    if strides > 1:
        notes += (f"heads in {strides} strides: every pair is computed once in each, for the heads of it",)
    for one, words in zip(passes, ("forward", "backward"), strict=True):
        if not one.tiles and any(any(row) for row in one.pairs):
            notes += (f"{words}: more than {MOST_TILES:,} tiles, which are not drawn one by one",)
        if len(one.messages) < one.sent:
            notes += (f"{words}: {one.sent:,} messages, which are not drawn",)
    sides = scene.sides
    return ScheduleFigure(
        scene.words, notes, scene.ring_size, scene.ranks, axes.order.value, int(sides.queries.seq_len),
        int(sides.keys.seq_len), sides.same, tuple(sides.queries.tokens[list(scene.ranks)].tolist()), *passes,
    )  # fmt: skip


def _pass(scene: Scene, axes: Axes, most: int, *, backward: bool) -> PassFigure:
    passes, blocks = scene.passes(backward=backward), scene.blocks(backward=backward)
    columns, sends = edges(len(passes[0]), most), [_sends(one, scene.wire) for one in passes]
    pairs = np.stack([one.pairs for one in passes])
    return PassFigure(
        passes[0].side.value,
        tuple(columns.tolist()),
        tuple(_kinds(one, columns) for one in passes),
        table(sums(pairs, columns, 1)),
        tuple(_sources(one, mine, columns) for one, mine in zip(passes, blocks, strict=True)),
        sum(map(len, sends)),
        _messages(sends, blocks, scene.wire),
        _tiles(passes, blocks, axes),
    )


def _kinds(one: Pass, columns: NDArray[np.int64]) -> tuple[Kind, ...]:
    found, offsets = kinds(one.tiles[:, tl.REGION]), one.tile_offsets[columns]
    return tuple(one_kind(found[a:b]) for a, b in pairwise(offsets))


def _sources(one: Pass, mine: Schedule | Turned, columns: NDArray[np.int64]) -> tuple[int, ...]:
    if len(columns) <= len(one):
        return (NONE,) * (len(columns) - 1)
    blocks = one.steps[:, StepColumn.SOURCE].tolist()
    return tuple(mine.owner(b) if 0 <= b < mine.whole else NONE for b in blocks)  # a rank without work may name more


def _sends(one: Pass, wire: Format) -> NDArray[np.int64]:
    messages = carried(one.messages, wire.kv_heads)
    sends: NDArray[np.int64] = messages[messages[:, MessageColumn.ACTION] == Action.SEND]
    return sends


def _messages(sends: Sequence[NDArray[np.int64]], blocks: Sequence[Schedule | Turned], wire: Format) -> Rows:
    if sum(map(len, sends)) > MOST_MESSAGES:
        return ()
    found: list[tuple[int, ...]] = []
    for some, mine in zip(sends, blocks, strict=True):
        for m, n_bytes in zip(some.tolist(), bytes_of(some, wire).tolist(), strict=True):
            found.append((
                m[MessageColumn.STEP], m[MessageColumn.DUE], m[MessageColumn.MOMENT], mine.ring_rank,
                m[MessageColumn.PEER], m[MessageColumn.PAYLOAD], mine.owner(m[MessageColumn.SOURCE]),
                m[MessageColumn.ROW1] - m[MessageColumn.ROW0], n_bytes,
            ))  # fmt: skip
    return tuple(sorted(found))


def _tiles(passes: Sequence[Pass], blocks: Sequence[Schedule | Turned], axes: Axes) -> Rows:
    if sum(len(one.tiles) for one in passes) > MOST_TILES:
        return ()
    found: list[tuple[int, ...]] = []
    for one, mine in zip(passes, blocks, strict=True):
        for step in range(len(one)):
            here = places(axes, mine, one.side, int(one.steps[step, StepColumn.SOURCE]), one.tiles_of(step))
            found += [
                (mine.ring_rank, step, kind, *region)
                for kind, region in zip(kinds(here).tolist(), here.tolist(), strict=True)
            ]
            if len(found) > MOST_TILES:
                return ()
    return tuple(found)


def outline(tile: Sequence[int]) -> list[tuple[float, float]]:
    """The corners (q, k) of a tile of a picture, in order: a rectangle of which each bound may cut off a corner. Lines
    run half a pair outside of the outermost pairs, so that the area is about the number of pairs."""
    q0, q1, k0, k1, lo, hi = tile[-6:]
    corners: list[tuple[float, float]] = [(q0, k0), (q0, k1), (q1, k1), (q1, k0)]
    if lo > q0 - (k1 - 1):
        corners = _clipped(corners, 1, lo - 0.5)
    if hi < (q1 - 1) - k0:
        corners = _clipped(corners, -1, -hi - 0.5)
    return corners


def _clipped(corners: list[tuple[float, float]], sign: int, bound: float) -> list[tuple[float, float]]:
    """The part of a convex polygon where ``sign * (q - k) >= bound``."""
    found: list[tuple[float, float]] = []
    for (q, k), (q2, k2) in zip(corners, [*corners[1:], corners[0]], strict=True):
        here, there = sign * (q - k) - bound, sign * (q2 - k2) - bound
        if here >= 0:
            found.append((q, k))
        if here * there < 0:
            part = here / (here - there)
            found.append((q + part * (q2 - q), k + part * (k2 - k)))
    return found
