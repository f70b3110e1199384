"""Doubts: what a plan may do, and is hardly ever meant. Warned of when the plan is made; what cannot be is an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from ringspun.core.mask import And, Blocks, Mask, Or, RowMasks, documents_of
from ringspun.core.partition import Sides
from ringspun.core.text import shown
from ringspun.errors import PlanError, RingspunWarning


def check(sides: Sides, mask: Mask | RowMasks) -> None:
    """Warn of what is hardly meant.

    Raises:
        PlanError: other documents in the partition than in the mask.
    """
    masks = mask.masks if isinstance(mask, RowMasks) else (mask,)
    for text in (*_documents(sides, masks), *_blocks(sides, masks)):
        warnings.warn(text, RingspunWarning, stacklevel=5)


def _documents(sides: Sides, masks: tuple[Mask, ...]) -> Iterator[str]:
    """Documents cut labels and restart positions in a partition, and separate attention in a mask: they must agree."""
    mine, found = sides.queries.documents, [documents_of(one) for one in masks]
    if any(found) and not sides.queries.start and sides.queries.seq_len != sides.keys.seq_len:
        yield (
            "Documents compare the positions of queries and keys alike; these are of two lengths and both start at 0. "
            "For the padding of the keys alone write Keys(start, stop), for packed pairs DocumentPairs(queries, keys)."
        )
    if mine is None or all(mine in row for row in found):
        return
    if any(found):
        other = next(iter(next(row for row in found if mine not in row)), None)
        raise PlanError(
            f"documents must be the same in the partition and in the mask; the partition has {shown(mine)}, "
            f"the mask {shown(other)}. Write context.partition(S, documents=docs).plan(Causal() & docs)."
        )
    yield (
        "the partition has documents that the mask does not separate: positions restart and labels are cut, but "
        "attention crosses them. If that is not meant, write plan(mask & docs)."
    )


def _blocks(sides: Sides, masks: tuple[Mask, ...]) -> Iterator[str]:
    """A table of blocks for another length, or for blocks of another size, hides what it does not name."""
    for one in {blocks for mask in masks for blocks in _leaves(mask) if isinstance(blocks, Blocks)}:
        last = sides.queries.start + sides.queries.seq_len
        rows, columns = (-(-int(n) // one.size) for n in (last, sides.keys.seq_len))
        named = max((row[-1] + 1 for row in one.keys if row), default=0)
        if len(one.keys) != rows or named > columns:
            yield (
                f"Blocks of {one.size} tokens should be a table of {rows} query blocks and at most {columns} key "
                f"blocks for this plan; got {len(one.keys)} and {named}. Queries beyond the table see nothing."
            )


def _leaves(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And | Or):
        for part in mask.masks:
            yield from _leaves(part)
    else:
        yield mask
