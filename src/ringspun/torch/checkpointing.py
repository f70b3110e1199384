"""Activation checkpointing around attention: what is recomputed, and what is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ringspun.torch.ulysses import to_rows_op  # noqa: F401  registers the ops


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of a checkpoint that keeps what attention gave: recomputation does not run the ring again.

        checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

    Kept: out ``[B, H, T, Dv]`` and lse ``[B, H, T]`` of every attention in the block, and the blocks of keys and values
    that its ring leaves to backward (`ringspun.core.route.Ring`, kept_hops); all else is recomputed. A layer then sends
    keys and values once in forward and once in backward, as without a checkpoint, not three times. Where heads are
    split (Ulysses), rows are exchanged for heads once more. Of PyTorch's own attention out and lse are kept too, but
    for one with dropout, whose random numbers the rest of the block would miss.
    """
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return contexts


_RING = (torch.ops.ringspun.attention.default, torch.ops.ringspun.to_rows.default)
_DROPOUT = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 3,
    torch.ops.aten._scaled_dot_product_flash_attention.default: 3,
    torch.ops.aten._scaled_dot_product_efficient_attention.default: 5,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default: 5,
}
"""PyTorch's own attention, and which argument `dropout_p` is."""


def _policy(ctx: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _DROPOUT:
        place = _DROPOUT[op]
        keeps = not kwargs.get("dropout_p", args[place] if len(args) > place else 0.0)
    else:
        keeps = op in _RING
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
