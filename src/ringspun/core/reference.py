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
    """Dense attention and its gradients; all float64, in the shapes of the inputs.

    `dsinks` ``[H]`` and `dbias` ``[H, Tq, Tk]`` (of every entry that was added), where there are sinks and a bias.
    """

    out: F64
    lse: F64
    dq: F64
    dk: F64
    dv: F64
    dsinks: F64 | None = None
    dbias: F64 | None = None


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    allowed: NDArray[np.bool_],
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any | None = None,
    bias: Any | None = None,
) -> tuple[F64, F64, F64]:
    """Dense attention: ``(out [B, H, Tq, Dv], lse [B, H, Tq], p [B, H, Tq, Tk])``.

    Args:
        q: ``[B, H, Tq, D]``. k: ``[B, K, Tk, D]``. v: ``[B, K, Tk, Dv]``, with H a multiple of K.
        allowed: bool, broadcastable to ``[B, H, Tq, Tk]``; a row without keys gives out 0 and lse -inf (with sinks: the
            sink).
        scale: of the scores; default ``D ** -0.5``. softcap: ``softcap * tanh(score / softcap)``, first of all.
        sinks: ``[H]``, a logit in the denominator of every row. bias: added to the scores, broadcastable to
            ``[H, Tq, Tk]``.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    groups = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores = np.where(allowed, _bent(q, k, scale, softcap)[0] + (0 if bias is None else np.asarray(bias)), -np.inf)
    top = scores.max(-1, initial=-np.inf, keepdims=True)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[:, None, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isneginf(top), 0, top)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else np.exp(sinks - top))
    with np.errstate(divide="ignore"):
        lse = np.log(total)[..., 0] + top[..., 0]
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
    softcap: float | None = None,
    sinks: Any | None = None,
    bias: Any | None = None,
) -> Reference:
    """Dense attention and the gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to all inputs.

    Shapes as in `attention`; `dout` like `out`, `dlse` like `lse`; a row without keys has zero gradients.
    """
    out, lse, p = attention(q, k, v, allowed=allowed, scale=scale, softcap=softcap, sinks=sinks, bias=bias)
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    groups = heads // kv_heads
    keys, values = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    delta = (out * dout).sum(-1) - (0 if dlse is None else np.asarray(dlse, np.float64))
    dscores = p * (np.einsum("bhqd,bhkd->bhqk", dout, values) - delta[..., None])
    ds = dscores * _bent(q, keys, scale, softcap)[1]
    dk = np.einsum("bhqk,bhqd->bhkd", ds, q).reshape(batch, kv_heads, groups, *k.shape[2:]).sum(2)
    dv = np.einsum("bhqk,bhqd->bhkd", p, dout).reshape(batch, kv_heads, groups, *v.shape[2:]).sum(2)
    dsinks = None
    if sinks is not None:
        logits = np.asarray(sinks, np.float64)[:, None]
        weight = np.exp(logits - np.where(np.isneginf(logits), 0, lse))
        dsinks = -(weight * delta).sum((0, 2))
    dbias = None if bias is None else dscores.sum(0)
    return Reference(out, lse, np.einsum("bhqk,bhkd->bhqd", ds, keys), dk, dv, dsinks, dbias)


def _bent(q: F64, k: F64, scale: float | None, softcap: float | None) -> tuple[F64, F64 | float]:
    """Scores before bias and mask, and their derivative by ``q . k``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = np.einsum("bhqd,bhkd->bhqk", q, k) * scale
    if softcap is None:
        return scores, scale
    bent = np.tanh(scores / softcap)
    return softcap * bent, scale * (1 - bent * bent)
