"""A Flax NNX attention layer whose sequence is cut over a ring: `attention_fn` is all that changes. Prints how far it
is from the same layer on one device.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/flax_nnx.py
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from ringspun import Causal, Zigzag
from ringspun.jax import ring_attention, shard, unshard

TOKENS, WIDTH, LAYOUT, SPEC = 64, 32, Zigzag(), P(None, "ring")


def attention_fn(query, key, value, mask=None, dropout_rate=0.0, **told):
    """What `nnx.MultiHeadAttention` calls with ``[B, T, H, D]``; what a ring cannot do it refuses."""
    if mask is not None or dropout_rate:
        raise ValueError(
            "mask and dropout_rate must be left out; what may be seen is said here, dropout there is none."
        )
    return ring_attention(query, key, value, axis_name="ring", mask=Causal(), layout=LAYOUT)


def layer(**options):
    return nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=nnx.Rngs(0), **options)


def main():
    mesh = jax.make_mesh((4,), ("ring",), devices=jax.devices()[:4])
    x = jax.random.normal(jax.random.key(0), (2, TOKENS, WIDTH))
    structure, weights = nnx.split(layer(attention_fn=attention_fn))

    def on_a_device(weights, x):
        return nnx.merge(structure, weights)(x)

    run = jax.jit(jax.shard_map(on_a_device, mesh=mesh, in_specs=(P(), SPEC), out_specs=SPEC))
    held = {"mesh": mesh, "spec": SPEC, "layout": LAYOUT}
    out = unshard(run(weights, shard(x, **held)), seq_len=TOKENS, **held)
    plain = layer()(x, mask=nnx.make_causal_mask(x[..., 0]))
    print(f"largest difference {float(jnp.abs(jax.device_get(out) - jax.device_get(plain)).max()):.1e}")


if __name__ == "__main__":
    main()
