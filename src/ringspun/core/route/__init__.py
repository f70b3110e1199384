"""Routes: which messages move whose rows over which link, per step; one file each."""

from ringspun.core.route.all_gather import AllGather
from ringspun.core.route.auto import Auto
from ringspun.core.route.base import Action, Route
from ringspun.core.route.bidirectional import Bidirectional
from ringspun.core.route.direct import Direct
from ringspun.core.route.double_ring import DoubleRing
from ringspun.core.route.in_order import InOrder
from ringspun.core.route.ring import Ring

__all__ = ["Action", "AllGather", "Auto", "Bidirectional", "Direct", "DoubleRing", "InOrder", "Ring", "Route"]
