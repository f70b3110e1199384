"""Batches for the ranks of a ring: all ranks of one read the same sequences, other rings others.

    global batch k     rows  k B D ... (k + 1) B D - 1 of the epoch's order
    data rank d        rows  d B ... (d + 1) B - 1 of these, as every rank of its ring

So a step's sequences are the same, however many rings there are and however large. Where the last batch has too few
rows to go round, a data rank without any reads one that is somebody else's, of which nothing is learnt: all must take
part in a step, and no row may count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from ringspun.core.host import is_integer
from ringspun.errors import DataError
from ringspun.torch.sharding import IGNORED
from ringspun.train.data.samples import LABELS
from ringspun.train.data.stream import PackedStream

Collate = Callable[[list[Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class DataPlace:
    """Which of the rings that read different sequences this rank is in.

    Args:
        rank: place among them. size: their number.
    """

    rank: int = 0
    size: int = 1


class RingLoader(DataLoader[Any]):
    """A loader whose order is that of an epoch; see `ring_loader`."""

    def rows_in(self, batch: int) -> int:
        """Rows that all rings together have in batch k: the last may have fewer. Batches of a stream count alike, 1."""
        return self.batch_sampler.rows_in(batch) if isinstance(self.batch_sampler, RingSampler) else 1

    def set_epoch(self, epoch: int) -> None:
        """Begin with the order of this epoch (0, 1, ...)."""
        set_epoch: Any = getattr(self.batch_sampler, "set_epoch", None) or getattr(self.dataset, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def ring_loader(
    data: Any,
    collate: Collate,
    *,
    batch_size: int,
    place: DataPlace,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    **options: Any,
) -> RingLoader:
    """A loader of whole sequences, the same for all ranks of a ring.

    Args:
        data: rows by index (a list, a `datasets.Dataset`); or a `PackedStream`, which makes its batches itself.
        collate: rows -> batch; not for a stream. batch_size: rows of one ring. place: this rank's.
        shuffle, seed: the order of an epoch, a function of both and its number. drop_last: leave out a last batch that
            has too few rows. options: further ones of `torch.utils.data.DataLoader`.
    Raises:
        DataError: data that cannot be dealt out so, or a stream that is of another data rank.
    """
    if isinstance(data, PackedStream):
        if (data.data_rank, data.data_ranks) != (place.rank, place.size):
            raise DataError(
                f"stream must be that of data rank {place.rank} of {place.size}; got {data.data_rank} of "
                f"{data.data_ranks}. Write PackedStream(..., data_rank=mesh.data_rank, data_ranks=mesh.data_size)."
            )
        return RingLoader(data, batch_size=None, **options)
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or not isinstance(data, Sized):
        raise DataError(
            f"data must have rows by index and a length, or be a PackedStream; got {type(data).__name__}. Ranks of a "
            "ring could not tell that they read the same rows of it."
        )
    sampler = RingSampler(len(data), batch_size, place=place, shuffle=shuffle, seed=seed, drop_last=drop_last)
    return RingLoader(_Rows(data), batch_sampler=sampler, collate_fn=_Collate(collate), **options)


class RingSampler(Sampler[list[int]]):
    """The rows of each batch of one data rank; see the module. ``[~i]``: row i, of which nothing is learnt.

    Args: as `ring_loader`. rows: of the data.
    """

    def __init__(
        self,
        rows: int,
        batch_size: int,
        *,
        place: DataPlace,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if not is_integer(batch_size) or batch_size < 1:
            raise DataError(f"batch_size must be an integer >= 1; got {batch_size!r}.")
        self.rows, self.batch_size, self.place = rows, batch_size, place
        self.shuffle, self.seed, self.drop_last, self.epoch = shuffle, seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Whose order comes next."""
        self.epoch = epoch

    def rows_in(self, batch: int) -> int:
        """Rows that all rings together have in batch k."""
        size = self.batch_size * self.place.size
        return min(size, self.rows - batch * size)

    def __len__(self) -> int:
        whole, rest = divmod(self.rows, self.batch_size * self.place.size)
        return whole + int(rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.rows) if self.shuffle else None
        rows = list(range(self.rows)) if order is None else order.tolist()
        size, first = self.batch_size * self.place.size, self.batch_size * self.place.rank
        for start in range(0, len(self) * size, size):
            of_all = rows[start : start + size]
            yield of_all[first : first + self.batch_size] or [~of_all[0]]


class _Rows(Dataset[Any]):
    """The data; a row that nothing is learnt of comes as a `_Filler`."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return self._data[index] if index >= 0 else _Filler(self._data[~index])


@dataclass(frozen=True)
class _Filler:
    row: Any


@dataclass(frozen=True)
class _Collate:
    """A collator that knows fillers."""

    collate: Collate

    def __call__(self, rows: list[Any]) -> dict[str, Any]:
        filler = isinstance(rows[0], _Filler)
        batch = dict(self.collate([row.row if isinstance(row, _Filler) else row for row in rows]))
        if filler and LABELS in batch:
            batch[LABELS] = torch.full_like(batch[LABELS], IGNORED)
        return batch
