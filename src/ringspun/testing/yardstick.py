"""Rounding as a dtype does, and dense attention that computes as a usual kernel of that dtype would: what bars are
calibrated by. NumPy alone, so that a kernel of any framework can be held against it.

A float32 kernel computes in float32. One for bfloat16 reads bfloat16, multiplies into float32, keeps softmax and lse in
float32, and rounds what enters the next product (weights, gradients of scores) and what it returns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ringspun.testing.cases import Case, Inputs, bias_gradient, dense_bias

DTYPES = ("float64", "float32", "bfloat16")
QUERY_BLOCK = 64
"""Queries after which dk and dv are rounded: torch's CPU kernel adds up in the dtype of its results, in such blocks."""


def round_to(x: Any, dtype: str) -> np.ndarray:
    """`x` as `dtype` holds it, nearest even; float64 in float64, the others in float32."""
    if dtype == "float64":
        return np.asarray(x, np.float64)
    narrow = np.asarray(x, np.float32)
    if dtype == "float32":
        return narrow
    bits = np.ascontiguousarray(narrow).view(np.uint32)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # the upper half, rounded half to even
    return np.where(np.isfinite(narrow), bits.view(np.float32), narrow)


def rounded(case: Case, given: Inputs) -> Inputs:
    """`given` as the case's dtype holds it, so that the rounding of inputs is no error of attention."""
    names = ("q", "k", "v", "dout", "sinks", "bias")
    held = {name: x for name in names if (x := getattr(given, name)) is not None}
    return replace(given, **{name: round_to(x, case.dtype).astype(np.float64) for name, x in held.items()})


def dense(case: Case, given: Inputs) -> dict[str, np.ndarray]:
    """A case as one dense attention in its dtype, forward and backward: float64 copies of every tensor."""
    asked, groups = case.arguments, case.shape.heads // case.shape.kv_heads
    q, k, v, dout, dlse = (np.asarray(x, np.float32) for x in (given.q, given.k, given.v, given.dout, given.dlse))
    keys, values = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scale = np.float32(case.shape.head_size**-0.5 if asked.scale is None else asked.scale)
    scores, slope = q @ _turned(keys) * scale, np.float32(1)
    if asked.softcap is not None:
        bent = np.tanh(scores / np.float32(asked.softcap))
        scores, slope = np.float32(asked.softcap) * bent, 1 - bent * bent
    bias = dense_bias(case, given.bias)
    if bias is not None:
        scores = scores + bias.astype(np.float32)
    scores = np.where(case.allowed, scores, np.float32(-np.inf))
    lse = _logsumexp(scores, given.sinks)
    p = np.exp(scores - np.where(np.isneginf(lse), 0, lse)[..., None])  # lse rounds at the size of the scores
    out = round_to(round_to(p, case.dtype) @ values, case.dtype)
    delta = (out * dout).sum(-1) - dlse
    dscores = p * (dout @ _turned(values) - delta[..., None])
    p, ds = round_to(p, case.dtype), round_to(dscores * slope * scale, case.dtype)
    by_key = (_by_key(x, y, groups, case.dtype) for x, y in ((ds, q), (p, dout)))
    grads = dict(zip(("dq", "dk", "dv"), (ds @ keys, *by_key), strict=True))
    if given.sinks is not None:
        weight = np.exp(given.sinks.astype(np.float32)[:, None] - lse)
        grads["dsinks"] = -(weight * delta).sum((0, 2))
    if bias is not None and (dbias := bias_gradient(case, dscores.sum(0))) is not None:
        grads["dbias"] = dbias
    grads = {name: round_to(x, case.dtype) for name, x in grads.items()}
    return {name: x.astype(np.float64) for name, x in {"out": out, "lse": lse, **grads}.items()}


def _by_key(weights: np.ndarray, rows: np.ndarray, groups: int, dtype: str) -> np.ndarray:
    """``weights^T rows`` over blocks of queries, then over the query heads of a group, rounded where sums are kept."""
    total = np.zeros((*rows.shape[:2], weights.shape[3], rows.shape[3]), np.float32)
    for a in range(0, rows.shape[2], QUERY_BLOCK):
        part = slice(a, a + QUERY_BLOCK)
        total = round_to(total + _turned(weights[:, :, part]) @ rows[:, :, part], dtype)
    per_group = total.reshape(total.shape[0], -1, groups, *total.shape[2:]).swapaxes(0, 2)
    summed = per_group[0]
    for one in per_group[1:]:
        summed = round_to(summed + one, dtype)
    return np.asarray(summed.swapaxes(0, 1))


def _turned(x: np.ndarray) -> np.ndarray:
    return np.swapaxes(x, -1, -2)  # `.mT` is NumPy 2


def _logsumexp(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """In float32; rows without keys have -inf, or the sink."""
    logits = np.float32(-np.inf) if sinks is None else sinks.astype(np.float32)[:, None, None]
    top = np.maximum(scores.max(-1, keepdims=True), logits)
    top = np.where(np.isneginf(top), np.float32(0), top)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores - top).sum(-1, keepdims=True) + np.exp(logits - top)) + top
    return np.asarray(lse[..., 0])
