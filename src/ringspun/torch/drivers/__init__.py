"""Drivers: how messages move. `Loopback` in one thread, `Gloo` and `Nccl` between processes."""

from ringspun.torch.drivers.base import Driver, Transfer
from ringspun.torch.drivers.gloo import Gloo
from ringspun.torch.drivers.group import GroupDriver
from ringspun.torch.drivers.loopback import Loopback
from ringspun.torch.drivers.nccl import Nccl

__all__ = ["Driver", "Gloo", "GroupDriver", "Loopback", "Nccl", "Transfer"]
