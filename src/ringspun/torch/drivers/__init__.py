"""Drivers: how messages move. `Loopback` in one thread, `Gloo` between processes."""

from ringspun.torch.drivers.base import Driver, Transfer
from ringspun.torch.drivers.gloo import Gloo
from ringspun.torch.drivers.loopback import Loopback

__all__ = ["Driver", "Gloo", "Loopback", "Transfer"]
