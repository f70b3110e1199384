"""Activation checkpointing around attention: what is recomputed, and what is kept."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ringspun.torch.ulysses import to_rows_op  # noqa: F401  registers the ops


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The `context_fn` of a checkpoint that keeps what attention gave: recomputation does not run the ring again.

        checkpoint(block, x, use_reentrant=False, context_fn=keep_attention)

    Kept: out ``[B, H, T, Dv]`` and lse ``[B, H, T]`` of every attention in the block; all else is recomputed. A
    layer then sends keys and values once in forward and once in backward, as without a checkpoint, not three times.
    Where heads are split (Ulysses), rows are exchanged for heads once more.
    """
    keep = [torch.ops.ringspun.attention.default, torch.ops.ringspun.to_rows.default]
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(keep)  # type: ignore[no-untyped-call]
    return contexts
