"""Ring attention for PyTorch. See `ContextParallel`."""

from ringspun.errors import MissingExtra

try:
    import torch as _torch  # noqa: F401
except ImportError as problem:  # pragma: no cover
    raise MissingExtra("ringspun.torch needs PyTorch: pip install 'ringspun[torch]'") from problem

from ringspun.torch.bias import Alibi, RelativeTable
from ringspun.torch.checkpointing import keep_attention
from ringspun.torch.context import ContextParallel
from ringspun.torch.drivers import Gloo, Loopback, Nccl
from ringspun.torch.functional import blockwise_attention, ring_attention
from ringspun.torch.partition import Partition
from ringspun.torch.plan import Plan
from ringspun.torch.reduction import reduce_gradients, watch_gradients
from ringspun.torch.sdpa import checkpoint_contexts
from ringspun.torch.softmax import merge

__all__ = [
    "Alibi",
    "ContextParallel",
    "Gloo",
    "Loopback",
    "Nccl",
    "Partition",
    "Plan",
    "RelativeTable",
    "blockwise_attention",
    "checkpoint_contexts",
    "keep_attention",
    "merge",
    "reduce_gradients",
    "ring_attention",
    "watch_gradients",
]
