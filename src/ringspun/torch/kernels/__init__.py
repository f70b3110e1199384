"""Kernels and their choice: the first that does not refuse."""

from __future__ import annotations

import torch

from ringspun.errors import KernelRefused
from ringspun.torch.kernels.aten_cpu import AtenCpu
from ringspun.torch.kernels.aten_flash import AtenFlash
from ringspun.torch.kernels.aten_fused import AtenCudnn, AtenEfficient
from ringspun.torch.kernels.base import Call, Kernel, LoweredKernel
from ringspun.torch.kernels.eager import Eager
from ringspun.torch.kernels.triton import Triton

KERNELS: tuple[Kernel, ...] = (AtenCpu(), AtenFlash(), AtenEfficient(), Eager(), AtenCudnn(), Triton())
"""In order of preference."""
FASTER: dict[str, frozenset[str]] = {"triton": frozenset()}
"""Names of the devices (`torch.cuda.get_device_name`) on which a results file of `make gpu-check`, in
benchmarks/results, shows a kernel that is else taken by name alone to be the fastest: there it is asked first."""


def kernels_on(device: str) -> tuple[Kernel, ...]:
    """The kernels that compute on a kind of device, in order of preference."""
    return tuple(k for k in KERNELS if k.devices is None or device in k.devices)


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
        own = tuple(k for k in kernels_on(device) if not k.by_name_only)
        return *(k for k in kernels_on(device) if _measured_faster(k.name, device)), *own
    found = tuple(k for k in KERNELS if k.name == wanted)
    if not found:
        raise KernelRefused(f"kernel must be one of {', '.join(k.name for k in KERNELS)}; got {wanted!r}.")
    return found


def _measured_faster(kernel: str, device: str) -> bool:
    """Whether on this rank's device; where ranks have different ones they agree on the kernel, or are told."""
    names = FASTER.get(kernel, frozenset())
    return bool(names) and device == "cuda" and torch.cuda.get_device_name() in names


__all__ = [
    "FASTER",
    "KERNELS",
    "AtenCpu",
    "AtenCudnn",
    "AtenEfficient",
    "AtenFlash",
    "Call",
    "Eager",
    "Kernel",
    "LoweredKernel",
    "Triton",
    "choose",
    "kernels_on",
    "verdicts",
]
