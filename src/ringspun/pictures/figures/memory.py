"""The numbers behind a picture of memory: what each rank holds at the worst moment of forward + backward."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import ClassVar

from ringspun.core import accounting
from ringspun.pictures.figures.base import Figure, Rows
from ringspun.pictures.scene import FEWEST_RANKS, Scene, spread

MOST_STEPS = 1 << 12
"""Of all ranks that are counted together."""
ITEMS = tuple(field.name for field in fields(accounting.Memory))
"""What is counted, in order: see `ringspun.core.accounting.Memory`."""


@dataclass(frozen=True)
class MemoryFigure(Figure):
    """Bytes of each rank, a kernel's workspace excepted.

    Args:
        ranks: that are drawn. tokens: of each. items: names of the columns. held: bytes ``[rank][item]``.
        whole: bytes of one rank alone with the whole sequence, by item; what the ring spares each rank.
    """

    name: ClassVar[str] = "memory"
    ring_size: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    items: tuple[str, ...]
    held: Rows
    whole: tuple[int, ...]


def of(scene: Scene) -> MemoryFigure:
    """The memory of a scene; of large rings of few ranks, for each is counted step by step."""
    ranks = spread(scene.ranks, max(FEWEST_RANKS, MOST_STEPS // scene.ring_size))
    held = tuple(
        astuple(accounting.memory(schedule, scene.wire, way))
        for schedule, way in zip(scene.schedules, scene.ways, strict=True)
        if schedule.ring_rank in ranks
    )
    alone = scene.alone()
    whole = astuple(accounting.memory(alone.schedules[0], scene.wire, alone.ways[0]))
    tokens = tuple(scene.sides.queries.tokens[list(ranks)].tolist())
    return MemoryFigure(scene.words, scene.notes_of(ranks), scene.ring_size, ranks, tokens, ITEMS, held, whole)
