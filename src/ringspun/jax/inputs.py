"""What the public functions are given: looked at before anything is computed, and refused in the user's terms."""

from __future__ import annotations

import difflib
import math
import numbers
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from ringspun.core.host import is_integer
from ringspun.errors import DtypeError, PlanError, ShapeError
from ringspun.jax.bias import Alibi
from ringspun.jax.plan import Plan

_KNOWN = (
    "mask", "layout", "seq_len", "key_len", "query_start", "scale", "softcap", "sinks", "bias", "segment_ids",
    "key_segment_ids", "return_lse", "kernel",
)  # fmt: skip
_INSTEAD = {
    "is_causal": "what may be seen is the mask. Write mask=Causal()",
    "local_window_size": "what may be seen is the mask. Write mask=Window(w), or Band(left, right)",
    "window_size": "what may be seen is the mask. Write mask=Window(w), or Band(left, right)",
    "query_seq_lengths": "padding belongs to no document. Write mask=Causal() & Documents(...), or segment_ids=",
    "key_value_seq_lengths": "padding belongs to no document. Write mask=Causal() & Documents(...), or segment_ids=",
    "implementation": "kernels are values here. Write kernel=Xla(block_size)",
    "block_size": "it is the kernel's. Write kernel=Xla(block_size)",
    "dropout_rate": "a ring does not drop weights. Leave it out, and set the model's attention dropout to 0",
    "return_residual": "it is called lse here. Write return_lse=True",
    "alibi_slopes": "a bias has a name. Write bias=Alibi(slopes)",
}


def refuse(names: dict[str, object]) -> None:
    """Raise `TypeError` for arguments that nobody knows here, with what to write instead."""
    for name in names:
        near = difflib.get_close_matches(name, _KNOWN, 1)
        unknown = f"did you mean {near[0]}?" if near else f"it takes {', '.join(_KNOWN)}"
        advice = _INSTEAD.get(name, f"ring attention knows no such argument; {unknown}")
        raise TypeError(f"{name} must not be given to ring attention; {advice}.")


def ring_size(axis_name: Any) -> int:
    """R, of the axis that a ring runs along; 1 for None.

    Raises:
        PlanError: no such axis here.
    """
    if axis_name is None:
        return 1
    if not (isinstance(axis_name, str) or (isinstance(axis_name, tuple) and axis_name)):
        raise PlanError(f"axis_name must be the name of a mesh axis, or a tuple of names; got {axis_name!r}.")
    try:
        return int(lax.axis_size(axis_name))
    except NameError:
        raise PlanError(
            f"axis_name must be an axis of the jax.shard_map around this call; got {axis_name!r}, which is bound to "
            "nothing here. On global arrays: sharded_attention(q, k, v, mesh=..., spec=...)."
        ) from None


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raise unless q, k and v are arrays that fit each other.

    Raises:
        ShapeError, DtypeError: naming the array.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floats(name, x)
        if x.ndim != 4:
            raise ShapeError(f"{name} must be [B, T, H, D]; got shape {x.shape}. Under vmap, without the batch's axis.")
    if not (q.dtype == k.dtype == v.dtype):
        raise DtypeError(f"q, k and v must have one dtype; got {q.dtype}, {k.dtype}, {v.dtype}.")
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    if not (q.shape[0] == k.shape[0] == v.shape[0]) or k.shape[1:3] != v.shape[1:3]:
        raise ShapeError(f"q, k and v must share B, and k and v their tokens and heads; got {shapes}.")
    if k.shape[2] == 0 or q.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ShapeError(f"query heads must be a multiple of key heads; got {shapes}. Heads stand in dim 2.")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0 or v.shape[3] == 0:
        raise ShapeError(f"q and k must have one head size, at least 1; got {shapes}.")


def check_floats(name: str, x: Any) -> None:
    """Raise `DtypeError` unless `x` is an array of floats of two bytes or more."""
    if not isinstance(x, Array):
        raise DtypeError(f"{name} must be a jax array; got {type(x).__name__}. Write jnp.asarray({name}).")
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
        raise DtypeError(f"{name} must be float64, float32, bfloat16 or float16; got {x.dtype}.")


def check_cuts(mesh: Mesh, spec: PartitionSpec, arrays: dict[str, Any]) -> None:
    """Raise unless a spec cuts the batch and the heads of global arrays ``[B, N, H, D]`` evenly, and nothing behind.

    Raises:
        PlanError, ShapeError: naming the array and the axis.
    """
    if any(axis is not None for axis in spec[3:]):
        raise PlanError(f"spec must leave the size of heads whole, P(batch, ring, heads); got {spec}.")
    for dim, what in ((0, "a batch"), (2, "heads")):
        axis = spec[dim] if dim < len(spec) else None
        count = math.prod(mesh.shape.get(name, 1) for name in (axis if isinstance(axis, tuple) else (axis,)))
        for name, x in arrays.items():
            if x.shape[dim] % count:
                raise ShapeError(
                    f"{name} must have {what} that the {count} devices of {axis!r} divide; got shape {x.shape}. Take "
                    "another spec, or repeat key heads: jnp.repeat(k, n, axis=2)."
                )


def check_rows(plan: Plan, q: Any, k: Any) -> None:
    """Raise `ShapeError` unless q and k are shards of the plan."""
    for name, x, held in (("q", q, plan.tables.queries), ("k and v", k, plan.tables.keys)):
        if x.shape[1] != held.rows:
            total = int(held.tokens.sum())
            raise ShapeError(
                f"{name} must hold {held.rows} rows on each of {plan.ring_size} ranks, for {total} tokens; got "
                f"{x.shape[1]}. Make shards by ringspun.jax.shard, say seq_len=, and order them [B, T, H, D]."
            )


def checked_length(name: str, value: Any) -> int:
    """`value` as a number of tokens."""
    if not is_integer(value) or value < 0:
        raise ShapeError(f"{name} must be an integer >= 0; got {value!r}.")
    return int(value)


def checked_scale(scale: Any, head_size: int) -> float:
    """The scale of scores; default ``D ** -0.5``."""
    if scale is None:
        return float(head_size**-0.5)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real) or not math.isfinite(scale):
        raise PlanError(f"scale must be a finite number (not an array: it has no gradient); got {scale!r}.")
    return float(scale)


def check_terms(heads: int, sinks: Any, bias: Any) -> None:
    """Raise unless sinks and bias fit H heads.

    Raises:
        ShapeError, DtypeError: naming the argument.
    """
    if sinks is not None:
        _check_per_head("sinks", sinks, heads)
    if bias is None:
        return
    if not isinstance(bias, Alibi):
        raise DtypeError(
            f"bias must be Alibi(slopes); got {type(bias).__name__}. A dense bias would need the whole S x S on every "
            "rank; tables of distances and functions of positions are not supported in jax yet."
        )
    _check_per_head("slopes", bias.slopes, heads)


def _check_per_head(name: str, x: Any, heads: int) -> None:
    check_floats(name, x)
    if x.shape != (heads,):
        raise ShapeError(f"{name} must be [H], one per query head; got {x.shape} for {heads} heads.")


def checked_segments(q: Any, k: Any, segments: Any, key_segments: Any) -> tuple[Any, Any]:
    """Segment ids of queries and keys, or None and None.

    Raises:
        ShapeError, DtypeError, PlanError: naming the argument.
    """
    if segments is None:
        if key_segments is not None:
            raise PlanError("key_segment_ids must come with segment_ids; got them alone.")
        return None, None
    if key_segments is None:
        if q.shape[1] != k.shape[1]:
            raise PlanError("segment_ids must come with key_segment_ids where keys are another sequence.")
        key_segments = segments
    for name, x, like in (("segment_ids", segments, q), ("key_segment_ids", key_segments, k)):
        if not isinstance(x, Array) or not jnp.issubdtype(x.dtype, jnp.integer):
            kind = getattr(x, "dtype", type(x).__name__)
            raise DtypeError(
                f"{name} must be a jax array of integers, one per token, negative for padding; got {kind}."
            )
        if x.shape != like.shape[:2]:
            raise ShapeError(f"{name} must be [B, T], one per token; got {x.shape} for {like.shape[:2]}.")
    if segments.dtype != key_segments.dtype:  # a cast could make two of them one
        raise DtypeError(f"key_segment_ids must be {segments.dtype}, as segment_ids; got {key_segments.dtype}.")
    return segments, key_segments
