"""Masks of blocks of positions: local chunks, and the table that says which block sees which."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.core import regions as rg
from ringspun.core.host import host_array, host_integers
from ringspun.core.mask.base import Allowed, Mask, Positions, everything, integer, rectangles
from ringspun.errors import DtypeError, MaskError


@dataclass(frozen=True)
class Chunks(Mask):
    """Local chunks (Llama 4): query and key in the same chunk of `size` tokens. With `Causal()` for decoding."""

    size: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer("Chunks size", self.size, least=1))

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        return np.asarray(q // self.size == k // self.size)

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        first = max(q_start, 0) // self.size * self.size
        starts = np.arange(first, min(q_start + q_len, k_len), self.size)
        stops = starts + self.size
        return rectangles(starts, stops, starts, stops, everything(q_len, k_len, q_start))


@dataclass(frozen=True)
class Blocks(Mask):
    """An explicit block mask, the general case: each block of queries names the blocks of keys that it sees.

        Blocks([[0], [0, 2], []], size=2), 6 tokens    k 0 1 2 3 4 5
                                                    q 0  1 1 . . . .
                                                    q 1  1 1 . . . .
                                                    q 2  1 1 . . 1 1
                                                    q 3  1 1 . . 1 1
                                                    q 4  . . . . . .
                                                    q 5  . . . . . .

    Queries beyond the table see nothing, and a key block that no row names is seen by nobody; the length need not be a
    multiple of `size`. Within a block all pairs are allowed: for decoding write ``Causal() & Blocks(...)``. These are
    the full blocks of FlexAttention's `BlockMask`, whose default size is this one.

    Args:
        keys: for each query block, in order, the numbers of the key blocks that it sees (host data; any order).
        size: tokens per block, of queries and of keys (default 128).
    Raises:
        MaskError: a negative block number, ``size < 1``, a dense array (see `from_array`).
        DtypeError: numbers that are not host integers.
    """

    keys: tuple[tuple[int, ...], ...]
    size: int = 128

    def __init__(self, keys: Sequence[Sequence[int]] | Any, size: int = 128) -> None:
        object.__setattr__(self, "size", integer("Blocks size", size, least=1))
        object.__setattr__(self, "keys", tuple(_numbers(i, row) for i, row in enumerate(_rows(keys))))
        beyond = max(len(self.keys), max((row[-1] + 1 for row in self.keys if row), default=0))
        if beyond * self.size > rg.UNBOUNDED:
            raise MaskError(f"Blocks must end at position 2**60 or before; got block {beyond - 1} of {size} tokens.")

    @classmethod
    def from_array(cls, allowed: Any, size: int = 128) -> Blocks:
        """From a boolean table ``[query blocks, key blocks]`` (host data): True = may look.

        Raises:
            DtypeError: a table that is not boolean, or on a device. MaskError: not two-dimensional.
        """
        table = host_array("allowed", allowed, "allowed")
        if table.dtype != np.bool_:
            raise DtypeError(
                f"allowed must be booleans, True = may look; got {table.dtype}. "
                "Write `allowed != 0` for zeros and ones, `allowed == 0` for an additive mask."
            )
        if table.ndim != 2:
            raise MaskError(f"allowed must be a table [query blocks, key blocks]; got shape {table.shape}.")
        return cls([np.flatnonzero(row) for row in table], size)

    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Query block and key block of each entry, in order of both."""
        counts = np.fromiter(map(len, self.keys), np.int64, len(self.keys))
        flat = np.fromiter(itertools.chain.from_iterable(self.keys), np.int64, int(counts.sum()))
        return np.repeat(np.arange(len(counts)), counts), flat

    def allowed(self, q: Positions, k: Positions) -> Allowed:
        i, j = self._pairs()
        named, column = np.unique(j, return_inverse=True)
        rows, columns = len(self.keys), len(named)
        table = np.zeros((rows + 1, columns + 1), np.bool_)  # the last row and column: blocks outside of the table
        table[i, column] = True
        q_block, k_block = q // self.size, k // self.size
        place = np.searchsorted(named, k_block)
        known = np.append(named, -1)[place] == k_block
        row = np.where((q_block >= 0) & (q_block < rows), q_block, rows)
        return np.asarray(table[row, np.where(known, place, columns)])

    def regions(self, q_len: int, k_len: int, q_start: int = 0) -> rg.Table:
        """Runs of neighbouring key blocks, joined over neighbouring query blocks that share the run."""
        q, k = self._pairs()
        first, last = _stretches((np.diff(q) != 0) | (np.diff(k) != 1), len(q))
        q, k0, k1 = q[first], k[first], k[last] + 1
        q, k0, k1 = np.stack([q, k0, k1])[:, np.lexsort((q, k1, k0))]
        first, last = _stretches((np.diff(k0) != 0) | (np.diff(k1) != 0) | (np.diff(q) != 1), len(q))
        q0, q1, k0, k1 = np.stack([q[first], q[last] + 1, k0[first], k1[first]]) * self.size
        table = rectangles(q0, q1, k0, k1, everything(q_len, k_len, q_start))
        return table[np.lexsort((table[:, rg.K0], table[:, rg.Q0]))]


def _rows(keys: Any) -> Sequence[Any]:
    if hasattr(keys, "ndim"):
        shape = host_array("Blocks keys", keys, "keys").shape
        raise MaskError(
            f"Blocks keys must be a list of block numbers per query block; got an array of shape {shape}. "
            "Write Blocks.from_array(allowed) for a table of booleans, Blocks(keys.tolist()) for block numbers."
        )
    try:
        return list(keys)
    except TypeError:
        raise MaskError(f"Blocks keys must be a list of block numbers per query block; got {keys!r}.") from None


def _numbers(query_block: int, row: Any) -> tuple[int, ...]:
    name = f"key blocks of query block {query_block}"
    numbers = tuple(sorted(set(host_integers(name, row).tolist())))
    if numbers and numbers[0] < 0:
        raise MaskError(f"{name} must be >= 0; got {numbers[0]}.")
    return numbers


def _stretches(breaks: NDArray[np.bool_], count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """First and last of each stretch of `count` entries, for the breaks between neighbours ``[count - 1]``."""
    edge = np.ones(min(count, 1), np.bool_)
    return np.append(edge, breaks), np.append(breaks, edge)
