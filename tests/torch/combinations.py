"""Random attention calls: any mask, layout, ring, lengths and arguments together. By Hypothesis, or a fixed sample."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from tests.core.strategies import Scattered, layouts, masks

from ringspun import (
    Anchors,
    Band,
    Blocks,
    Causal,
    Chunks,
    Contiguous,
    Documents,
    Full,
    Layout,
    Mask,
    Prefix,
    Striped,
    Window,
    Zigzag,
)
from ringspun.testing.cases import Arguments, Case, Shape

BIASES = ("", "alibi", "table", "function")
LONGEST = 40


@st.composite
def cases(draw, most_ranks: int = 6) -> Case:
    """Every argument of a plan and of a call, drawn by itself; dtype float64.

    Layouts that deal by documents refuse queries that do not start at 0 and rows whose documents differ.
    """
    shape = draw(shapes())
    seq_len = draw(st.integers(0, LONGEST))
    layout, sides = draw(layouts()), {}
    if draw(st.booleans()):
        sides["key_len"] = draw(st.integers(0, LONGEST))
        sides["query_start"] = 0 if layout.reads_documents else draw(st.integers(-LONGEST - 5, LONGEST + 5))
        sides["key_layout"] = draw(st.sampled_from([None, _meeting(layout, draw(st.integers(0, 10_000)))]))
    one = masks(sides.get("key_len", seq_len), leaves=3)
    per_row = shape.batch > 0 and not layout.reads_documents and draw(st.booleans())
    mask = tuple(draw(st.lists(one, min_size=shape.batch, max_size=shape.batch))) if per_row else draw(one)
    ranks, seed = draw(st.integers(1, most_ranks)), draw(st.integers(0, 99))
    return Case(ranks, seq_len, mask, layout, "float64", shape, seed, draw(arguments()), **sides)


@st.composite
def shapes(draw) -> Shape:
    """Sizes of all kinds, no batch row and one of everything among them."""
    size, kv_heads = st.integers(1, 7), draw(st.integers(1, 3))
    return Shape(draw(st.integers(0, 3)), kv_heads * draw(st.integers(1, 3)), kv_heads, draw(size), draw(size))


def arguments() -> st.SearchStrategy[Arguments]:
    """What a call asks for."""
    scale, softcap = (st.none() | st.sampled_from(some) for some in ((0.0, 0.3, 1.0, -0.7), (0.4, 3.0, 50.0)))
    return st.builds(Arguments, scale, softcap, st.booleans(), st.sampled_from(BIASES))


def _meeting(layout: Layout, seed: int) -> Layout:
    """Another layout whose runs have the step of `layout`, so that the two may meet."""
    if isinstance(layout, Striped):
        return layout
    return Scattered(seed, layout.step if isinstance(layout, Scattered) else 1)


def kernels(case: Case) -> list[str | None]:
    """Those that do not refuse a case, and the default choice."""
    asked = case.arguments
    plain = asked.softcap is None and not asked.bias and (asked.scale is None or asked.scale > 0)
    return [None, "eager", "aten_cpu"] if plain else [None, "eager"]


# -- a fixed sample, the same on every machine: Python's own generator, which never changes its numbers ----------------


def sample(count: int, seed: int, ranks: int) -> list[Case]:
    """`count` cases for a ring of `ranks`."""
    draw = random.Random(f"{seed}, {ranks}")
    return [_case(draw, ranks) for _ in range(count)]


def _case(draw: random.Random, ranks: int) -> Case:
    seq_len, kv_heads = draw.randint(0, LONGEST), draw.randint(1, 2)
    layout: Layout = draw.choice(
        [Contiguous(), Zigzag(), Striped(), Scattered(draw.randint(0, 99), draw.randint(1, 3))]
    )
    sides: dict[str, Any] = {}
    if draw.random() < 0.5:
        sides["key_len"] = draw.randint(0, LONGEST)
        sides["query_start"] = draw.randint(-9, LONGEST)
        sides["key_layout"] = draw.choice([None, _meeting(layout, draw.randint(0, 99))])
    batch, keys = draw.randint(1, 3), sides.get("key_len", seq_len)
    rows = tuple(_mask(draw, keys) for _ in range(batch))
    shape = Shape(batch, kv_heads * draw.randint(1, 3), kv_heads, draw.randint(1, 7), draw.randint(1, 7))
    scale, softcap = draw.choice([None, 0.3, -0.7]), draw.choice([None, None, 3.0])
    asked = Arguments(scale, softcap, draw.random() < 0.5, draw.choice(BIASES))
    mask = rows if draw.random() < 0.5 else rows[0]
    return Case(ranks, seq_len, mask, layout, "float64", shape, draw.randint(0, 99), asked, **sides)


def _mask(draw: random.Random, length: int) -> Mask:
    some = draw.randint(1, length + 1)
    edges = sorted(draw.randint(0, length) for _ in range(4))
    docs = Documents(np.diff(edges), edges[:-1])
    blocks = Blocks([[draw.randint(0, 5) for _ in range(draw.randint(0, 3))] for _ in range(5)], length // 5 + 1)
    return draw.choice(
        [
            Full(),
            Causal(),
            Window(some),
            Band(draw.randint(-3, 9), draw.randint(3, 9)),
            docs,
            Causal() & docs,
            docs & (Causal() | Prefix(2, docs)),
            Causal() & (Window(some) | Anchors(2)),
            Causal() & Chunks(some),
            blocks,
            Causal() & blocks | Window(2),
        ]
    )
