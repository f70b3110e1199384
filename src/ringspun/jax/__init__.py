"""Ring attention for JAX, on the core that `ringspun.torch` stands on. See `ring_attention`."""

from ringspun.errors import MissingExtra

try:
    import jax as _jax  # noqa: F401
except ImportError as problem:  # pragma: no cover
    raise MissingExtra("ringspun.jax needs JAX: pip install 'ringspun[jax]'") from problem

from ringspun.jax.attention import ring_attention, sharded_attention
from ringspun.jax.bias import Alibi
from ringspun.jax.kernels import Kernel, Xla
from ringspun.jax.sharding import positions, shard, unshard

__all__ = [
    "Alibi",
    "Kernel",
    "Xla",
    "positions",
    "ring_attention",
    "shard",
    "sharded_attention",
    "unshard",
]
