"""Which module of a model is calling: looked up on the stack, and only when there is an error to explain."""

from __future__ import annotations

import sys

from torch import nn


def module_words() -> str:
    """``, in layers.3.self_attn of LlamaModel``, or nothing where no module's forward is running (in backward, in a
    compiled graph)."""
    running = _running()
    if not running:
        return ""
    inner, outer = running[0], running[-1]
    name = next((name for name, module in outer.named_modules() if module is inner), "")
    return f", in {name} of {type(outer).__name__}" if name else f", in {type(inner).__name__}"


def _running() -> list[nn.Module]:
    """The modules whose forward is running in this thread, innermost first."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module):
            found.append(module)
        frame = frame.f_back  # type: ignore[assignment]
    return found
