"""The ring of arXiv 2310.01889 as published for JAX, restated: contiguous shards, R hops, chunks of queries by chunks
of keys in scans, chunks of keys that lie ahead left out by a condition, everything in ``[B, T, H, D]``. A yardstick;
its authors' package no longer imports on current releases. Sums are in the inputs' dtype, as published.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

AXIS = "ring"


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def published(q: Array, k: Array, v: Array, chunk: int) -> Array:
    """Causal attention on one rank of a ring, equal heads, `chunk` tokens at a time."""
    out: Array = _forward(q, k, v, chunk)[0]
    return out


def _forward(q: Array, k: Array, v: Array, chunk: int) -> tuple[Array, tuple[Array, ...]]:
    batch, rows, heads, _ = q.shape
    top = jnp.full((rows // chunk, batch, heads, chunk), -jnp.inf, q.dtype)
    start = _varying((jnp.zeros_like(_cut(q, chunk)), jnp.zeros_like(top), top))

    def hop(carry: Any, number: Array) -> Any:
        k, v, sums = carry

        def of_queries(_: Any, given: Any) -> Any:
            q, sums, i = given

            def of_keys(sums: Any, given: Any) -> Any:
                k, v, j = given

                def attend(sums: Any) -> Any:
                    total, weight, top = sums
                    scores = _scores(q, k, i, j, number, rows, chunk)
                    higher = jnp.maximum(top, scores.max(-1))
                    p, keep = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
                    total = total * jnp.moveaxis(keep, 1, 2)[..., None] + jnp.einsum("bhqk,bkhd->bqhd", p, v)
                    return total, weight * keep + p.sum(-1), higher

                return lax.cond(_behind(i, j, number, rows, chunk), attend, lambda sums: sums, sums), None

            return (), lax.scan(of_keys, sums, (_cut(k, chunk), _cut(v, chunk), jnp.arange(rows // chunk)))[0]

        sums = lax.scan(of_queries, (), (_cut(q, chunk), sums, jnp.arange(rows // chunk)))[1]
        return (_on(k), _on(v), sums), None

    (_, _, (total, weight, top)), _ = lax.scan(hop, (k, v, start), jnp.arange(lax.axis_size(AXIS)))
    out = _joined(total / jnp.moveaxis(weight, 2, 3)[..., None])
    return out, (q, k, v, out, top + jnp.log(weight))


def _backward(chunk: int, kept: tuple[Array, ...], dout: Array) -> tuple[Array, Array, Array]:
    q, k, v, out, lse = kept
    rows, scale = q.shape[1], q.shape[-1] ** -0.5

    def hop(carry: Any, number: Array) -> Any:
        dq, dk, dv, k, v = carry

        def of_queries(sums: Any, given: Any) -> Any:
            q, dq, dout, out, lse, i = given
            delta = jnp.einsum("bqhd,bqhd->bhq", dout, out)[..., None]

            def of_keys(dq: Any, given: Any) -> Any:
                k, v, j = given

                def attend(dq: Any) -> Any:
                    p = jnp.exp(_scores(q, k, i, j, number, rows, chunk) - lse[..., None])
                    ds = p * (jnp.einsum("bqhd,bkhd->bhqk", dout, v) - delta) * scale
                    dk, dv = jnp.einsum("bhqk,bqhd->bkhd", ds, q), jnp.einsum("bhqk,bqhd->bkhd", p, dout)
                    return dq + jnp.einsum("bhqk,bkhd->bqhd", ds, k), dk, dv

                def none(dq: Any) -> Any:
                    return dq, jnp.zeros_like(k), jnp.zeros_like(v)

                dq, *shares = lax.cond(_behind(i, j, number, rows, chunk), attend, none, dq)
                return dq, shares

            dq, (dk, dv) = lax.scan(of_keys, dq, (_cut(k, chunk), _cut(v, chunk), jnp.arange(rows // chunk)))
            return (sums[0] + _joined(dk), sums[1] + _joined(dv)), dq

        given = (_cut(q, chunk), dq, _cut(dout, chunk), _cut(out, chunk), lse, jnp.arange(rows // chunk))
        (dk, dv), dq = lax.scan(of_queries, (dk, dv), given)
        return (dq, *map(_on, (dk, dv, k, v))), None

    zeros = (jnp.zeros_like(_cut(q, chunk)), jnp.zeros_like(k), jnp.zeros_like(v))
    (dq, dk, dv, _, _), _ = lax.scan(hop, (*_varying(zeros), k, v), jnp.arange(lax.axis_size(AXIS)))
    return _joined(dq), dk, dv


published.defvjp(_forward, _backward)


def _cut(x: Array, chunk: int) -> Array:
    """``[B, T, H, D]`` as ``[n, B, chunk, H, D]``."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _joined(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _starts(i: Array, j: Array, number: Array, rows: int, chunk: int) -> tuple[Array, Array]:
    """Positions at which a chunk of queries and one of keys begin."""
    rank, size = lax.axis_index(AXIS), lax.axis_size(AXIS)
    return rank * rows + i * chunk, (rank - number) % size * rows + j * chunk


def _behind(i: Array, j: Array, number: Array, rows: int, chunk: int) -> Array:
    first, key = _starts(i, j, number, rows, chunk)
    return key < first + chunk


def _scores(q: Array, k: Array, i: Array, j: Array, number: Array, rows: int, chunk: int) -> Array:
    first, key = _starts(i, j, number, rows, chunk)
    seen = (first + jnp.arange(chunk))[:, None] >= (key + jnp.arange(chunk))[None, :]
    return jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5 + jnp.where(seen, 0, jnp.finfo(q.dtype).min)


def _on(x: Array) -> Array:
    size = lax.axis_size(AXIS)
    return lax.ppermute(x, AXIS, [(i, (i + 1) % size) for i in range(size)])


def _varying(x: Any) -> Any:
    def cast(y: Array) -> Any:
        return y if AXIS in jax.typeof(y).manual_axis_type.varying else lax.pcast(y, AXIS, to="varying")

    return jax.tree.map(cast, x)
