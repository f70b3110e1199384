"""ringspun: exact attention over sequences that no single device can hold.

Masks and layouts live here and need neither torch nor jax. The ring itself is in `ringspun.torch`.
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
from ringspun.core.text import parse_layout, parse_mask

__version__ = "0.1.0.dev0"

__all__ = [
    "Anchors",
    "Balanced",
    "Band",
    "Blocks",
    "Buckets",
    "Causal",
    "Chunks",
    "Contiguous",
    "DocumentPairs",
    "DocumentZigzag",
    "Documents",
    "Full",
    "Keys",
    "Layout",
    "Mask",
    "Prefix",
    "Striped",
    "Window",
    "Zigzag",
    "__version__",
    "parse_layout",
    "parse_mask",
]
