"""Running the shared cases on JAX: a ring of the devices of this process, or one of them.

What a mask and a layout decide is data to a compiled program. So cases of the same sizes share one here: they stop at
every rank, and their tables are made equally long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from ringspun.core.layout import Contiguous, Layout
from ringspun.core.partition import Partition, Sides
from ringspun.errors import ConfigError, KernelRefused, PlanError
from ringspun.jax.kernels import Call, Kernel, Xla, choose
from ringspun.jax.plan import LARGEST, Held, Plan, Tables, plan_of, sides_of
from ringspun.jax.ring import Job, Operands, attend
from ringspun.testing.cases import Case, Inputs, uses_lse
from ringspun.testing.comparison import MANY_RANKS
from ringspun.testing.problem import Answer, Candidate, Owners, Problem

AXIS = "ring"
FEWEST = 32
"""Runs of a rank in a table; more are a power of two."""
FEWEST_TILES = 1024
"""Tiles of all ranks and hops; more are a power of two. Those that no hop asks for cost nothing; a longer table would
cost a program of its own, and compiling is what takes the time."""
ROWS = 8
"""Shards have room for a multiple of this."""


def make_devices(count: int) -> None:
    """Have at least `count` devices in this process; before it asks for any, a CPU is as many as one wants.

    Raises:
        ConfigError: there are fewer.
    """
    with contextlib.suppress(RuntimeError):  # devices are there already
        jax.config.update("jax_num_cpu_devices", count)
    jax.config.update("jax_enable_x64", True)
    if jax.device_count() < count:
        raise ConfigError(f"ranks must be at most the {jax.device_count()} devices of this process; got {count}.")


def ring_mesh(ranks: int, kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh of one axis over the first devices."""
    return jax.make_mesh((ranks,), (AXIS,), axis_types=(kind,), devices=jax.devices()[:ranks])


class OnDevices(Candidate):
    """A ring of devices of this process, to be given to `ringspun.testing.certify`.

    Args:
        ranks: R. layout: how tokens are dealt. kernel: default `Xla(8)`, for cases are short.
    """

    def __init__(self, ranks: int = 1, layout: Layout | None = None, kernel: Kernel | None = None) -> None:
        self.ranks, self.layout, self.kernel = ranks, Contiguous() if layout is None else layout, kernel or Xla(8)
        self.name = f"jax {self.kernel.name} on a ring of {ranks}, {self.layout}"

    def answer(self, problem: Problem) -> Answer:
        return Answer(**run_ring(self._dealt(problem.case), problem.given, self.kernel))

    def alone(self) -> OnDevices | None:
        """The same on one device."""
        return OnDevices(kernel=self.kernel) if self.ranks >= MANY_RANKS else None

    def owners(self, problem: Problem) -> Owners:
        """The ring rank of each query and of each key."""
        sides = _sides(self._dealt(problem.case))
        return _owners(sides.queries), _owners(sides.keys)

    def _dealt(self, case: Case) -> Case:
        return replace(case, ranks=self.ranks, layout=self.layout)


def run_ring(case: Case, given: Inputs, kernel: Kernel | None = None) -> dict[str, np.ndarray]:
    """A case on a ring of devices, forward and backward, in global order: float64 copies of out, lse, dq, dk, dv, and
    where the case has such inputs of dsinks, dbias. NaN stands in rows of shards that hold no token.

    Raises:
        KernelRefused: what jax cannot do yet.
    """
    if case.arguments.bias not in ("", "alibi"):
        raise KernelRefused(f"bias must be Alibi; got {case.arguments.bias}.")
    if case.key_layout not in (None, case.layout):
        raise KernelRefused(f"key_layout must be the queries'; got {case.key_layout}.")
    try:
        plan = plan_of(
            case.mask, case.layout, case.ranks, case.seq_len, key_len=case.key_len, query_start=case.query_start
        )
    except PlanError as problem:
        raise KernelRefused(str(problem)) from None
    program, dtype = _program(*_static(case, plan, kernel or Xla(8))), jnp.dtype(case.dtype)
    sides = _sides(case)
    slots = [_slots(side) for side in (sides.queries, sides.keys)]
    wide = jnp.promote_types(dtype, jnp.float32)
    of_side = {"q": (0, dtype), "k": (1, dtype), "v": (1, dtype), "dout": (0, dtype), "dlse": (0, wide)}
    arrays = {name: _on_ranks(getattr(given, name), slots[n], kind) for name, (n, kind) in of_side.items()}
    shared = {"sinks": given.sinks, "slopes": given.bias}
    arrays |= {name: None if x is None else jnp.asarray(x, dtype) for name, x in shared.items()}
    found = jax.device_get(program(arrays, _equally_long(plan)))
    back = {"out": 0, "lse": 0, "dq": 0, "dk": 1, "dv": 1}
    results = {name: _in_order(found[name], slots[n]) for name, n in back.items()}
    return results | {
        name: np.asarray(found[name], np.float64) for name in ("dsinks", "dbias") if found[name] is not None
    }


def _sides(case: Case) -> Sides:
    return sides_of(
        case.layout, case.ranks, case.seq_len, mask=case.mask, key_len=case.key_len, query_start=case.query_start
    )


def _static(case: Case, plan: Plan, kernel: Kernel) -> tuple[int, Kernel, Call, bool]:
    s, asked = case.shape, case.arguments
    rows, key_rows = (-(-held.rows // ROWS) * ROWS for held in (plan.tables.queries, plan.tables.keys))
    call = Call(
        *(s.batch, s.heads, s.kv_heads, s.head_size, s.value_size, case.dtype, rows, key_rows),
        scale=s.head_size**-0.5 if asked.scale is None else asked.scale,
        softcap=asked.softcap or 0.0,
        bias=asked.bias,
    )
    return case.ranks, choose((kernel,), call), call, uses_lse(case)


@lru_cache(maxsize=128)
def _program(ranks: int, kernel: Kernel, call: Call, with_lse: bool) -> Callable[..., Any]:
    """A compiled ring, forward and backward, of any mask and layout."""
    job = Job(ranks, (0, *[1] * (ranks - 1)), False, kernel, call, AXIS)
    tokens, everywhere = PartitionSpec(None, AXIS), PartitionSpec()

    def on_a_rank(arrays: dict[str, Any], tables: Tables) -> dict[str, Any]:
        def ring(q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
            return attend(job, Operands(q, k, v, tables, sinks, slopes))

        (out, lse), pull = jax.vjp(ring, *(arrays[name] for name in ("q", "k", "v", "sinks", "slopes")))
        dlse = arrays["dlse"] if with_lse else 0 * lse
        dq, dk, dv, dsinks, dslopes = pull((arrays["dout"], jnp.where(jnp.isneginf(lse), 0, dlse)))
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "dsinks": dsinks, "dbias": dslopes}

    by_token = dict.fromkeys(("q", "k", "v", "dout", "dlse"), tokens)
    results = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), tokens)
    run: Callable[..., Any] = jax.jit(
        jax.shard_map(
            on_a_rank,
            mesh=ring_mesh(ranks),
            in_specs=({**by_token, "sinks": everywhere, "slopes": everywhere}, everywhere),
            out_specs={**results, "dsinks": everywhere, "dbias": everywhere},
        )
    )
    return run


def _equally_long(plan: Plan) -> Tables:
    """A plan's tables for a program that stops at every rank."""
    tables, size = plan.tables, plan.ring_size
    place = np.searchsorted(plan.distances, np.arange(size + 1))
    tiles = np.zeros((_length(len(tables.tiles), FEWEST_TILES), 6), np.int32)
    tiles[: len(tables.tiles)] = tables.tiles
    return Tables(
        tiles, tables.edges[:, place], np.arange(size, dtype=np.int32), _longer(tables.queries), _longer(tables.keys)
    )


def _longer(held: Held) -> Held:
    ranks, count, _ = held.runs.shape
    runs = np.zeros((ranks, _length(count), 3), np.int32)
    runs[:, :, 0], runs[:, :count] = LARGEST, held.runs
    return Held(held.tokens, runs)


def _length(count: int, fewest: int = FEWEST) -> int:
    return max(fewest, 1 << (count - 1).bit_length())


def _slots(part: Partition) -> np.ndarray:
    """The token in each row of all shards, -1 for none."""
    slots = np.full((part.ring_size, -(-int(part.tokens.max(initial=0)) // ROWS) * ROWS), -1)
    for rank in range(part.ring_size):
        slots[rank, : part.tokens[rank]] = part.indices(rank)
    return slots.reshape(-1)


def _owners(part: Partition) -> np.ndarray:
    owners = np.empty(part.seq_len, np.int64)
    for rank in range(part.ring_size):
        owners[part.indices(rank)] = rank
    return owners


def _on_ranks(x: np.ndarray, slots: np.ndarray, dtype: Any) -> Any:
    """``[B, H, S, ...]`` as shards ``[B, R * T, H, ...]``."""
    rows = np.where((slots >= 0).reshape(-1, *[1] * (x.ndim - 2)), np.moveaxis(x, 1, 2)[:, slots], np.nan)
    return jnp.asarray(rows, dtype)


def _in_order(x: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """The inverse of `_on_ranks`."""
    real = np.flatnonzero(slots >= 0)
    rows = real[np.argsort(slots[real])]
    return np.moveaxis(np.asarray(x, np.float64)[:, rows], 2, 1)
