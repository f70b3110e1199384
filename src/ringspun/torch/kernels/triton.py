"""`triton`: attention that keeps (acc, m, l) on the device from the first step of a ring to the last.

A step is one launch: its bands are taken whole, whatever their number, and what was met so far is read and written
once. Nothing is normalised, written and merged between steps. Backward is two launches per step, one over queries and
one over keys, without atomics. What the launches do stands in `triton_kernels`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ringspun.core import tiles as tl
from ringspun.torch.buffers import current_stream
from ringspun.torch.kernels.accumulate import AccumulatingKernel, Accumulator, Result
from ringspun.torch.kernels.base import Block, Call, Gradients, Rows, Saved, StepTiles
from ringspun.torch.kernels.block_lists import block_list
from ringspun.torch.kernels.cuda_operands import compute_capability

LARGEST_HEAD = 256
OLDEST = (8, 0)
"""Compute capability. Triton does not support older ones; bfloat16 does not compile there."""
ROWS_OF_FINISH = 64


@dataclass(frozen=True)
class Launch:
    """How a launch is cut.

    Args:
        rows, keys: of a block (tokens; powers of two, 16 or more). warps, stages: of a program, and of its pipeline.
    """

    rows: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Launches:
    """Of all that a call does: forward; backward over queries; backward over keys."""

    forward: Launch
    queries: Launch
    keys: Launch


ROOMY = 200 << 10
"""Shared memory of a program (bytes) from which on the larger blocks fit. Data centre cards since Hopper have 227 K."""
WIDE_BLOCKS = (
    (64, Launches(Launch(128, 128, 8, 3), Launch(128, 64, 8, 3), Launch(32, 128, 8, 3))),
    (128, Launches(Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(32, 128, 8, 2))),
    (256, Launches(Launch(128, 32, 8, 2), Launch(64, 32, 8, 2), Launch(32, 64, 8, 1))),
)
NARROW_BLOCKS = (
    (64, Launches(Launch(128, 64, 8, 2), Launch(128, 64, 8, 2), Launch(32, 128, 8, 2))),
    (128, Launches(Launch(128, 32, 8, 2), Launch(64, 32, 8, 2), Launch(32, 64, 8, 2))),
    (256, Launches(Launch(64, 32, 8, 1), Launch(32, 32, 8, 1), Launch(16, 32, 8, 1))),
)
FLOAT32_BLOCKS = (
    (128, Launches(Launch(32, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1))),
    (256, Launches(Launch(16, 32, 8, 1), Launch(16, 32, 8, 1), Launch(16, 16, 8, 1))),
)
"""Of head sizes up to so many columns. Chosen by what the compiler says of registers spilled and shared memory for
capabilities 9.0 and 10.0, and 8.0 and 8.9; no card was at hand. float32 has no tensor cores here, and fits anywhere."""


def launches(head_size: int, itemsize: int, shared_bytes: int) -> Launches:
    """By table. Not by trial: a stopwatch would choose other blocks on another day, and so other bits.

    Args:
        head_size: the larger of those of q and v. itemsize: of their dtype (bytes). shared_bytes: that a program of
            the device may have.
    """
    table = FLOAT32_BLOCKS if itemsize == 4 else WIDE_BLOCKS if shared_bytes >= ROOMY else NARROW_BLOCKS
    return next(found for most, found in table if head_size <= most)


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0))


class Triton(AccumulatingKernel):
    """bfloat16, float16 and float32 on CUDA devices, head sizes up to 256, GQA, softcap; sums in float32.

    With ``TRITON_INTERPRET=1`` in the environment before Triton is imported it is interpreted on the CPU, in float32:
    slow, and what tests do.

    Args:
        launches: how launches are cut, of any head size; default `launches`.
    """

    name = "triton"
    devices = ("cuda",)
    by_name_only = True

    def __init__(self, launches: Launches | None = None) -> None:
        self._launches = launches

    def refuses(self, call: Call) -> str | None:
        if not installed():
            return "triton must be installed; pip install triton"
        if call.device != "cuda" and not interpreted():
            return f"device must be cuda; got {call.device} (TRITON_INTERPRET=1 in the environment interprets it there)"
        reasons = []
        here = compute_capability() if call.device == "cuda" else None
        if here is not None and here < OLDEST:
            reasons.append("compute capability must be {}.{} or more; got {}.{}".format(*OLDEST, *here))
        if interpreted() and call.dtype != torch.float32:
            reasons.append(f"dtype must be float32 where Triton is interpreted; got {call.dtype}")
        elif call.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            reasons.append(f"dtype must be bfloat16, float16 or float32; got {call.dtype}")
        if max(call.head_size, call.value_size) > LARGEST_HEAD:
            reasons.append(f"head sizes must be at most {LARGEST_HEAD}; got {call.head_size} and {call.value_size}")
        if call.bias:
            reasons.append(f"bias must be None; got {call.bias}")
        return ", ".join(reasons) or None

    def start(self, result: Result) -> Accumulator:
        return _State(self, result)

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        cut = self._cut(block)
        lists = (
            self._list(tiles, cut.queries.rows, False, block.q.device),
            self._list(tiles, cut.keys.keys, True, block.q.device),
        )
        if lists[0] is None or lists[1] is None:
            return
        q, k, v, dout = (_dense(x) for x in (block.q, block.k, block.v, saved.dout))
        b, heads, kv_heads, rows, keys = q.shape[0], q.shape[1], k.shape[1], lists[0].rows, lists[1].rows
        d, e = q.shape[-1], v.shape[-1]
        dq, dk, dv = (
            q.new_empty((b, h, hull.stop - hull.start, size), dtype=torch.float32)
            for h, hull, size in ((heads, rows, d), (kv_heads, keys, d), (kv_heads, keys, e))
        )
        known = [x for one in (q, k, v, dout, saved.lse, saved.delta) for x in (one, one.stride()[:3])]
        score, shared = (*_score(block), float(block.scale)), _shared(block)
        code = _code()
        with _on(q):
            code.backward_of_queries[lists[0].blocks, heads, b](
                *known, dq, rows.start, rows.stop, *lists[0].tensors, q.shape[2], *score, **shared,
                **_of_launch(cut.queries),
            )  # fmt: skip
            code.backward_of_keys[lists[1].blocks, kv_heads, b](
                *known, dk, dv, keys.start, keys.stop, *lists[1].tensors, k.shape[2], *score, **shared,
                **_of_launch(cut.keys),
            )  # fmt: skip
        everybody = slice(0, None)
        yield Gradients(Rows(everybody, rows), Rows(everybody, keys), dq, dk, dv)

    def step(self, state: tuple[Tensor, Tensor, Tensor], block: Block, tiles: StepTiles) -> None:
        """Take the pairs of `tiles` into acc ``[B, H, T, Dv]``, m and l ``[B, H, T]``, parts of a state's."""
        cut = self._cut(block).forward
        met = self._list(tiles, cut.rows, False, block.q.device)
        if met is None:
            return
        q, k, v = (_dense(x) for x in (block.q, block.k, block.v))
        inner, outer = _score(block)
        sign = int(math.copysign(1, block.scale)) if block.scale else 0
        if not block.softcap:  # the largest score is scaled, not each before: that is right for positive scales only
            outer = abs(outer) if sign else 1.0
        with _on(q):
            _code().forward[met.blocks, q.shape[1], q.shape[0]](
                *(x for one in (q, k, v) for x in (one, one.stride()[:3])), *state, state[1].stride()[:2],
                *met.tensors, q.shape[2], abs(inner), outer, SIGN=sign, **_shared(block), **_of_launch(cut),
            )  # fmt: skip

    def _cut(self, block: Block) -> Launches:
        size, q = max(block.q.shape[-1], block.v.shape[-1]), block.q
        return self._launches or launches(size, q.element_size(), _shared_bytes(q.device))

    def _list(self, tiles: StepTiles, size: int, turned: bool, device: torch.device) -> _DeviceList | None:
        # Of this stream: on another the copy may not have come when a launch there reads it.
        key = self.name, size, turned, device, current_stream(device)
        if key not in tiles.kept:
            tiles.kept[key] = _DeviceList.of(tl.turned(tiles.tiles) if turned else tiles.tiles, size, device)
        found: _DeviceList | None = tiles.kept[key]
        return found


@dataclass(frozen=True)
class _DeviceList:
    """A `BlockList` on a device: its hull, how many blocks it has, and tiles, blocks, offsets, order."""

    rows: slice
    blocks: int
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, tiles: tl.Tiles, size: int, device: torch.device) -> _DeviceList | None:
        found = block_list(tiles, size)
        if found is None:
            return None
        packed, sizes = found.packed()
        host = torch.from_numpy(packed)
        if device.type == "cuda":  # or the copy would wait for what is queued
            host = host.pin_memory()
        tensors = torch.split(host.to(device, non_blocking=True), sizes)
        return cls(slice(found.first, found.last), len(found.blocks), tensors)


class _State(Accumulator):
    """acc, m and l of all rows (`triton_kernels`)."""

    def __init__(self, kernel: Triton, result: Result) -> None:
        self._kernel, self._result, shape = kernel, result, result.shape
        self._acc = result.room(shape, torch.float32)
        self._m = torch.full(shape[:-1], -torch.inf, dtype=torch.float32, device=result.device)
        self._l = torch.zeros(shape[:-1], dtype=torch.float32, device=result.device)

    def step(self, block: Block, tiles: StepTiles, heads: slice) -> None:
        self._kernel.step((self._acc[:, heads], self._m[:, heads], self._l[:, heads]), block, tiles)

    def finish(self, sinks: Tensor | None, parts: Sequence[slice]) -> tuple[Tensor, Tensor]:
        acc, shape, dtype = self._acc, self._result.shape, self._result.dtype
        out = acc if dtype == acc.dtype else torch.empty(shape, dtype=dtype, device=acc.device)
        rows, size = self._m.numel(), shape[-1]
        if rows:
            sinks = None if sinks is None else sinks.contiguous()
            with _on(acc):
                _code().finish[-(-rows // ROWS_OF_FINISH),](
                    acc, self._m, self._l, sinks, out, rows, shape[2], shape[1], ROWS=ROWS_OF_FINISH, E=size,
                    WIDE_E=padded(size), SINKS=sinks is not None,
                )  # fmt: skip
        return out, self._m


def _score(block: Block) -> tuple[float, float]:
    """``inner, outer``: a score in base 2 is ``outer * q.k``, or ``outer * tanh(inner * q.k)``."""
    log2_e = math.log2(math.e)
    return (block.scale / block.softcap, block.softcap * log2_e) if block.softcap else (0.0, block.scale * log2_e)


def _shared(block: Block) -> dict[str, Any]:
    """What all launches are specialised by."""
    d, e = block.q.shape[-1], block.v.shape[-1]
    group = block.q.shape[1] // block.k.shape[1]
    return {"GROUP": group, "D": d, "E": e, "WIDE_D": padded(d), "WIDE_E": padded(e), "SOFTCAP": block.softcap > 0}


def _of_launch(cut: Launch) -> dict[str, int]:
    how = {"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": True}
    return {"ROWS": cut.rows, "KEYS": cut.keys, **how}


def padded(size: int) -> int:
    """Columns of a block: a power of two, and as many as a product takes at least."""
    return max(16, 1 << (size - 1).bit_length())


def _dense(x: Tensor) -> Tensor:
    """`x`, or a copy in which a row's entries lie next to each other."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _on(x: Tensor) -> AbstractContextManager[object]:
    """Launches go to the current device, which need not be that of the tensors."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()


@cache
def installed() -> bool:
    """Whether Triton is there."""
    return importlib.util.find_spec("triton") is not None


@cache
def _code() -> Any:
    from ringspun.torch.kernels import triton_kernels

    return triton_kernels


def interpreted() -> bool:
    """Whether Triton interprets what it is given: decided when it is first imported."""
    return installed() and type(_code().forward).__name__ == "InterpretedFunction"
