"""`aten_flash`: torch's flash attention on NVIDIA GPUs, forward and backward; windows and packed documents whole.

FlashAttention-3 or 4 take its place under the same ops, by `torch.nn.attention.activate_flash_attention_impl`.
What is said here of the ops is read in PyTorch's source (ATen/native/transformers/cuda, 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspun.torch.kernels.base import (
    Block,
    Call,
    Gradients,
    Kernel,
    Partial,
    Rows,
    Saved,
    StepTiles,
    tile_rows,
)
from ringspun.torch.kernels.cuda_operands import compute_capability, gradients, padded, ready, refusal, scale_refusal
from ringspun.torch.kernels.windows import Piece, Window, WindowCall
from ringspun.torch.uploads import uploaded

LARGEST = 256
OF_NO_BACKWARD = range(193, 225)
"""Head sizes that GPUs with little shared memory (8.6, 8.9, 12.x) cannot do in backward."""
SMALL_SHARED = ((8, 6), (8, 7), (8, 8), (8, 9), (12, 0), (12, 1))


@dataclass(frozen=True)
class FlashOps:
    """The ops. Tensors are ``[B, T, H, D]``, or packed ``[T, H, D]``; lse is ``[B, H, T]``, or ``[H, T]``."""

    forward: Callable[..., Any] = torch.ops.aten._flash_attention_forward.default
    backward: Callable[..., Any] = torch.ops.aten._flash_attention_backward.default


class AtenFlash(Kernel):
    """float16 and bfloat16, GQA, head sizes up to 256; q, k and v share one: the shorter are padded.

    A tile is one call whatever its band, and documents packed into a sequence are one call together. Rows of a call
    always see some key of it: the op's lse of a row that sees none is not -inf. The op adds up dq in any order, unless
    ``torch.use_deterministic_algorithms(True)``: gradients of the same inputs may then differ in their last bits.

    Args:
        ops: what is called; others for tests.
    """

    name = "aten_flash"
    devices = ("cuda",)

    def __init__(self, ops: FlashOps | None = None) -> None:
        self._ops = FlashOps() if ops is None else ops

    def refuses(self, call: Call) -> str | None:
        reason = refusal(call, (torch.float16, torch.bfloat16), (8, 0)) or scale_refusal(call)
        if reason is not None:
            return reason
        size = max(call.head_size, call.value_size)
        if size > LARGEST:
            return f"head sizes must be at most {LARGEST}; got {size}"
        if padded(size) in OF_NO_BACKWARD and compute_capability() in SMALL_SHARED:
            return (
                f"head sizes must be outside of {OF_NO_BACKWARD.start} to {OF_NO_BACKWARD[-1]} on this GPU; got {size}"
            )
        if torch.cuda.is_available() and not torch.backends.cuda.is_flash_attention_available():
            return "torch must be built with flash attention; it was not"
        return None

    def forward(self, block: Block, tiles: StepTiles) -> Iterator[Partial]:
        given, value_size = _Given.of(block), block.v.shape[-1]
        for call in tiles.windows:
            for rows, part in _parts(call, block.q.shape[0]):
                q, k, v = given.rows(rows, part)
                out, lse = self._ops.forward(q, k, v, *part.lengths(q.device), **part.options(block.scale))[:2]
                for piece in part.found:
                    found, its_lse = part.of_queries(out, piece)[..., :value_size], part.of_lse(lse, piece)
                    yield Partial(Rows(rows, slice(piece.q0, piece.q1)), found, its_lse)
                del q, k, v, out, lse, found, its_lse  # gone before the next are made

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        given, sizes = _Given.of(block, saved), (block.q.shape[-1], block.k.shape[-1], block.v.shape[-1])
        for call in tiles.windows:
            for rows, part in _parts(call, block.q.shape[0]):
                dq, dk, dv = self._gradients(given, saved, block.scale, rows, part)
                for piece in part.found:
                    parts = part.of_queries(dq, piece), part.of_keys(dk, piece), part.of_keys(dv, piece)
                    q_rows, k_rows = (Rows(rows, slice(*ends)) for ends in (piece[:2], piece[2:]))
                    yield Gradients(q_rows, k_rows, *(x[..., :n] for x, n in zip(parts, sizes, strict=True)))
                del dq, dk, dv, parts  # gone before the next are made

    def _gradients(
        self, given: _Given, saved: Saved, scale: float, rows: slice, part: _Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As the op lays them out."""
        q, k, v = given.rows(rows, part)
        tokens = Rows(rows, slice(*part.rows))
        known = saved.rows(tokens)
        dout, out = (None if x is None else part.laid(x[rows], part.rows) for x in (given.dout, given.out))
        lse = part.laid_lse(known.lse)
        unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a dropout that there is not
        lengths, options = part.lengths(q.device)[:-1], part.options(scale)

        def run(dout: Tensor, v: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found: tuple[Tensor, Tensor, Tensor] = self._ops.backward(
                dout, q, k, v, out, lse, *lengths, unused, unused, **options
            )
            return found

        assert dout is not None, "of a backward"
        flat = known._replace(
            delta=part.by_row(known.delta), dlse=None if known.dlse is None else part.by_row(known.dlse)
        )
        return gradients(flat, dout, v, out, run)


class _Given(NamedTuple):
    """All of a block's operands, ready for the op: of one head size."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None
    out: Tensor | None = None

    @classmethod
    def of(cls, block: Block, saved: Saved | None = None) -> _Given:
        size = padded(max(block.q.shape[-1], block.v.shape[-1]))
        known = () if saved is None else (saved.dout, saved.out)
        return cls(*(None if x is None else ready(x, size) for x in (block.q, block.k, block.v, *known)))  # type: ignore[arg-type]

    def rows(self, rows: slice, part: _Part) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a part, as the op lays them out."""
        return (
            part.laid(self.q[rows], part.rows),
            part.laid(self.k[rows], part.keys),
            part.laid(self.v[rows], part.keys),
        )


class _Part(NamedTuple):
    """One call of the op: of several batch rows and one piece, or packed, of one batch row and many pieces.

    Args:
        call: whose rows and keys count from its first. found: what of its results is meant. packed: whether it is.
    """

    call: WindowCall
    found: list[Piece]
    packed: bool

    @property
    def rows(self) -> tuple[int, int]:
        return self.call.rows

    @property
    def keys(self) -> tuple[int, int]:
        return self.call.keys

    def laid(self, x: Tensor, ends: tuple[int, int]) -> Tensor:
        """Some tokens of ``[B, H, T, D]`` as the op takes them."""
        x = x[:, :, ends[0] : ends[1]].transpose(1, 2)
        return x[0] if self.packed else x

    def laid_lse(self, lse: Tensor) -> Tensor:
        """``[B, H, t]`` as the op takes it: it looks at no strides."""
        return (lse[0] if self.packed else lse).contiguous()

    def by_row(self, x: Tensor) -> Tensor:
        """``[B, H, t]`` beside what is laid out: ``[B, t, H]``, or ``[t, H]``."""
        x = x.transpose(1, 2)
        return x[0] if self.packed else x

    def of_queries(self, x: Tensor, piece: Piece) -> Tensor:
        """The query rows of a piece, out of what the op made, as ``[B, H, t, D]``."""
        return self._turned(x, piece.q0 - self.rows[0], piece.q1 - self.rows[0])

    def of_keys(self, x: Tensor, piece: Piece) -> Tensor:
        """The keys of a piece, likewise."""
        return self._turned(x, piece.k0 - self.keys[0], piece.k1 - self.keys[0])

    def of_lse(self, lse: Tensor, piece: Piece) -> Tensor:
        """``[B, H, t]`` of a piece."""
        lse = lse[None] if self.packed else lse
        return lse[..., piece.q0 - self.rows[0] : piece.q1 - self.rows[0]]

    def _turned(self, x: Tensor, first: int, last: int) -> Tensor:
        x = x[None] if self.packed else x
        return x[:, first:last].transpose(1, 2)

    def lengths(self, device: torch.device) -> tuple[Any, ...]:
        """The op's arguments from `cum_seq_q` on: lengths, no dropout, causal or not, and (forward) no debugging."""
        causal = self.call.window.causal
        if not self.packed:
            (piece,) = self.call.pieces
            return None, None, piece.q1 - piece.q0, piece.k1 - piece.k0, 0.0, causal, False
        starts = self.call.cumulative
        sizes = [max(b - a for a, b in pairwise(each)) for each in starts]
        rows, keys = (uploaded(np.array(x, np.int32), device) for x in starts)
        # of at least two rows: for one the op takes it for granted that every sequence has one
        return rows, keys, max(2, sizes[0]), sizes[1], 0.0, causal, False

    def options(self, scale: float) -> dict[str, Any]:
        """The op's keywords."""
        left, right = Window(None, None) if self.call.window.causal else self.call.window
        return {"scale": scale, "window_size_left": left, "window_size_right": right}


def _parts(call: WindowCall, batch: int) -> Iterator[tuple[slice, _Part]]:
    """The calls of the op that a call of windows becomes, each with its batch rows."""
    b0, b1 = call.batch
    last = batch if b1 < 0 else b1
    if len(call.pieces) > last - b0:
        for row in range(b0, last):
            # all batch rows where there is one, so that nobody takes them for some
            yield slice(0, None) if batch == 1 else slice(row, row + 1), _Part(call, call.stretches, True)
        return
    for piece in call.pieces:
        rows = tile_rows([b0, b1, *piece])[0].batch
        yield rows, _Part(WindowCall(call.batch, call.window, (piece,)), [piece], False)
