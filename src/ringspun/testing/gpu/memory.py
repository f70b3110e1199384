"""Peak bytes of forward + backward of a loopback ring on one device: what accounting says of each rank, added up, and
what a kernel takes inside of a call, which accounting leaves out."""

from __future__ import annotations

from collections.abc import Sequence

from ringspun.core.accounting import memory
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format

ACCOUNTED = "aten_flash"
"""The kernel of which it is known what it takes inside of a call."""
FLASH_ROWS = 128
"""The op's backward holds its float32 sum of dq in blocks of so many rows."""


def expected_peak(schedules: Sequence[Schedule], wire: Format, kernel: str) -> int:
    """Bytes, inputs included, at the worse of two moments: in backward, while one rank's largest tile is computed and
    the others are done; and at its end, when all ranks' gradients are joined into one tensor each.

    Of 2 ranks it is up to a tenth too much: they lend each other buffers that this counts twice.

    Args:
        schedules: of all ranks. kernel: its name.
    """
    ranks, gradients = [memory(s, wire) for s in schedules], [_gradients(s, wire) for s in schedules]
    held, largest = sum(m.inputs + m.out + m.leased for m in ranks), 0
    for schedule, own in zip(schedules, gradients, strict=True):
        computed = max((_call(tile, wire, kernel) for tile in schedule.backward.tiles.tolist()), default=0)
        largest = max(largest, computed + sum(gradients) - own)
    joined = sum(gradients) * (2 if len(schedules) > 1 else 1)
    return held + max(largest, joined)


def _gradients(schedule: Schedule, wire: Format) -> int:
    q, k = schedule.local_tokens, int(schedule.key_tokens[schedule.ring_rank])
    per_key = wire.kv_heads * (wire.head_size + wire.value_size)
    return wire.batch * wire.itemsize * (q * wire.heads * wire.head_size + k * per_key)


def _call(tile: list[int], wire: Format, kernel: str) -> int:
    """Results of a kernel's backward of one tile; of flash attention also what it works in, as its source has it
    (`mha_bwd` in ATen/native/transformers/cuda/flash_attn/flash_api.cpp)."""
    b0, b1, q0, q1, k0, k1, *_ = tile
    batch, n, m = (wire.batch if b1 < 0 else b1 - b0), q1 - q0, k1 - k0
    size, width = -(-max(wire.head_size, wire.value_size) // 8) * 8, wire.itemsize
    queries, keys = batch * n * wire.heads * size, batch * m * size
    results = width * (queries + 2 * keys * wire.kv_heads)
    if kernel != ACCOUNTED:
        return results
    rounded = batch * wire.heads * -(-n // FLASH_ROWS) * FLASH_ROWS
    sums = 4 * rounded * (-(-size // 32) * 32 + 1)  # of dq, and delta
    copies = 2 * width * queries + 4 * batch * wire.heads * n  # dout and out with heads innermost; lse
    of_groups = 2 * width * keys * wire.heads * (wire.heads != wire.kv_heads)
    return results + sums + copies + of_groups
