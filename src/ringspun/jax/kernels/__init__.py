"""Kernels: local attention over the tiles of one hop. The first that does not refuse a call computes it."""

from __future__ import annotations

from ringspun.errors import KernelRefused
from ringspun.jax.kernels.base import Call, Kernel
from ringspun.jax.kernels.xla import Xla

__all__ = ["Call", "Kernel", "Xla", "choose"]


def choose(kernels: tuple[Kernel, ...], call: Call) -> Kernel:
    """The first kernel that can do `call` exactly.

    Raises:
        KernelRefused: none can; with the reason of each.
    """
    reasons = []
    for kernel in kernels:
        if not isinstance(kernel, Kernel):
            raise KernelRefused(f"kernel must be a Kernel, e.g. Xla(block_size), or None; got {kernel!r}.")
        reason = kernel.refuses(call)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise KernelRefused(f"call must suit a kernel; got {call}. Refused by {'; '.join(reasons)}.")
