"""The ring: one forward and one backward, which execute a plan and decide nothing. They know no mask and no layout.

Queries stay, blocks of keys and values go round. A message goes while the hop before it is computed, and no message
stands inside of a condition or of a loop whose length differs between ranks. In backward the blocks go round again, and
their gradients follow one hop behind, in the accumulators' dtype, and go home from the last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from ringspun.jax.kernels.base import Block, Call, Kernel, Queries, Running, Saved, Sums, Tiles, accumulator
from ringspun.jax.plan import Tables

AxisName = str | tuple[str, ...] | None
X = TypeVar("X")


@dataclass(frozen=True)
class Job:
    """What a program is made for; what it reads is in `Operands`. A static argument: equal ones share a program.

    Args:
        ring_size: R. moves: by how many ranks blocks move before each hop. is_even: whether all rows hold a token.
    """

    ring_size: int
    moves: tuple[int, ...]
    is_even: bool
    kernel: Kernel
    call: Call
    axis_name: AxisName


class Operands(NamedTuple):
    """The arrays of one call on one rank, as users shape them."""

    q: Array
    k: Array
    v: Array
    tables: Tables
    sinks: Array | None = None
    slopes: Array | None = None
    q_segments: Array | None = None
    k_segments: Array | None = None


@partial(jax.jit, static_argnums=0)  # of the second call on, one without a jit around it compiles nothing
def attend(job: Job, given: Operands) -> tuple[Array, Array]:
    """``(out [B, T, H, Dv], lse [B, T, H])`` of local queries over the keys of the ring; differentiable."""
    of_shard_map = frozenset(jax.sharding.get_abstract_mesh().manual_axes)  # an axis of vmap is none
    axes = (_axes(job.axis_name) & of_shard_map).union(*map(_known, jax.tree.leaves(given)))
    # an input that is the same on several ranks gets the sum of their gradients: what pcast does in reverse
    found: tuple[Array, Array] = _attend(job, jax.tree.map(lambda x: _varying(x, axes), given))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(job: Job, given: Operands) -> tuple[Array, Array]:
    return _forward(job, given)


def _keep(job: Job, given: Operands) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    out, lse = _forward(job, given)
    return (out, lse), (given, out, lse)


def _forward(job: Job, given: Operands) -> tuple[Array, Array]:
    call, wide = job.call, accumulator(given.q.dtype)
    rank, queries, block, slopes = _placed(job, given)
    shape = queries.q.shape[:-1]
    empty = Running(jnp.zeros((*shape, call.value_size), wide), jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide))

    def compute(hop: Any, block: Block, running: Running) -> tuple[Running, None]:
        block = _with_positions(job, given.tables, hop, rank, block)
        return job.kernel.forward(call, queries, block, slopes, _tiles(given.tables, rank, hop), running), None

    running, _ = _tour(job, block, _like(given, empty), None, compute)
    nothing = running.weight == 0
    weight = jnp.where(nothing, 1, running.weight)
    out, lse = running.total / weight[..., None], jnp.where(nothing, -jnp.inf, running.top + jnp.log(weight))
    if given.sinks is not None:
        sinks = _grouped(given.sinks.astype(wide), 0, call)[..., None]
        whole = jnp.logaddexp(lse, sinks)
        out = (
            out * jnp.where(jnp.isneginf(whole), 0, jnp.exp(lse - jnp.where(jnp.isneginf(whole), 0, whole)))[..., None]
        )
        lse = whole
    if not job.is_even:
        lse = jnp.where(given.tables.queries.real(rank, call.rows), lse, -jnp.inf)
    return _as_given(out).astype(given.q.dtype), _as_given(lse[..., None])[..., 0]


def _backward(job: Job, kept: tuple[Any, ...], incoming: tuple[Array, Array]) -> tuple[Operands]:
    given, out, lse = kept
    call, wide = job.call, accumulator(given.q.dtype)
    rank, queries, block, slopes = _placed(job, given)
    incoming = tuple(_cleared(x, given.q_segments) for x in (incoming[0], incoming[1][..., None]))
    dout, dlse = (_to_heads(x, call) for x in incoming)
    lse = _to_heads(lse[..., None], call)[..., 0]
    delta = (_to_heads(out, call).astype(wide) * dout.astype(wide)).sum(-1) - dlse[..., 0]
    if not job.is_even:
        delta = jnp.where(given.tables.queries.real(rank, call.rows), delta, 0)
    saved = Saved(dout, jnp.where(jnp.isneginf(lse), 0, lse), delta)
    start = Sums(
        jnp.zeros(queries.q.shape, wide),
        jnp.zeros(block.kv.shape, wide),
        None if slopes is None else jnp.zeros(slopes.shape, wide),
    )
    start = _like(given, start)

    def compute(hop: Any, block: Block, sums: tuple[Array, Any], dkv: Array) -> tuple[tuple[Array, Any], Array]:
        block, tiles = _with_positions(job, given.tables, hop, rank, block), _tiles(given.tables, rank, hop)
        found = job.kernel.backward(call, queries, block, slopes, saved, tiles, Sums(sums[0], dkv, sums[1]))
        return (found.dq, found.dslopes), found.dkv

    (dq, dslopes), dkv = _tour(job, block, (start.dq, start.dslopes), start.dkv, compute)
    dkv = jnp.moveaxis(dkv, 1, 2)
    dsinks = None
    if given.sinks is not None:
        sinks = _grouped(given.sinks.astype(wide), 0, call)[..., None]
        weight = jnp.where(jnp.isneginf(sinks), 0, jnp.exp(sinks - jnp.where(jnp.isneginf(lse), jnp.inf, lse)))
        dsinks = -(weight * delta).sum((0, 3)).reshape(-1).astype(given.sinks.dtype)
    return (
        Operands(
            _as_given(dq).astype(given.q.dtype),
            dkv[..., : call.head_size].astype(given.k.dtype),
            dkv[..., call.head_size :].astype(given.v.dtype),
            None,  # type: ignore[arg-type]
            dsinks,
            None if dslopes is None else dslopes.reshape(-1).astype(given.slopes.dtype),
        ),
    )


_attend.defvjp(_keep, _backward)


def _tour(job: Job, block: Block, state: X, follows: Any, compute: Callable[..., Any]) -> tuple[X, Any]:
    """The hops of a plan: blocks move, `compute` changes `state` and what `follows` the block.

    Without anything that follows, `compute` is not given it. What followed the block is at home again in the end.
    """
    send = partial(_send, job)
    if not job.moves:
        return state, follows

    def stop(hop: Any, block: Block, state: X, follows: Any) -> tuple[X, Any]:
        found: tuple[X, Any] = compute(hop, block, state, *(() if follows is None else (follows,)))
        return found

    block, hop, moves, home = send(block, job.moves[0]), 0, job.moves[1:], None
    if job.moves[0] == 0 and moves and follows is not None:  # the own block: its gradients stay here
        following = send(block, moves[0])
        state, home = stop(0, block, state, follows)
        block, hop, moves = following, 1, moves[1:]
    for move, same in groupby(moves):
        count = len(list(same))

        def one(carry: tuple[Block, X, Any], hop: Any, move: int = move) -> tuple[tuple[Block, X, Any], None]:
            block, state, follows = carry
            following = send(block, move)
            state, follows = stop(hop, block, state, follows)
            return (following, state, send(follows, move)), None

        carry = block, state, follows
        if count == 1:
            (block, state, follows), _ = one(carry, hop)
        else:
            (block, state, follows), _ = lax.scan(one, carry, jnp.arange(hop, hop + count, dtype=jnp.int32))
        hop += count
    state, follows = stop(hop, block, state, follows)
    follows = send(follows, -sum(job.moves) % job.ring_size)
    return state, follows if home is None else jax.tree.map(jnp.add, home, follows)


def _send(job: Job, what: X, by: int) -> X:
    """`what` of the rank `by` places before this one."""
    if by == 0 or job.axis_name is None:
        return what
    size, axis = job.ring_size, job.axis_name
    pairs = [(i, (i + by) % size) for i in range(size)]
    sent: X = jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), what)
    return sent


def _tiles(tables: Tables, rank: Array, hop: Any) -> Tiles:
    edges = tables.edges[rank]
    return Tiles(tables.tiles, edges[hop], edges[hop + 1])


def _placed(job: Job, given: Operands) -> tuple[Array, Queries, Block, Array | None]:
    """This rank, its queries and its block, and the slopes of a bias; heads before tokens, as products want them."""
    rank = jnp.int32(0) if job.axis_name is None else lax.axis_index(job.axis_name).astype(jnp.int32)
    kv = jnp.moveaxis(_cleared(jnp.concatenate([given.k, given.v], axis=-1), given.k_segments), 2, 1)
    positions = None if given.slopes is None else given.tables.queries.positions(rank, job.call.rows)
    queries = Queries(_to_heads(_cleared(given.q, given.q_segments), job.call), given.q_segments, positions)
    slopes = None
    if given.slopes is not None:
        slopes = _grouped(given.slopes.astype(accumulator(given.q.dtype)), 0, job.call)
    return rank, queries, Block(kv, given.k_segments), slopes


def _with_positions(job: Job, tables: Tables, hop: Any, rank: Array, block: Block) -> Block:
    """A block and the positions of its rows, which its owner's runs say: they need not travel."""
    if not job.call.bias:
        return block
    owner = (rank - tables.distances[hop]) % job.ring_size
    return block._replace(positions=tables.keys.positions(owner, job.call.key_rows))


def _cleared(x: Array, segments: Array | None) -> Array:
    """``[B, T, ...]`` with 0 in padding, which may hold anything."""
    return x if segments is None else jnp.where((segments >= 0)[..., None, None], x, jnp.zeros_like(x))


def _grouped(x: Array, axis: int, call: Call) -> Array:
    """`x` with H heads along `axis` as K and G."""
    return x.reshape(*x.shape[:axis], call.kv_heads, call.heads // call.kv_heads, *x.shape[axis + 1 :])


def _to_heads(x: Array, call: Call) -> Array:
    """``[B, T, H, D]`` as ``[B, K, G, T, D]``."""
    return jnp.moveaxis(_grouped(x, 2, call), 1, 3)


def _as_given(x: Array) -> Array:
    """``[B, K, G, T, D]`` as ``[B, T, H, D]``."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[-1])


def _axes(axis_name: AxisName) -> frozenset[Any]:
    return frozenset(() if axis_name is None else (axis_name,) if isinstance(axis_name, str) else axis_name)


def _known(x: Array) -> frozenset[Any]:
    """The mesh axes along which shard_map knows that `x` may differ."""
    varying: frozenset[Any] = jax.typeof(x).manual_axis_type.varying
    return varying


def _varying(x: Array, axes: frozenset[Any]) -> Array:
    """`x`, of which shard_map knows that it may differ along `axes`."""
    new = tuple(axes - _known(x))
    return lax.pcast(x, new, to="varying") if new else x


def _like(given: Operands, new: X) -> X:
    """Arrays that differ between ranks as q does."""
    axes = _known(given.q)
    varying: X = jax.tree.map(lambda x: _varying(x, axes), new)
    return varying
