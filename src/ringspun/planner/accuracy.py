"""How well the planner's formulas meet the literature's figures, beside what knows less: a constant, and a scaling law.

Everything here is held by tests; `ringspun plan accuracy` prints it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from ringspun.planner.hardware import GIB
from ringspun.planner.literature import ALST as ALST_ROWS
from ringspun.planner.literature import MAX_CONTEXT, Alst, K, MaxContext
from ringspun.planner.memory import ALST, JAX_2023, METHODS, Method, Recipe, longest
from ringspun.planner.models import model
from ringspun.planner.split import Split

HOST_BYTES = 1.9e12
"""Of a node, arXiv 2506.13996."""
Cell = tuple[MaxContext, Method]
CELLS: tuple[Cell, ...] = tuple(product(MAX_CONTEXT, METHODS))


def printed(cell: Cell) -> int:
    """Tokens that the table prints."""
    row, method = cell
    return row.printed[METHODS.index(method)] * K


@cache
def predicted(cell: Cell, recipe: Recipe = JAX_2023) -> float:
    """Tokens of one device that fit, times the ring's devices where there is a ring; unrounded."""
    row, method = cell
    split = Split(ring=row.shards)
    found = longest(model(row.model), split, memory_bytes=row.memory_gib * GIB, recipe=recipe, method=method)
    return max(1.0, found.tokens / row.shards) * (row.ring if method == "ring" else 1)


def floored(tokens: float, cell: Cell) -> float:
    """As the table prints lengths: a power of two of one device's tokens."""
    row, method = cell
    ring = row.ring if method == "ring" else 1
    return float(2.0 ** math.floor(math.log2(max(tokens / ring, 1)))) * ring


@dataclass(frozen=True)
class Score:
    """Over cells: powers of two between what is predicted and printed.

    Args:
        exact: cells at 0. within_one: at most 1. worst: the most. mean: of all. cells: how many.
    """

    exact: int
    within_one: int
    worst: float
    mean: float
    cells: int


def score(tokens: Callable[[Cell], float], cells: Iterable[Cell] = CELLS) -> Score:
    """How far a way to predict is from the printed cells."""
    off = [abs(math.log2(floored(tokens(cell), cell) / printed(cell))) for cell in cells]
    return Score(sum(d == 0 for d in off), sum(d <= 1 for d in off), max(off), sum(off) / len(off), len(off))


def by_recipe(recipe: Recipe) -> Callable[[Cell], float]:
    """Predictions of the itemised memory."""
    return lambda cell: predicted(cell, recipe)


def constant(known: Sequence[Cell]) -> Callable[[Cell], float]:
    """Predictions of one number per method: the middle one of the known cells (per device)."""

    def per_device(cell: Cell) -> float:
        return printed(cell) / (cell[0].ring if cell[1] == "ring" else 1)

    middle = {m: sorted(per_device(c) for c in known if c[1] == m) for m in METHODS}
    return lambda cell: middle[cell[1]][len(middle[cell[1]]) // 2] * (cell[0].ring if cell[1] == "ring" else 1)


def scaling_law(known: Sequence[Cell]) -> Callable[[Cell], float]:
    """Predictions of s = a (M - 16 P / n) / (4 h L), its square root over heads for vanilla;
    one `a` per method, fitted."""

    def law(cell: Cell, factor: float) -> float:
        row, method = cell
        sizes = model(row.model)
        free = row.memory_gib * GIB - 16 * sizes.parameters / row.shards
        if method == "vanilla":
            return factor * math.sqrt(free / (4 * sizes.heads))
        return factor * free / (4 * sizes.hidden * sizes.layers) * (row.ring if method == "ring" else 1)

    def fitted(method: Method) -> float:
        cells = [c for c in known if c[1] == method]

        def cost(factor: float) -> tuple[float, float]:
            found = score(lambda c: law(c, factor), cells)
            return -found.exact, found.mean

        return min((math.exp(n / 20) for n in range(-60, 21)), key=cost)

    factors = {m: fitted(m) for m in METHODS}
    return lambda cell: law(cell, factors[cell[1]])


def choices() -> list[Recipe]:
    """Recipes that leave-one-hardware-out chooses from: what the paper does not say, around `JAX_2023`."""
    grid = product((0.7, 0.75, 0.8, 0.9), (0.0, 0.5, 1.0), (2.0, 5.0), (1.0, 2.0, 3.0))
    names = ("usable", "kept_hidden", "score_copies", "logit_copies")
    return [JAX_2023.model_copy(update=dict(zip(names, values, strict=True))) for values in grid]


def chosen(known: Sequence[Cell]) -> Callable[[Cell], float]:
    """Predictions of whichever recipe is best on the known cells."""

    def cost(recipe: Recipe) -> tuple[int, int, float]:
        found = score(by_recipe(recipe), known)
        return -found.exact, -found.within_one, found.mean

    return by_recipe(min(choices(), key=cost))


def held_out(fit: Callable[[Sequence[Cell]], Callable[[Cell], float]]) -> Score:
    """Score of a way to predict on each group of hardware, made from the others alone."""
    found: dict[Cell, float] = {}
    for group in dict.fromkeys(row.group for row in MAX_CONTEXT):
        way = fit([c for c in CELLS if c[0].group != group])
        found |= {c: way(c) for c in CELLS if c[0].group == group}
    return score(lambda cell: found[cell])


def alst_tokens(row: Alst, recipe: Recipe = ALST) -> float:
    """Tokens that fit by the recipe of arXiv 2506.13996."""
    own = recipe.model_copy(
        update={"offload_weights": row.weights_offloaded, "offload_activations": row.activations_offloaded}
    )
    return longest(
        model(row.model),
        Split(ulysses=row.devices),
        memory_bytes=80 * GIB,
        recipe=own,
        method="blockwise",
        host_bytes=HOST_BYTES * math.ceil(row.devices / 8),
    ).tokens


def alst_errors() -> dict[Alst, float]:
    """Relative error of every length."""
    return {row: alst_tokens(row) / row.tokens - 1 for row in ALST_ROWS}
