"""Timing a ring of JAX devices beside one of them: forward + backward, in turn in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ringspun.core.mask import Causal, Full
from ringspun.jax import ring_attention, sharded_attention
from ringspun.jax.kernels.base import accumulator
from ringspun.jax.plan import plan_of
from ringspun.testing.jax import AXIS, ring_mesh
from ringspun.testing.work import Work

MOST_SCORES = 1 << 28
"""Scores up to which `jax.nn.dot_product_attention`, which holds all of them several times, is what one device runs:
1 GiB in float32."""
TOKENS = PartitionSpec(None, AXIS)

Step = Callable[[], Any]


def time_in_turn(work: Work, pairs: int) -> tuple[list[float], list[float], str]:
    """Seconds of a ring and of one device, warmed once and then in turn, and what ran on one."""
    ring, (alone, alone_is) = ring_step(work), step_alone(work)
    seconds: list[list[float]] = [[], []]
    for step in (ring, alone):
        step()
    for _ in range(pairs):
        for mine, step in zip(seconds, (ring, alone), strict=True):
            start = time.perf_counter()
            step()
            mine.append(time.perf_counter() - start)
    return seconds[0], seconds[1], alone_is


def ring_step(work: Work) -> Step:
    """Forward + backward on a ring of the first devices, whose shards are there before."""
    mesh = ring_mesh(work.ranks)
    plan = plan_of(work.mask, work.layout, work.ranks, work.seq_len)
    given = _arrays(work, work.ranks * plan.tables.queries.rows, NamedSharding(mesh, TOKENS))
    options = {"mesh": mesh, "spec": TOKENS, "layout": work.layout, "mask": work.mask, "seq_len": work.seq_len}
    return _both(partial(sharded_attention, **options), given)


def step_alone(work: Work) -> tuple[Step, str]:
    """Forward + backward on the first device, and what it runs.

    Causal and full masks run `jax.nn.dot_product_attention` where its scores are at most `MOST_SCORES`; others, and
    longer sequences, this package's kernel on the whole sequence.
    """
    given = _arrays(work, work.seq_len, jax.devices()[0])
    is_short = work.batch * work.heads * work.seq_len**2 <= MOST_SCORES
    if is_short and isinstance(work.mask, Causal | Full):
        dense = partial(jax.nn.dot_product_attention, is_causal=isinstance(work.mask, Causal))
        return _both(dense, given), "jax.nn.dot_product_attention"
    return _both(partial(ring_attention, axis_name=None, mask=work.mask), given), "ringspun on one device"


def sent(work: Work) -> dict[str, int]:
    """Bytes that a device sends, forward + backward, and in how many hops: keys and values in both, in backward their
    gradients too, in the accumulators' dtype. Whole shards."""
    plan = plan_of(work.mask, work.layout, work.ranks, work.seq_len)
    hops = sum(move > 0 for move in plan.moves)
    elements = work.batch * plan.tables.keys.rows * work.kv_heads * 2 * work.head_size
    dtype = jnp.dtype(work.dtype)
    return {"sent_bytes": hops * elements * (2 * dtype.itemsize + accumulator(dtype).itemsize), "hops": hops}


def version() -> str:
    """Of jax."""
    return str(jax.__version__)


def _both(attend: Callable[..., Any], given: list[Any]) -> Step:
    def forward_and_backward(q: Any, k: Any, v: Any, dout: Any) -> Any:
        _, pull = jax.vjp(lambda *x: attend(*x), q, k, v)
        return pull(dout)

    compiled = jax.jit(forward_and_backward)
    return lambda: jax.block_until_ready(compiled(*given))


def _arrays(work: Work, rows: int, where: Any) -> list[Any]:
    rng = np.random.default_rng(0)
    heads = (work.heads, work.kv_heads, work.kv_heads, work.heads)
    shapes = [(work.batch, rows, h, work.head_size) for h in heads]
    return [jax.device_put(jnp.asarray(rng.standard_normal(s, np.float32), work.dtype), where) for s in shapes]
