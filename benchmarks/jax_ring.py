"""Rings of devices in JAX, side by side in one process: how long a step (forward and backward) takes.

    XLA_FLAGS="--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false" \
        python benchmarks/jax_ring.py --seq-len 16384

Each round times every candidate once, in turn; shown are medians, and medians of the ratios to the first. `published`
is `ringspun.testing.peers.jax_published`; "contiguous causal" the same ring with this package's kernel.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from ringspun import Causal, Contiguous, Documents, Full, Window, Zigzag
from ringspun.core import regions
from ringspun.jax import Xla, ring_attention
from ringspun.testing.cases import LONG_TAILED
from ringspun.testing.peers.jax_published import published

TOKENS = PartitionSpec(None, "ring")


def candidates(seq_len: int) -> dict[str, dict[str, object]]:
    """What is compared, by name."""
    scaled = [max(1, n * seq_len // sum(LONG_TAILED)) for n in LONG_TAILED]
    documents = Documents([*scaled[:-1], seq_len - sum(scaled[:-1])])
    return {
        "zigzag causal": {"layout": Zigzag(), "mask": Causal()},
        "contiguous causal": {"layout": Contiguous(), "mask": Causal()},
        "zigzag full": {"layout": Zigzag(), "mask": Full()},
        "zigzag window of S / 16": {"layout": Zigzag(), "mask": Window(seq_len // 16)},
        "zigzag documents": {"layout": Zigzag(), "mask": Causal() & documents},
    }


def allowed_pairs(mask: object, seq_len: int) -> int:
    """Pairs that a mask allows."""
    return int(regions.count(mask.regions(seq_len, seq_len)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=16384, help="global length (tokens)")
    parser.add_argument("--ranks", type=int, default=2, help="devices")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=256, help="of the kernel (tokens)")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    mesh = jax.make_mesh((asked.ranks,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[: asked.ranks])
    rng = np.random.default_rng(0)
    shape = (1, asked.seq_len, asked.heads, asked.head_size)
    placed = jax.sharding.NamedSharding(mesh, TOKENS)
    x = [jax.device_put(jnp.asarray(rng.standard_normal(shape), jnp.float32), placed) for _ in range(3)]

    def step(options: dict[str, object]) -> object:
        def on_a_rank(q, k, v):
            attend = partial(ring_attention, axis_name="ring", kernel=Xla(asked.block_size), **options)
            if not options:
                attend = partial(published, chunk=asked.block_size)
            out, pull = jax.vjp(attend, q, k, v)
            return pull(out)

        return jax.jit(jax.shard_map(on_a_rank, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS))

    named = {**candidates(asked.seq_len), "published": {}}
    steps = {name: step(options) for name, options in named.items()}
    pairs = {name: allowed_pairs(options.get("mask", Causal()), asked.seq_len) for name, options in named.items()}
    found = {name: jax.block_until_ready(run(*x)) for name, run in steps.items()}
    for a, b in zip(found["published"], found["contiguous causal"], strict=True):
        assert float(abs(a - b).max()) < 1e-3, "they compute different things"
    del found
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(asked.rounds):
        for name, run in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*x))
            times[name].append(time.perf_counter() - start)
    first = next(iter(times))
    report = {
        name: {
            "median_s": median(seconds),
            "ratio": median(a / b for a, b in zip(seconds, times[first], strict=True)),
            "pairs_ratio": pairs[name] / pairs[first],
        }
        for name, seconds in times.items()
    }
    print(json.dumps({"jax": jax.__version__, **vars(asked), "candidates": report}, indent=1))


if __name__ == "__main__":
    main()
