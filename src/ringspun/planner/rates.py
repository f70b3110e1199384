"""How fast devices compute and links carry, by size: small batches and short slices come out as slow as they are.

Constants marked "assumed" have no published figure; they matter little on long slices.
"""

from __future__ import annotations

import math

from ringspun.core.links import Link
from ringspun.planner.hardware import Cluster, Device

TILE = 128
"""Rows of a kernel's tile; shorter slices are padded to it."""
RAMP = 256
"""Rows at which attention reaches half of its rate on long slices. Assumed."""
LAUNCH_S = 10e-6
"""A kernel's launch. Assumed."""
STREAMS = 16
"""Tensors of the residual stream's width that a layer moves through memory, forward: norms, rotations, sums.
Assumed."""


def attention_rate(device: Device, heads: float, rows: float) -> float:
    """FLOP/s of attention of one step of a ring.

    Args:
        heads: of this device, times sequences of its batch. rows: of its slice.
    """
    tiles = math.ceil(rows / TILE)
    parts = heads * tiles / device.units
    return device.attention * rows / (tiles * TILE) * parts / math.ceil(parts) * rows / (rows + RAMP)


def linear_seconds(device: Device, flops: float, weight_bytes: float) -> float:
    """Of matrix products: their FLOPs, or reading their weights, whichever takes longer."""
    return max(flops / device.matmul, weight_bytes / device.memory_bytes_per_s)


def stream_seconds(device: Device, tokens: float, hidden: int, element_bytes: int) -> float:
    """Of a layer's work that is neither products nor attention, forward."""
    return STREAMS * tokens * hidden * element_bytes / device.memory_bytes_per_s


def exchange_seconds(link: Link, n_bytes: float, ranks: int) -> float:
    """Of an all-to-all among `ranks` in which each holds `n_bytes`."""
    return link.seconds(math.ceil(n_bytes * (ranks - 1) / ranks)) if ranks > 1 else 0.0


def gather_seconds(cluster: Cluster, devices: int, n_bytes: float, *, stride: int = 1) -> float:
    """Of an all-gather (or reduce-scatter) after which each of `devices` holds `n_bytes`. Between nodes every device of
    a node brings in its part, and they share it inside.

    Args:
        stride: devices from one of the group to the next.
    """
    if devices == 1 or n_bytes <= 0:
        return 0.0
    near = cluster.near_collective.seconds(math.ceil(n_bytes * (devices - 1) / devices))
    nodes = math.ceil(devices * stride / cluster.node)
    if nodes == 1:
        return near
    members = max(1, cluster.node // stride)
    far = cluster.far_collective.seconds(math.ceil(n_bytes)) * (1 - 1 / nodes) / members
    return max(near, far) if members > 1 else far
