"""Kernels and their choice: the first that does not refuse."""

from __future__ import annotations

from ringspun.errors import KernelRefused
from ringspun.torch.kernels.aten_cpu import AtenCpu
from ringspun.torch.kernels.base import Call, Kernel, LoweredKernel
from ringspun.torch.kernels.eager import Eager

KERNELS: tuple[Kernel, ...] = (AtenCpu(), Eager())
"""In order of preference."""


def verdicts(call: Call, wanted: str | Kernel | None = None) -> list[tuple[str, str | None]]:
    """What every candidate says of `call`, in order of preference: its name, and why it refuses (None: it does not).

    Raises:
        KernelRefused: an unknown name.
    """
    return [(kernel.name, kernel.refuses(call)) for kernel in _candidates(wanted)]


def choose(call: Call, wanted: str | Kernel | None = None) -> Kernel:
    """The first kernel that does not refuse `call`, or the one named.

    Raises:
        KernelRefused: an unknown name, or every candidate refuses; the message gives each reason.
    """
    reasons = []
    for kernel in _candidates(wanted):
        reason = kernel.refuses(call)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise KernelRefused("kernel must be able to do this call; all refuse: " + "; ".join(reasons) + ".")


def _candidates(wanted: str | Kernel | None) -> tuple[Kernel, ...]:
    if isinstance(wanted, Kernel):
        return (wanted,)
    found = tuple(k for k in KERNELS if wanted in (None, "auto", k.name))
    if not found:
        raise KernelRefused(f"kernel must be one of {', '.join(k.name for k in KERNELS)}; got {wanted!r}.")
    return found


__all__ = ["KERNELS", "AtenCpu", "Call", "Eager", "Kernel", "LoweredKernel", "choose", "verdicts"]
