"""Document zigzag: every document zigzagged by itself, so that a causal mask within documents gives every rank the same
work at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from ringspun.core.layout.base import Runs
from ringspun.core.layout.documents import WHERE_CUT, Scale, Spans, causal_pairs, pack, runs_of, zigzag_widths
from ringspun.core.layout.speeds import UnequalRanks
from ringspun.core.mask import Documents


@dataclass(frozen=True)
class DocumentZigzag(UnequalRanks):
    """Chunks r and 2R - 1 - r of every document to rank r; documents shorter than 2R tokens whole, spread evenly.

        documents([4, 6, 2, 2]), 2 ranks    rank 0: 0 3 4 5 9 10 11    rank 1: 1 2 6 7 8 12 13

    The chunks of a document differ by at most one token, and the longer ones fall on other ranks in the next document.
    Tokens of no document go where tokens are lacking. Every long enough document makes a message row and a tile on
    every rank: with many of middling length `Balanced` computes in larger tiles. Per-document chunks as in WLB-LLM
    (OSDI 2025), there with what 2R does not divide dealt round robin.

    Args:
        speeds: one positive number per rank; every document's chunks are in their proportion, as `Zigzag`'s. Default:
            equal.
    Raises:
        LayoutError: speeds that are not positive finite numbers.
    """

    speeds: tuple[float, ...] | None = field(default=None, kw_only=True)
    reads_documents: ClassVar[bool] = True

    def deal(self, seq_len: int, ring_size: int, documents: Documents | None) -> Runs:
        weights = self.weights(ring_size)
        spans = Spans.of(seq_len, documents)
        short = spans.lengths < 2 * ring_size
        lengths = spans.lengths[short]
        owners = np.full(len(short), WHERE_CUT)
        early, late = zigzag_widths(spans.lengths[~short], weights)
        scale = Scale(work=math.fsum(causal_pairs(lengths)), tokens=max(1.0, float(lengths.sum())))
        owners[short] = pack(lengths, weights, scale, held=(early + late).sum(axis=0))
        return runs_of(spans, owners, weights)
