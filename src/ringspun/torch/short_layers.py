"""Layers that look a few tokens back, over a sequence that is dealt to ranks: shifts and short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ringspun.errors import DtypeError, RingspunError, ShapeError
from ringspun.torch.halo import tell, widened

if TYPE_CHECKING:
    from ringspun.torch.partition import Partition


def shift(part: Partition, x: Tensor, by: int, dim: int) -> Tensor:
    """See `ringspun.torch.Partition.shift`."""
    wide, rows = widened(part, x, by, dim)
    return wide.index_select(dim, rows - by)


def causal_conv1d(part: Partition, x: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> Tensor:
    """See `ringspun.torch.Partition.causal_conv1d`."""
    try:
        dim = _checked(x, weight, bias, dim)
    except RingspunError as failure:
        tell(part, failure)
        raise
    channels, before = weight.shape[0], weight.shape[-1] - 1
    wide, rows = widened(part, x, before, dim)
    made = F.conv1d(wide.movedim(dim, 2), weight.reshape(channels, 1, -1), groups=channels)
    # rows of zeros and of others have outputs too, of which nobody makes use
    out = made.movedim(2, dim).index_select(dim, rows - before)
    if bias is None:
        return out
    bias = bias.to(out.dtype)
    return out + (bias if dim == 1 else bias[:, None])


def _checked(x: Tensor, weight: Tensor, bias: Tensor | None, dim: int) -> int:
    """`dim` counted from 0; raises unless the filter fits the tensor."""
    if not isinstance(x, Tensor) or x.ndim != 3 or dim not in (1, 2, -1, -2):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"x must be [B, T, C], or [B, C, T] with dim=2; got {got} and dim={dim!r}.")
    dim, dtype = dim % 3, x.dtype
    channels = x.shape[3 - dim]
    fits = isinstance(weight, Tensor) and weight.numel() > 0 and weight.shape[0] == channels
    if not fits or not (weight.ndim == 2 or (weight.ndim == 3 and weight.shape[1] == 1)):
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ShapeError(f"weight must be [C, K], or [C, 1, K], with C = {channels} as x has; got {got}.")
    for name, given in (("weight", weight), ("bias", bias)):
        if isinstance(given, Tensor) and given.device != x.device:
            raise DtypeError(f"{name} must be on x's device; got {given.device} and {x.device}.")
    if bias is not None and (not isinstance(bias, Tensor) or bias.shape != (channels,)):
        got = tuple(bias.shape) if isinstance(bias, Tensor) else type(bias).__name__
        raise ShapeError(f"bias must be [{channels}]; got {got}.")
    kind = x.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if not dtype.is_floating_point or not (cast or weight.dtype == dtype):
        raise DtypeError(f"x and weight must be floating point, of one dtype; got {dtype} and {weight.dtype}.")
    return dim
