"""An Equinox layer trained on a sequence cut over a ring: the loss and its gradients are those of the whole sequence.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/equinox_layer.py    # any number of devices
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from ringspun import Causal, Documents, Zigzag
from ringspun.jax import ring_attention, shard

TOKENS, WIDTH, HEADS, LAYOUT = 61, 32, 4, Zigzag()
MASK = Causal() & Documents([40, 21])
SPEC = P(None, "ring")


class Attention(eqx.Module):
    """Attention of ``[B, T, width]``, on each device of the ring."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=first)
        self.out = eqx.nn.Linear(WIDTH, WIDTH, key=second)

    def __call__(self, x):
        q, k, v = jnp.split(jax.vmap(jax.vmap(self.qkv))(x).reshape(*x.shape[:2], 3 * HEADS, -1), 3, axis=2)
        seen = ring_attention(q, k, v, axis_name="ring", mask=MASK, layout=LAYOUT, seq_len=TOKENS)
        return jax.vmap(jax.vmap(self.out))(seen.reshape(x.shape))


def main():
    mesh = jax.make_mesh((jax.device_count(),), ("ring",))
    layer = Attention(jax.random.key(0))
    x, y = jax.random.normal(jax.random.key(1), (2, 2, TOKENS, WIDTH))
    held = {"mesh": mesh, "spec": SPEC, "layout": LAYOUT}
    real = jnp.ones((2, TOKENS, 1))

    def loss(weights, x, y, real):
        errors = real * (eqx.combine(weights, rest)(x) - y) ** 2  # rows without a token count nothing
        return jax.lax.psum(errors.sum(), "ring") / (2 * TOKENS * WIDTH)

    weights, rest = eqx.partition(layer, eqx.is_array)
    step = jax.jit(
        jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), SPEC, SPEC, SPEC), out_specs=(P(), P()))
    )
    batch = [shard(a, **held) for a in (x, y, real)]
    for _ in range(3):
        value, gradients = step(weights, *batch)
        print(f"loss {float(value):.6f}")
        weights = jax.tree.map(lambda w, g: w - 0.5 * g, weights, gradients)


if __name__ == "__main__":
    main()
