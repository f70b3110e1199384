"""Masks: which query position may look at which key position. Frozen values that combine with ``&`` and ``|``.

A mask speaks of *global* positions and knows nothing of ranks, shards or kernels. It states itself twice: as a
predicate (`Mask.allowed`, the definition) and as disjoint regions (`Mask.regions`, what everything else computes with);
the tests hold one against the other. ``d = q - k`` below is how far a key lies behind its query.

    Full()           every pair                    Prefix(n)       q < n and k < n
    Causal()         0 <= d                        Anchors(n)      k < n
    Window(w)        0 <= d <= w - 1               Chunks(c)       q // c == k // c
    Band(l, r)       -r <= d <= l                  Documents(...)  q and k in the same document
    Blocks(keys, c)  k // c in keys[q // c]        Keys(a, b)       a <= k < b
    DocumentPairs(...)  q in the i-th document of the queries and k in the i-th of the keys

Prefix-LM is ``Causal() | Prefix(n)``; StreamingLLM is ``Causal() & (Window(w) | Anchors(n))``.
"""

from ringspun.core.mask.bands import Band, Causal, Full, Window
from ringspun.core.mask.base import Allowed, And, Mask, Or, Positions
from ringspun.core.mask.blocks import Blocks, Chunks
from ringspun.core.mask.cross import DocumentPairs, Keys
from ringspun.core.mask.documents import Documents, documents_of
from ringspun.core.mask.leading import Anchors, Prefix
from ringspun.core.mask.rows import RowMasks

__all__ = [
    "Allowed",
    "Anchors",
    "And",
    "Band",
    "Blocks",
    "Causal",
    "Chunks",
    "DocumentPairs",
    "Documents",
    "Full",
    "Keys",
    "Mask",
    "Or",
    "Positions",
    "Prefix",
    "RowMasks",
    "Window",
    "documents_of",
]
