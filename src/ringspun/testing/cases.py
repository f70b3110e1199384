"""The cases that `ringspun check`, the tests and the benchmarks share: plain data, no framework."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ringspun.core.layout import Contiguous, Layout, Striped, Zigzag
from ringspun.core.mask import Anchors, Band, Blocks, Causal, Chunks, Documents, Full, Mask, Prefix, Window
from ringspun.core.reference import Reference, attention_with_gradients

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped(), Striped(128))


@dataclass(frozen=True)
class Shape:
    """Sizes of one case, all distinct so that no dimension can be mistaken for another.

    Args:
        batch: B. heads: H. kv_heads: K. head_size: D. value_size: Dv.
    """

    batch: int = 2
    heads: int = 6
    kv_heads: int = 3
    head_size: int = 8
    value_size: int = 5


@dataclass(frozen=True)
class Case:
    """One thing to check: a mask over a length, dealt by a layout to a ring.

    Args:
        ranks: R. seq_len: S (tokens). dtype: "float64", "float32" or "bfloat16". seed: of the inputs.
    """

    ranks: int
    seq_len: int
    mask: Mask
    layout: Layout
    dtype: str = "float64"
    shape: Shape = Shape()
    seed: int = 0


@dataclass(frozen=True)
class Inputs:
    """Float64 arrays in global order: q, k, v and incoming gradients of out and (0 where no key is seen) of lse."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray


def all_masks(seq_len: int) -> tuple[Mask, ...]:
    """One mask of every kind and the combinations that models use, for a length."""
    some = max(1, seq_len // 3)
    docs = _some_documents(seq_len)
    return (
        Full(),
        Causal(),
        Window(some),
        Causal() & Window(max(1, seq_len // 16)),
        Band(some, 2),
        Band(-1, some),
        docs,
        Causal() & docs,
        Causal() & docs & Window(max(1, seq_len // 5)),
        Causal() | Prefix(some // 2),
        Causal() & (Window(max(1, seq_len // 7)) | Anchors(min(3, seq_len))),
        Causal() & Chunks(some),
        docs & (Causal() | Prefix(2, documents=docs)),
        Band(some, some) & docs,
        Blocks([[0], [0, 1], [], [1, 3, 4], [0, 2, 3], [5]], max(1, seq_len // 5)),
    )


def _some_documents(seq_len: int) -> Documents:
    """Long-tailed documents with gaps: padding inside the sequence and after it."""
    lengths, starts, at = [], [], 0
    sizes = [max(1, seq_len // 3), 1, 2, max(1, seq_len // 9), max(1, seq_len // 4)]
    for number, size in enumerate(sizes):
        gap = 1 if number == 2 else 0
        if at + gap + size > seq_len:
            break
        starts.append(at + gap)
        lengths.append(size)
        at += gap + size
    return Documents(lengths, starts)


def inputs(case: Case) -> Inputs:
    """Random inputs of a case, the same for every ring size and layout."""
    rng = np.random.default_rng([case.seed, case.seq_len])
    s, t = case.shape, case.seq_len
    q, k, v, dout = (
        rng.standard_normal(size)
        for size in (
            (s.batch, s.heads, t, s.head_size),
            (s.batch, s.kv_heads, t, s.head_size),
            (s.batch, s.kv_heads, t, s.value_size),
            (s.batch, s.heads, t, s.value_size),
        )
    )
    dlse = rng.standard_normal((s.batch, s.heads, t)) * case.mask.as_array(t).any(axis=1)
    return Inputs(q, k, v, dout, dlse)


def reference(case: Case, given: Inputs) -> Reference:
    """The float64 oracle's answer to a case."""
    return attention_with_gradients(
        given.q, given.k, given.v, given.dout, given.dlse, allowed=case.mask.as_array(case.seq_len)
    )
