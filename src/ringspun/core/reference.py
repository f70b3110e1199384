"""The oracle: dense attention of the whole sequence, forward and backward, float64, in NumPy. Itself checked by finite
differences. Everything else in this package is held against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Reference:
    """Dense attention and its gradients; all float64, in the shapes of the inputs."""

    out: F64
    lse: F64
    dq: F64
    dk: F64
    dv: F64


def attention(
    q: Any, k: Any, v: Any, *, allowed: NDArray[np.bool_], scale: float | None = None
) -> tuple[F64, F64, F64]:
    """Dense attention: ``(out [B, H, Tq, Dv], lse [B, H, Tq], p [B, H, Tq, Tk])``.

    Args:
        q: ``[B, H, Tq, D]``. k: ``[B, K, Tk, D]``. v: ``[B, K, Tk, Dv]``, with H a multiple of K.
        allowed: bool, broadcastable to ``[B, H, Tq, Tk]``; a row without keys gives out 0 and lse -inf.
        scale: of the scores; default ``D ** -0.5``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.where(allowed, np.einsum("bhqd,bhkd->bhqk", q, k) * scale, -np.inf)
    top = scores.max(-1, initial=-np.inf, keepdims=True)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0] + np.where(np.isneginf(top), 0, top)[..., 0]
    p = weights / np.where(total == 0, 1, total)
    return np.einsum("bhqk,bhkd->bhqd", p, v), lse, p


def attention_with_gradients(
    q: Any,
    k: Any,
    v: Any,
    dout: Any,
    dlse: Any | None = None,
    *,
    allowed: NDArray[np.bool_],
    scale: float | None = None,
) -> Reference:
    """Dense attention and the gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to q, k, v.

    Shapes as in `attention`; `dout` like `out`, `dlse` like `lse`; a row without keys has zero gradients.
    """
    out, lse, p = attention(q, k, v, allowed=allowed, scale=scale)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    groups = heads // kv_heads
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    delta = (out * dout).sum(-1) - (0 if dlse is None else np.asarray(dlse, np.float64))
    ds = p * (np.einsum("bhqd,bhkd->bhqk", dout, values) - delta[..., None]) * scale
    dk = np.einsum("bhqk,bhqd->bhkd", ds, q).reshape(batch, kv_heads, groups, *k.shape[2:]).sum(2)
    dv = np.einsum("bhqk,bhqd->bhkd", p, dout).reshape(batch, kv_heads, groups, *v.shape[2:]).sum(2)
    return Reference(out, lse, np.einsum("bhqk,bhkd->bhqd", ds, keys), dk, dv)
