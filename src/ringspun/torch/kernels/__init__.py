"""Kernels and their choice: the first that does not refuse."""

from __future__ import annotations

import torch

from ringspun.errors import KernelRefused
from ringspun.torch.kernels.aten_cpu import AtenCpu
from ringspun.torch.kernels.base import Call, Kernel, LoweredKernel
from ringspun.torch.kernels.eager import Eager
from ringspun.torch.kernels.triton import Triton

KERNELS: tuple[Kernel, ...] = (AtenCpu(), Eager())
"""In order of preference."""
ON_REQUEST: tuple[Kernel, ...] = (Triton(),)
"""Taken by name; without one only on devices where they were measured to be faster, and then first."""
FASTER: dict[str, frozenset[str]] = {"triton": frozenset()}
"""Names of the devices (`torch.cuda.get_device_name`) on which a results file of `make gpu-check`, in
benchmarks/results, shows a kernel to be faster than those of `KERNELS`. There is none yet."""


def verdicts(call: Call, wanted: str | Kernel | None = None) -> list[tuple[str, str | None]]:
    """What every candidate says of `call`, in order of preference: its name, and why it refuses (None: it does not).

    Raises:
        KernelRefused: an unknown name.
    """
    return [(kernel.name, kernel.refuses(call)) for kernel in _candidates(wanted, call.device)]


def choose(call: Call, wanted: str | Kernel | None = None) -> Kernel:
    """The first kernel that does not refuse `call`, or the one named.

    Raises:
        KernelRefused: an unknown name, or every candidate refuses; the message gives each reason.
    """
    reasons = []
    for kernel in _candidates(wanted, call.device):
        reason = kernel.refuses(call)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise KernelRefused("kernel must be able to do this call; all refuse: " + "; ".join(reasons) + ".")


def _candidates(wanted: str | Kernel | None, device: str) -> tuple[Kernel, ...]:
    if isinstance(wanted, Kernel):
        return (wanted,)
    if wanted in (None, "auto"):
        return *(k for k in ON_REQUEST if _measured_faster(k.name, device)), *KERNELS
    every = *KERNELS, *ON_REQUEST
    found = tuple(k for k in every if k.name == wanted)
    if not found:
        raise KernelRefused(f"kernel must be one of {', '.join(k.name for k in every)}; got {wanted!r}.")
    return found


def _measured_faster(kernel: str, device: str) -> bool:
    """Whether on this rank's device; where ranks have different ones they agree on the kernel, or are told."""
    names = FASTER.get(kernel, frozenset())
    return bool(names) and device == "cuda" and torch.cuda.get_device_name() in names


__all__ = [
    "FASTER",
    "KERNELS",
    "ON_REQUEST",
    "AtenCpu",
    "Call",
    "Eager",
    "Kernel",
    "LoweredKernel",
    "Triton",
    "choose",
    "verdicts",
]
