"""ringspun: exact attention over sequences that no single device can hold.

Masks, layouts and routes live here and need neither torch nor jax. The ring itself is in `ringspun.torch` and in
`ringspun.jax`.
"""

from ringspun.core.buckets import Buckets
from ringspun.core.layout import Balanced, Contiguous, DocumentZigzag, Layout, Striped, Zigzag
from ringspun.core.mask import (
    Anchors,
    Band,
    Blocks,
    Causal,
    Chunks,
    DocumentPairs,
    Documents,
    Full,
    Keys,
    Mask,
    Prefix,
    Window,
)
from ringspun.core.route import AllGather, Bidirectional, Direct, DoubleRing, Ring
from ringspun.core.text import parse_layout, parse_mask, parse_route

__version__ = "0.1.0.dev0"

__all__ = [
    "AllGather",
    "Anchors",
    "Balanced",
    "Band",
    "Bidirectional",
    "Blocks",
    "Buckets",
    "Causal",
    "Chunks",
    "Contiguous",
    "Direct",
    "DocumentPairs",
    "DocumentZigzag",
    "Documents",
    "DoubleRing",
    "Full",
    "Keys",
    "Layout",
    "Mask",
    "Prefix",
    "Ring",
    "Striped",
    "Window",
    "Zigzag",
    "__version__",
    "parse_layout",
    "parse_mask",
    "parse_route",
]
