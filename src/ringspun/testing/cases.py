"""The cases that `ringspun check`, the tests and the benchmarks share: plain data, no framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ringspun.core.buckets import Buckets
from ringspun.core.layout import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.core.mask import Anchors, Band, Blocks, Causal, Chunks, Documents, Full, Mask, Prefix, Window
from ringspun.core.reference import Reference, attention_with_gradients

LONG_TAILED = (
    *(61, 348, 1210, 94, 205, 3170, 27, 512, 733, 158, 42, 2048, 389, 77, 901, 266),
    *(133, 18, 1537, 457, 110, 52, 624, 301, 1022, 84, 170, 35, 230, 566, 680, 124),
)
"""Lengths of 32 packed documents, as they come in practice: many short, few long; 16,384 tokens in all."""
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
        offset: what is added to all scores of even queries and taken from those of odd ones.
        lse_gradient: whether lse has an incoming gradient.
        spoiled: whether NaN stands in what must not be read (see the function of that name).
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
    offset: float = 0.0
    lse_gradient: bool = True
    spoiled: bool = False

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


def uses_lse(case: Case) -> bool:
    """Whether lse has an incoming gradient. Not in bfloat16: a kernel may round it there, so there is no bar."""
    return case.lse_gradient and case.dtype != "bfloat16"


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
    if case.offset:
        sign = np.where(np.arange(t) % 2 == 0, 1, -1)
        # in the last coordinate, so that products add up before the large one, whose size they are rounded at
        q[..., -1], k[..., -1] = sign * case.offset * s.head_size**0.5, 1.0
    dlse = rng.standard_normal((s.batch, s.heads, t))
    if not case.arguments.sinks:
        dlse = dlse * case.allowed.any(axis=-1)
    if not uses_lse(case):
        dlse = 0 * dlse
    sinks = rng.standard_normal(s.heads) if case.arguments.sinks else None
    sizes = {"alibi": (s.heads,), "table": (BUCKETS.count, s.heads)}
    bias = rng.random(sizes[case.arguments.bias]) if case.arguments.bias in sizes else None
    return Inputs(q, k, v, dout, dlse, sinks, bias)


def spoiled(case: Case, given: Inputs, value: float = np.nan) -> Inputs:
    """`value` in q, dout and dlse of queries that see nothing, and in k and v that nobody sees."""
    allowed = np.broadcast_to(case.allowed, (case.shape.batch, 1, case.seq_len, case.keys))
    blind, unseen = (np.asarray(~allowed.any(axis)) for axis in (3, 2))  # [B, 1, S]

    def spoil(x: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.where(rows.reshape(*rows.shape, *[1] * (x.ndim - 3)), value, x)

    dlse = given.dlse if case.arguments.sinks else spoil(given.dlse, blind)  # with sinks a blind row's lse counts
    by_query = {"q": spoil(given.q, blind), "dout": spoil(given.dout, blind), "dlse": dlse}
    return replace(given, **by_query, k=spoil(given.k, unseen), v=spoil(given.v, unseen))


def dense_bias(case: Case, values: np.ndarray | None) -> np.ndarray | None:
    """What a case's bias adds to the scores, ``[H or 1, Sq, Sk]``; `values` is the bias's tensor, where it has one."""
    q, k = _positions(case)
    kind = case.arguments.bias
    if not kind:
        return None
    if values is None:
        return np.asarray(bias_of_positions(q, k)[None])
    return np.asarray(-values[:, None, None] * abs(q - k) if kind == "alibi" else values.T[:, BUCKETS(q - k)])


def bias_gradient(case: Case, dense: np.ndarray) -> np.ndarray | None:
    """The gradient of a bias's tensor from that of `dense_bias`; None where it has no tensor."""
    q, k = _positions(case)
    if case.arguments.bias == "alibi":
        return np.asarray(-(dense * abs(q - k)).sum((1, 2)))
    if case.arguments.bias == "table":
        rows = BUCKETS(q - k).ravel()
        return np.stack([np.bincount(rows, d.ravel(), BUCKETS.count) for d in dense], axis=1)
    return None


def _positions(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(case.seq_len)[:, None] + case.query_start, np.arange(case.keys)[None, :]


def reference(case: Case, given: Inputs) -> Reference:
    """The float64 oracle's answer to a case; `dbias` is the gradient of the bias's tensor."""
    ref = attention_with_gradients(
        given.q, given.k, given.v, given.dout, given.dlse, allowed=case.allowed, scale=case.arguments.scale,
        softcap=case.arguments.softcap, sinks=given.sinks, bias=dense_bias(case, given.bias),
    )  # fmt: skip
    return replace(ref, dbias=None if ref.dbias is None else bias_gradient(case, ref.dbias))
