"""Layouts: the rules that deal tokens to ranks, one file each."""

from ringspun.core.layout.base import Layout
from ringspun.core.layout.contiguous import Contiguous
from ringspun.core.layout.striped import Striped
from ringspun.core.layout.zigzag import Zigzag

__all__ = ["Contiguous", "Layout", "Striped", "Zigzag"]
