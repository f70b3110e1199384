"""One of two processes with two devices each: a ring of four over gloo. Run as ``python FILE ADDRESS NUMBER``; prints
the largest error of out and dq against the oracle."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ringspun import Causal, Zigzag
from ringspun.jax import shard, sharded_attention, unshard
from ringspun.testing.cases import Case, inputs, reference


def main(address: str, number: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", True)  # compiled once, run once
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=number)
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(AxisType.Auto,))
    case = Case(4, 18, Causal(), Zigzag())
    given = inputs(case)
    held = {"mesh": mesh, "spec": PartitionSpec(None, "ring"), "layout": case.layout}
    q, k, v, dout = (shard(np.moveaxis(x, 1, 2), **held) for x in (given.q, given.k, given.v, given.dout))
    assert q.shape[1] == 20 and len(q.addressable_shards) == 2

    @jax.jit
    def step(q, k, v, dout):
        out, pull = jax.vjp(partial(sharded_attention, seq_len=18, **held), q, k, v)
        return [unshard(x, seq_len=18, **held) for x in (out, pull(dout)[0])]

    ref = reference(case, replace(given, dlse=0 * given.dlse))
    found = step(q, k, v, dout)
    errors = [abs(np.moveaxis(np.asarray(x), 2, 1) - y).max() for x, y in zip(found, (ref.out, ref.dq), strict=True)]
    print(max(errors))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
