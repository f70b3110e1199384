"""A transformer layer that holds, for all of a rank's tokens, its input, its queries, keys, values and what attention
gave; nothing else.

    layer = BlockwiseTransformerLayer(4096, 32, kv_heads=8, block_size=1024)
    y = layer(x, attention=plan.attention, rotation=cos_sin(part.positions(), rope, head_size=128))

Two passes over blocks: norm, projections and rotation before attention; output projection, feed-forward and both
residuals after it. In between, queries of a ring meet keys of other ranks; so these are two, not the paper's one.

Source: Liu and Abbeel 2023 (arXiv 2305.19370), algorithm 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.nn.functional import silu

from ringspun.errors import ShapeError
from ringspun.torch import blockwise_attention
from ringspun.train.memory.blockwise import blockwise
from ringspun.train.rope.rotary import rotate

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _on_one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cast(Tensor, blockwise_attention(q, k, v))


class GatedFeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``, without biases.

    Source: Shazeer 2020 (arXiv 2002.05202).
    """

    def __init__(self, hidden_size: int, feed_forward_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, feed_forward_size, bias=False)
        self.up = nn.Linear(hidden_size, feed_forward_size, bias=False)
        self.down = nn.Linear(feed_forward_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., C]`` to ``[..., C]``."""
        out: Tensor = self.down(silu(self.gate(x)) * self.up(x))
        return out


class BlockwiseTransformerLayer(nn.Module):
    """Attention, feed-forward and both residuals, a block of tokens at a time.

    Args:
        hidden_size: C. heads, kv_heads, head_size: H, K (default H), D (default C / H).
        feed_forward: any token-wise module from C to C; default `GatedFeedForward` of 4 C.
        norm: "pre" normalises what goes into attention and feed-forward, "post" the sums with the residual.
        block_size: tokens of a block; None: all at once, everything kept.
    Raises:
        ShapeError: heads that do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_size: int | None = None,
        feed_forward: nn.Module | None = None,
        norm: Literal["pre", "post"] = "pre",
        block_size: int | None = 512,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads or (head_size is None and hidden_size % heads):
            raise ShapeError(
                "heads must be a multiple of kv_heads and divide hidden_size; got "
                f"{heads}, {kv_heads} and {hidden_size}."
            )
        if norm not in ("pre", "post"):
            raise ShapeError(f"norm must be 'pre' or 'post'; got {norm!r}.")
        self.head_size = hidden_size // heads if head_size is None else head_size
        self.block_size, self.pre_norm = block_size, norm == "pre"
        self.q = nn.Linear(hidden_size, heads * self.head_size, bias=False)
        self.k = nn.Linear(hidden_size, kv_heads * self.head_size, bias=False)
        self.v = nn.Linear(hidden_size, kv_heads * self.head_size, bias=False)
        self.o = nn.Linear(heads * self.head_size, hidden_size, bias=False)
        self.feed_forward = GatedFeedForward(hidden_size, 4 * hidden_size) if feed_forward is None else feed_forward
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(hidden_size), nn.RMSNorm(hidden_size)

    def forward(
        self,
        x: Tensor,
        *,
        attention: Attention = _on_one_device,
        rotation: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``[B, T, C]`` to ``[B, T, C]``.

        Args:
            x: this rank's tokens.
            attention: of ``q [B, H, T, D]``, ``k, v [B, K, T, D]``: a plan's; default: causal on one device.
            rotation: cosines and sines of these tokens, ``[T, F]`` or ``[B, T, F]``, as `cos_sin` makes them.
        """
        given = tuple(y.expand(1, *y.shape[-2:]) if y.ndim == 2 else y for y in rotation or ())
        q, k, v = self._over_blocks(self._before, x, *given)
        out = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        after: Tensor = self._over_blocks(self._after, x, out.transpose(1, 2))
        return after

    def _over_blocks(self, fn: Callable[..., Any], *inputs: Tensor) -> Any:
        return fn(*inputs) if self.block_size is None else blockwise(fn, inputs, self.block_size)

    def _before(self, x: Tensor, *rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[B, T, heads, D]``, rotated."""
        x = self.attention_norm(x) if self.pre_norm else x
        q, k, v = (project(x).unflatten(-1, (-1, self.head_size)) for project in (self.q, self.k, self.v))
        if rotation:
            q, k = (rotate(y.transpose(1, 2), *rotation).transpose(1, 2) for y in (q, k))
        return q, k, v

    def _after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything behind attention: projection, residual, feed-forward, residual."""
        x = x + self.o(attended.flatten(-2))
        if self.pre_norm:
            out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
            return out
        x = self.attention_norm(x)
        normed: Tensor = self.feed_forward_norm(x + self.feed_forward(x))
        return normed
