"""Rotary position embeddings on tensors: cosines and sines of integer positions, and the rotation of queries and keys.

Angles are formed in float64, taken modulo a turn, and only then rounded. In float32 the angle of position 1,048,575 is
off by up to 0.07 rad, in bfloat16 positions 256 and 257 are one number; here it is less than 1e-6 rad at any position
below 2**31, before the rounding of cosine and sine to their own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringspun.errors import DtypeError, ShapeError
from ringspun.train.rope import Rope


def cos_sin(
    positions: Tensor,
    rope: Rope,
    *,
    head_size: int,
    seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
    axes: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position and frequency, times the attention factor, each ``[..., T, rotated / 2]``.

    Args:
        positions: integers ``[..., T]``, this rank's own: of `Partition.positions` or `shard_batch`.
            With `axes`, ``[A, ..., T]``: a position on each of A axes (M-RoPE: time, height, width).
        rope: the frequencies. head_size: dims of one head.
        seq_len: the length that decides where `rope.needs_length` (tokens): `partition.position_count()`.
        dtype: of the result. axes: which axis each frequency follows ``[rotated / 2]``; sections of 16, 24, 24
            (Qwen2-VL) are ``[0] * 16 + [1] * 24 + [2] * 24``.
    Raises:
        DtypeError: positions that are no integers. ShapeError: axes that do not fit. ConfigError: as `Rope.inv_freq`.
    """
    inv_freq = torch.from_numpy(rope.inv_freq(head_size, seq_len=seq_len)).to(positions.device)
    if axes is None:
        return turned(positions, inv_freq, rope.attention_factor, dtype)
    if len(axes) != len(inv_freq) or positions.ndim < 2 or not all(0 <= a < len(positions) for a in axes):
        raise ShapeError(
            f"axes must name one axis of positions for each of {len(inv_freq)} frequencies; got {len(axes)} and "
            f"positions {tuple(positions.shape)}."
        )
    each = positions[torch.tensor(axes, device=positions.device)].movedim(0, -1)  # [..., T, rotated / 2]
    return turned(each, inv_freq, rope.attention_factor, dtype, per_frequency=True)


def turned(
    positions: Tensor, inv_freq: Tensor, attention_factor: float, dtype: torch.dtype, *, per_frequency: bool = False
) -> tuple[Tensor, Tensor]:
    """As `cos_sin`, from frequencies in float64.

    Args:
        positions: integers ``[..., T]``, or (`per_frequency`) ``[..., T, F]``. inv_freq: radians ``[F]``.
    """
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise DtypeError(f"positions must be integers; got {positions.dtype}. In bfloat16, 256 and 257 are one number.")
    if inv_freq.dtype != torch.float64:
        raise DtypeError(f"inv_freq must be float64; got {inv_freq.dtype}.")
    angles = (positions if per_frequency else positions[..., None]).double() * inv_freq
    angles = torch.remainder(angles, 2 * math.pi).to(torch.promote_types(dtype, torch.float32))
    return (angles.cos() * attention_factor).to(dtype), (angles.sin() * attention_factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Queries or keys, rotated; dims beyond the rotated ones stay as they are.

    Args:
        x: ``[B, H, T, D]``. cos, sin: of `cos_sin`, ``[T, F]`` or ``[B, T, F]``, 2F <= D.
        interleaved: a pair is dims 2i, 2i + 1 (GPT-J, Llama as Meta wrote it); else i, i + F (GPT-NeoX, Hugging Face).
    Returns:
        ``[B, H, T, D]`` in the dtype of `x`.
    Raises:
        ShapeError: tokens or dims that do not fit.
    """
    half = cos.shape[-1]
    if cos.shape != sin.shape or x.ndim != 4 or x.shape[-2] != cos.shape[-2] or 2 * half > x.shape[-1]:
        raise ShapeError(
            f"cos and sin must be [T, F] or [B, T, F] for x [B, H, T, D], 2F <= D; got {tuple(cos.shape)}, "
            f"{tuple(sin.shape)} for {tuple(x.shape)}."
        )
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # over all heads
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turning[..., i::2] if interleaved else turning[..., i * half : (i + 1) * half] for i in (0, 1))
    pair = a * cos - b * sin, b * cos + a * sin
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([both.to(x.dtype), rest], dim=-1)
