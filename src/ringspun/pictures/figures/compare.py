"""The numbers behind a comparison: layouts and routes side by side for one mask, length and ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringspun.core.text import shown
from ringspun.errors import ConfigError
from ringspun.pictures.figures import balance, memory, timeline
from ringspun.pictures.figures.base import MOST_CELLS, Figure
from ringspun.pictures.scene import Scene, edges
from ringspun.planner.ring import Place, Work


@dataclass(frozen=True)
class Way:
    """One layout and route.

    Args:
        tokens: of the emptiest and the fullest rank. imbalance: forward, pairs of the busiest rank over the mean, step
            by step (of several steps together the largest). wait: forward and backward, see
            `ringspun.core.accounting.wait`.
        sent_bytes: forward and backward, of the rank that sends most. link_bytes: both, of the busiest link.
        memory_bytes: of the rank that holds most. seconds: predicted, forward and backward.
    """

    layout: str
    route: str
    tokens: tuple[int, int]
    imbalance: tuple[float, ...]
    wait: tuple[float, float]
    sent_bytes: tuple[int, int]
    link_bytes: int
    memory_bytes: int
    seconds: tuple[float, ...]

    @property
    def total_s(self) -> float:
        """Forward and backward."""
        return sum(self.seconds)


@dataclass(frozen=True)
class CompareFigure(Figure):
    """Ways side by side, in the order in which they were asked for."""

    name: ClassVar[str] = "compare"
    ring_size: int
    ways: tuple[Way, ...]

    @property
    def quickest(self) -> int:
        """Place of the way that is predicted to be done first."""
        return min(range(len(self.ways)), key=lambda i: self.ways[i].total_s)


def of(scenes: Sequence[Scene], work: Work, place: Place) -> CompareFigure:
    """Scenes that differ in layout and route alone.

    Raises:
        ConfigError: none.
    """
    if not scenes:
        raise ConfigError("ways must be at least one layout or route; got none. Name some: contiguous zigzag.")
    in_step = not all(scene.all_ranks for scene in scenes)  # one way to predict for all, or times say nothing
    ways = tuple(_way(scene, work, place, in_step=in_step) for scene in scenes)
    notes = scenes[0].notes
    if any(scene.notes != notes for scene in scenes):
        notes = tuple(
            f"{way.layout}, {way.route}: {n}" for way, one in zip(ways, scenes, strict=True) for n in one.notes
        )
    notes += (timeline.IN_STEP,) if in_step else ()
    first = scenes[0].sides.queries
    words = f"{shown(scenes[0].mask, 60)} over {first.seq_len:,} tokens on {first.ring_size:,} ranks"
    return CompareFigure(words, notes, first.ring_size, ways)


def _way(scene: Scene, work: Work, place: Place, *, in_step: bool) -> Way:
    found, tokens = balance.of(scene), scene.sides.queries.tokens
    both = (found.forward, found.backward)
    imbalance = np.array(found.forward.imbalance)
    columns = edges(len(imbalance), MOST_CELLS)
    run = timeline.predicted(scene, work, place, in_step=in_step)
    return Way(
        shown(scene.sides.queries.layout, 40),
        str(scene.route),
        (int(tokens.min()), int(tokens.max())),
        tuple(np.maximum.reduceat(imbalance, columns[:-1]).tolist()),
        (found.forward.wait, found.backward.wait),
        (max(both[0].sent_bytes), max(both[1].sent_bytes)),
        max((forward + backward for _, _, forward, backward in found.links), default=0),
        max(map(sum, memory.of(scene).held)),
        run.seconds,
    )
