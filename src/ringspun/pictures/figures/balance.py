"""The numbers behind a picture of balance: pairs of each rank at each step, and bytes of each link."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringspun.core import accounting
from ringspun.core.passes import Pass
from ringspun.pictures.figures.base import MOST_CELLS, Figure, Rows, cells_note, sums, table
from ringspun.pictures.scene import Scene, edges

MOST_LINKS = 256
"""That are listed: those with most bytes."""


@dataclass(frozen=True)
class PassBalance:
    """One direction.

    Args:
        steps: edges of the columns. pairs: of each rank and column, of one head. imbalance: of each *step*, pairs of
            the busiest rank over the mean (of unequal ranks, times). wait: of a clock that waits for the busiest rank
            at every step, over that of perfect balance. flops, sent_bytes: of each rank.
    """

    steps: tuple[int, ...]
    pairs: Rows
    imbalance: tuple[float, ...]
    wait: float
    flops: tuple[int, ...]
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True)
class BalanceFigure(Figure):
    """Work per rank and step, and what goes over the links.

    Args:
        ranks: that are drawn. tokens: of each. links: (sender, receiver, bytes forward, bytes backward), most first.
    """

    name: ClassVar[str] = "balance"
    ring_size: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    forward: PassBalance
    backward: PassBalance
    links: Rows


def of(scene: Scene, most: int = MOST_CELLS) -> BalanceFigure:
    """The balance of a scene, in at most `most` columns of steps."""
    directions = [scene.passes(backward=back) for back in (False, True)]
    counts = [
        [accounting.account(one, scene.wire, backward=back) for one in passes]
        for passes, back in zip(directions, (False, True), strict=True)
    ]
    forward, backward = (_balance(p, c, scene, most) for p, c in zip(directions, counts, strict=True))
    links: list[Counter[tuple[int, int]]] = [Counter(), Counter()]
    for found, accounts in zip(links, counts, strict=True):
        for rank, account in zip(scene.ranks, accounts, strict=True):
            found.update({(rank, peer): n_bytes for peer, n_bytes in account.sent_bytes.items()})
    heaviest = (links[0] + links[1]).most_common(MOST_LINKS)
    notes = scene.notes + cells_note(forward.steps[1] if len(forward.steps) > 1 else 1, "steps", len(directions[0][0]))
    if len(links[0] | links[1]) > MOST_LINKS:
        notes += (f"{MOST_LINKS} links of {len(links[0] | links[1]):,}, those with most bytes",)
    return BalanceFigure(
        scene.words, notes, scene.ring_size, scene.ranks,
        tuple(scene.sides.queries.tokens[list(scene.ranks)].tolist()), forward, backward,
        tuple((*edge, links[0][edge], links[1][edge]) for edge, _ in heaviest),
    )  # fmt: skip


def _balance(passes: list[Pass], counts: list[accounting.Account], scene: Scene, most: int) -> PassBalance:
    columns = edges(len(passes[0]), most)
    return PassBalance(
        tuple(columns.tolist()),
        table(sums(np.stack([c.pairs for c in counts]), columns, 1)),
        tuple(accounting.imbalance(passes, scene.speeds).tolist()),
        accounting.wait(passes, scene.speeds),
        tuple(c.flops for c in counts),
        tuple(c.total_sent_bytes for c in counts),
    )
