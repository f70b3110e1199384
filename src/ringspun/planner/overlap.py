"""When a hop of the ring hides behind the compute of a step, and the shortest slice that does it."""

from __future__ import annotations

from dataclasses import dataclass

from ringspun.core.links import Link
from ringspun.core.wire import Format, Payload
from ringspun.planner.hardware import Device
from ringspun.planner.models import Model
from ringspun.planner.rates import LAUNCH_S, TILE, attention_rate

NEVER = float("inf")
MOST_TOKENS = 1 << 26
"""Of a slice; beyond, nobody looks."""


def least_block(
    flops: float, bytes_per_s: float, *, element_bytes: int = 2, kv_per_query_head: float = 1.0, causal: bool = False
) -> float:
    """Tokens of a device from which a hop hides, by peak figures: c >= F / B.

    Args:
        flops: of a device (FLOP/s). bytes_per_s: of its link, one way. kv_per_query_head: K / H; grouped heads send
            less.
        causal: a balanced layout computes half the pairs, so that it takes twice the slice.
    Source: arXiv 2310.01889 section 3: 4 d c^2 / F >= 4 d c / B, bfloat16.
    """
    return flops / bytes_per_s * element_bytes / 2 * kv_per_query_head * (2 if causal else 1)


@dataclass(frozen=True)
class Hop:
    """One hop of one layer, in seconds.

    Args:
        compute: of a step. transfer: of the block that travels meanwhile.
    """

    compute: float
    transfer: float

    @property
    def hides(self) -> bool:
        """Whether nobody waits for it."""
        return self.transfer <= self.compute


def hop(
    device: Device, link: Link, model: Model, tokens: int, *, batch: int = 1, shared_heads: int = 1,
    element_bytes: int = 2, causal: bool = True, backward: bool = False,
) -> Hop:  # fmt: skip
    """One hop between equal, balanced slices.

    Args:
        tokens: of a slice, of each sequence. shared_heads: devices that share out the heads (ulysses * tp).
        backward: the blocks go round again, with their gradients in float32.
    """
    heads = model.heads / shared_heads
    kv_heads = max(1, model.kv_heads // shared_heads)
    wire = Format(batch, round(heads), kv_heads, model.head_size, model.head_size, "", element_bytes, 4)
    flops = (10 if backward else 4) * tokens * tokens * heads * model.head_size * batch * (0.5 if causal else 1)
    compute = flops / attention_rate(device, heads * batch, tokens) + LAUNCH_S
    sent = wire.message_bytes(Payload.KV, tokens) + (wire.message_bytes(Payload.DKV, tokens) if backward else 0)
    return Hop(compute, link.seconds(sent))


def least_slice(
    device: Device, link: Link, model: Model, *, batch: int = 1, shared_heads: int = 1, element_bytes: int = 2,
    causal: bool = True,
) -> float:  # fmt: skip
    """The slice (tokens) from which on every hop hides, forward and backward, kernels and link at the rates that they
    reach by size; `NEVER` if there is none. Very short slices hide too, but only because they are computed slowly."""

    def hides(tokens: int) -> bool:
        return all(
            hop(
                device, link, model, tokens, batch=batch, shared_heads=shared_heads, element_bytes=element_bytes,
                causal=causal, backward=backward,
            ).hides
            for backward in (False, True)
        )  # fmt: skip

    high = MOST_TOKENS
    if not hides(high):
        return NEVER
    while high > TILE and hides(high // 2):
        high //= 2
    if high <= TILE:
        return float(TILE)
    low = high // 2
    while high - low > max(1, high // 256):
        middle = (low + high) // 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return float(high)
