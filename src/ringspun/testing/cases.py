"""The cases that `ringspun check`, the tests and the benchmarks share: plain data, no framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringspun.core.buckets import Buckets
from ringspun.core.layout import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.core.mask import Anchors, Band, Blocks, Causal, Chunks, Documents, Full, Mask, Prefix, Window
from ringspun.core.reference import Reference, attention_with_gradients

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Zigzag(), Striped(), Striped(128), DocumentZigzag(), Balanced())


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
class Arguments:
    """What a case asks for beside q, k and v.

    Args:
        scale, softcap: as in `Plan.attention`. sinks: whether there are any. bias: "", "alibi", "table" or "function".
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    bias: str = ""


@dataclass(frozen=True)
class Case:
    """One thing to check: a mask over a length, dealt by a layout to a ring.

    Args:
        ranks: R. seq_len: S (tokens). mask: one, or one per batch row. dtype: "float64", "float32" or "bfloat16".
        seed: of the inputs. key_len, key_layout, query_start: as in `ContextParallel.plan`.
    """

    ranks: int
    seq_len: int
    mask: Mask | tuple[Mask, ...]
    layout: Layout
    dtype: str = "float64"
    shape: Shape = Shape()
    seed: int = 0
    arguments: Arguments = Arguments()
    key_len: int | None = None
    key_layout: Layout | None = None
    query_start: int = 0

    @property
    def keys(self) -> int:
        """Global length of the keys (tokens)."""
        return self.seq_len if self.key_len is None else self.key_len

    @property
    def allowed(self) -> np.ndarray:
        """The dense mask, ``[Sq, Sk]``, or ``[B, 1, Sq, Sk]`` where each batch row has its own."""
        masks = self.mask if isinstance(self.mask, tuple) else (self.mask,)
        dense = [m.as_array(self.seq_len, self.keys, q_start=self.query_start) for m in masks]
        return np.stack(dense)[:, None] if isinstance(self.mask, tuple) else dense[0]


@dataclass(frozen=True)
class Inputs:
    """Float64 arrays in global order: q, k, v, incoming gradients of out and (0 where no key is seen, and for
    bfloat16) of lse, sinks ``[H]`` and the tensor of a bias."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray
    sinks: np.ndarray | None = None
    bias: np.ndarray | None = None


BUCKETS = Buckets.t5(8, 20, bidirectional=True)


def bias_of_positions(q: Any, k: Any) -> Any:
    """A free bias, of NumPy or torch positions; not a function of their distance, as the other kinds are."""
    return ((q * 3 + k) % 7) * 0.25 - 0.5


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
            (s.batch, s.kv_heads, case.keys, s.head_size),
            (s.batch, s.kv_heads, case.keys, s.value_size),
            (s.batch, s.heads, t, s.value_size),
        )
    )
    dlse = rng.standard_normal((s.batch, s.heads, t))
    if not case.arguments.sinks:
        dlse = dlse * case.allowed.any(axis=-1)
    if case.dtype == "bfloat16":  # whose runs leave lse unused, see `ringspun.testing.torch.run_ring`
        dlse = 0 * dlse
    sinks = rng.standard_normal(s.heads) if case.arguments.sinks else None
    sizes = {"alibi": (s.heads,), "table": (BUCKETS.count, s.heads)}
    bias = rng.random(sizes[case.arguments.bias]) if case.arguments.bias in sizes else None
    return Inputs(q, k, v, dout, dlse, sinks, bias)


def reference(case: Case, given: Inputs) -> Reference:
    """The float64 oracle's answer to a case; `dbias` is the gradient of the bias's tensor."""
    asked = case.arguments
    q, k = np.arange(case.seq_len)[:, None] + case.query_start, np.arange(case.keys)[None, :]
    rows = BUCKETS(q - k)
    bias = None
    if asked.bias == "alibi":
        assert given.bias is not None
        bias = -given.bias[:, None, None] * abs(q - k)
    elif asked.bias == "table":
        assert given.bias is not None
        bias = given.bias.T[:, rows]
    elif asked.bias:
        bias = bias_of_positions(q, k)[None]
    ref = attention_with_gradients(
        given.q, given.k, given.v, given.dout, given.dlse, allowed=case.allowed, scale=asked.scale,
        softcap=asked.softcap, sinks=given.sinks, bias=bias,
    )  # fmt: skip
    dbias = None
    if ref.dbias is not None and asked.bias == "alibi":
        dbias = -(ref.dbias * abs(q - k)).sum((1, 2))
    elif ref.dbias is not None and asked.bias == "table":
        dbias = np.stack([np.bincount(rows.ravel(), d.ravel(), BUCKETS.count) for d in ref.dbias], axis=1)
    return replace(ref, dbias=dbias)
