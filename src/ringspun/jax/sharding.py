"""Shards: which row of a global array stands where, by layout. Tokens are put in order once per batch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ringspun.core.layout import Contiguous, Layout
from ringspun.core.mask import Documents, Mask
from ringspun.core.partition import Partition
from ringspun.core.text import shown
from ringspun.errors import DtypeError, LayoutError, PlanError, ShapeError
from ringspun.jax.plan import sides_of

NO_TOKEN = -1


@dataclass(frozen=True, eq=False)
class Deal:
    """All ranks' shards one after the other, each filled up to the size of the largest.

    Args:
        tokens: the index of the token in each row ``[R * T]``, `NO_TOKEN` in a row that holds none.
    """

    tokens: NDArray[np.int64]

    @property
    def rows(self) -> int:
        """All rows."""
        return len(self.tokens)

    @property
    def real(self) -> NDArray[np.int64]:
        """The rows that hold a token ``[S]``, in order."""
        return np.flatnonzero(self.tokens != NO_TOKEN)


def shard(
    x: Any,
    *,
    mesh: Mesh,
    spec: PartitionSpec,
    layout: Layout | None = None,
    documents: Documents | None = None,
    dim: int = 1,
    fill: Any = 0,
) -> Array:
    """A global array in the order of a layout, cut over the devices of a mesh. Differentiable; `unshard` undoes it.

    Host arrays (NumPy) are cut on the host, and every process of a job places only what its own devices hold; it needs
    the whole of `x`, or its own rows right at least.

    Args:
        x: the whole sequence, S tokens along `dim`, as every process has it.
        mesh: of the devices. spec: of `x`; its entry for `dim` is the ring's axis.
        layout: default `Contiguous()`. documents: those of the mask, for layouts that read them. dim: of tokens.
        fill: what stands in rows that hold no token, where shards would be of different sizes.
    Returns:
        ``R * T`` rows along `dim`, where T is the size of the largest shard.
    Raises:
        ShapeError, PlanError, LayoutError: a dim, spec or layout that does not fit.
    """
    seq_len = _length(x, dim)
    _, size = ring_axis(mesh, spec, dim)
    deal = deal_of(layout, size, seq_len, documents=documents)
    if isinstance(x, Array):
        return place(_taken(x, deal.tokens, dim, fill), mesh, spec)
    host = np.asarray(x)
    rows = np.take(host, np.maximum(deal.tokens, 0), dim) if host.shape[dim] else np.zeros_like(host)
    rows[(slice(None),) * dim + (deal.tokens == NO_TOKEN,)] = fill
    return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, spec), lambda index: rows[index])


def unshard(
    x: Array,
    *,
    mesh: Mesh,
    spec: PartitionSpec,
    seq_len: int,
    layout: Layout | None = None,
    documents: Documents | None = None,
    dim: int = 1,
) -> Array:
    """The array that `shard` made `x` of: exactly S rows, in the sequence's order. Differentiable.

    Args:
        seq_len: S (tokens). The others: as in `shard`.
    """
    if not isinstance(x, Array):
        raise DtypeError(f"x must be a jax array, as shard makes it; got {type(x).__name__}. Write jnp.asarray(x).")
    held = _length(x, dim)
    _, size = ring_axis(mesh, spec, dim)
    deal = deal_of(layout, size, seq_len, documents=documents)
    if held != deal.rows:
        raise ShapeError(f"x must have {deal.rows} rows in dim {dim} for {seq_len} tokens; got shape {x.shape}.")
    rows = np.empty(seq_len, np.int64)
    rows[deal.tokens[deal.real]] = deal.real
    return _taken(_gathered(x, mesh, spec, dim), rows, dim, 0)


def positions(
    *,
    ring_size: int,
    seq_len: int,
    layout: Layout | None = None,
    documents: Documents | None = None,
    restart: bool = False,
) -> NDArray[np.int32]:
    """The position of the token in each row of what `shard` makes ``[R * T]``; -1 in a row that holds none. Host data.

    Args:
        ring_size: R. restart: count within each document, padding at 0; needs `documents`.
    Raises:
        PlanError: `restart` without documents.

    >>> positions(ring_size=2, seq_len=8, layout=Zigzag())
    array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    deal = deal_of(layout, ring_size, seq_len, documents=documents)
    if not restart:
        return deal.tokens.astype(np.int32)
    if documents is None:
        raise PlanError("restart must come with documents; got none.")
    return np.where(deal.tokens == NO_TOKEN, NO_TOKEN, documents.positions(seq_len)[deal.tokens]).astype(np.int32)


def deal_of(
    layout: Layout | None, size: int, seq_len: int, *, documents: Documents | None = None, mask: Mask | None = None
) -> Deal:
    """Where the tokens of a sequence stand. `mask`: its documents are taken where none are given.

    Raises:
        LayoutError: what is no layout; one that reads documents, without them or a mask. Shards that leave them out
            would be dealt otherwise than attention takes them, in as many rows.
    """
    layout = Contiguous() if layout is None else layout
    if not isinstance(layout, Layout):
        raise LayoutError(f"layout must be a Layout, e.g. Zigzag(); got {shown(layout)}.")
    if layout.reads_documents and documents is None and mask is None:
        raise LayoutError(
            f"documents must be given to {layout}, which deals by them; got none. Give those of the mask, or "
            f"Documents([{seq_len}]) where it has none."
        )
    return _deal(sides_of(layout, size, seq_len, documents=documents, mask=mask).queries)


@lru_cache(maxsize=32)
def _deal(part: Partition) -> Deal:
    rows = int(part.tokens.max(initial=0))
    tokens = np.full((part.ring_size, rows), NO_TOKEN, np.int64)
    for ring_rank in range(part.ring_size):
        mine = part.indices(ring_rank)
        tokens[ring_rank, : len(mine)] = mine
    return Deal(tokens.reshape(-1))


def padded(x: Array, deal: Deal, dim: int = 1) -> Array:
    """Shards of different sizes, one after the other, filled up."""
    rows = np.full(deal.rows, NO_TOKEN, np.int64)
    rows[deal.real] = np.arange(len(deal.real))
    return _taken(x, rows, dim, 0)


def unpadded(x: Array, deal: Deal, dim: int = 1) -> Array:
    """The inverse of `padded`."""
    return _taken(x, deal.real, dim, 0)


def ring_axis(mesh: Mesh, spec: PartitionSpec, dim: int) -> tuple[str | tuple[str, ...], int]:
    """The mesh axis that `spec` cuts `dim` over, and its size R.

    Raises:
        PlanError: none.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise PlanError(f"mesh must be a jax.sharding.Mesh, e.g. jax.make_mesh((4,), ('ring',)); got {shown(mesh)}.")
    axis = spec[dim] if isinstance(spec, PartitionSpec) and len(spec) > dim else None
    names = axis if isinstance(axis, tuple) else (axis,)
    if not all(name in mesh.shape for name in names):
        raise PlanError(
            f"spec must name the ring's axis of the mesh {tuple(mesh.shape)} in dim {dim}, e.g. "
            f"PartitionSpec(None, 'ring'); got {spec}."
        )
    return axis, int(np.prod([mesh.shape[name] for name in names]))  # type: ignore[return-value]


def place(x: Array, mesh: Mesh, spec: PartitionSpec) -> Array:
    """`x` cut over the devices as `spec` says."""
    sharding = NamedSharding(mesh, spec)
    if not isinstance(x, jax.core.Tracer):
        return x if x.sharding == sharding else jax.device_put(x, sharding)
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    if explicit:
        x = jax.sharding.reshard(x, NamedSharding(mesh, _of_axes(spec, explicit)))
    others = set(mesh.axis_names) - explicit
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, _of_axes(spec, others))) if others else x


def _of_axes(spec: PartitionSpec, names: set[str]) -> PartitionSpec:
    """What `spec` says of some axes of a mesh."""
    parts = (() if part is None else (part,) if isinstance(part, str) else part for part in spec)
    return PartitionSpec(*(tuple(name for name in part if name in names) or None for part in parts))


def _gathered(x: Array, mesh: Mesh, spec: PartitionSpec, dim: int) -> Array:
    """`x` no longer cut along `dim`, so that its rows can be put in another order."""
    return place(x, mesh, PartitionSpec(*(None if n == dim else axis for n, axis in enumerate(spec))))


def _gathered_by_type(x: Array, dim: int) -> Array:
    """`x` no longer cut along `dim` by an explicit axis, of which jax takes no rows; whatever mesh it is of."""
    cut = jax.typeof(x).sharding
    if dim >= len(cut.spec) or cut.spec[dim] is None:
        return x
    whole = PartitionSpec(*(None if n == dim else axis for n, axis in enumerate(cut.spec)))
    if isinstance(x, jax.core.Tracer):
        return jax.sharding.reshard(x, NamedSharding(cut.mesh, whole))
    return jax.device_put(x, NamedSharding(x.sharding.mesh, whole))


def _taken(x: Array, rows: NDArray[np.int64], dim: int, fill: Any) -> Array:
    """Rows of `x` along `dim`, `fill` where there is none."""
    if len(rows) == x.shape[dim] and (rows == np.arange(len(rows))).all():
        return x
    x = _gathered_by_type(x, dim)
    taken = jnp.take(x, np.maximum(rows, 0), axis=dim, unique_indices=False, indices_are_sorted=False)
    there = (rows != NO_TOKEN).reshape(-1, *[1] * (x.ndim - dim - 1))
    return taken if there.all() else jnp.where(there, taken, jnp.asarray(fill, x.dtype))


def _length(x: Any, dim: int) -> int:
    shape = np.shape(x)
    if not 0 <= dim < len(shape):
        raise ShapeError(f"dim must be one of x's, from 0 to {len(shape) - 1}; got {dim}.")
    return int(shape[dim])
