"""Layouts: the rules that deal tokens to ranks, one file each."""

from ringspun.core.layout.balanced import Balanced
from ringspun.core.layout.base import Layout
from ringspun.core.layout.contiguous import Contiguous
from ringspun.core.layout.document_zigzag import DocumentZigzag
from ringspun.core.layout.striped import Striped
from ringspun.core.layout.zigzag import Zigzag

__all__ = ["Balanced", "Contiguous", "DocumentZigzag", "Layout", "Striped", "Zigzag"]
