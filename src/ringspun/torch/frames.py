"""Which functions of activation checkpointing are running. Importing this loads PyTorch's compiler."""

from __future__ import annotations

import sys

import torch
import torch.utils.checkpoint

_RUNNERS = ("checkpoint", "forward", "backward", "recompute_fn")
"""What runs a checkpointed block: for the first time or again, by either kind of checkpoint."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # traced where it is called
def checkpoints_running() -> int:
    """Checkpointed blocks that this call is inside of."""
    return int(_frames())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _frames() -> int:
    """No public call tells of a checkpoint; the frames of the functions that run its block do."""
    count, frame = 0, sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == torch.utils.checkpoint.__file__ and code.co_qualname.rpartition(".")[2] in _RUNNERS:
            count += 1
        frame = frame.f_back  # type: ignore[assignment]
    return count
