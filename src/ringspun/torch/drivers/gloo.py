"""`Gloo`: one rank per process over torch.distributed's gloo backend, which moves tensors of CPUs and is waited for."""

from __future__ import annotations

from ringspun.torch.drivers.group import GroupDriver


class Gloo(GroupDriver):
    """One rank of a ring of processes on CPUs.

    Args:
        group: process group whose order is the ring's order (any world ranks). timeout_s: longest wait for a peer.
    """

    devices = ("cpu",)
