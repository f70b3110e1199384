"""Sources seen otherwise: only some of their documents, or with other names for the fields of their rows."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringspun.errors import DataError
from ringspun.train.data.samples import INPUT_IDS, MESSAGES, TEXT
from ringspun.train.data.sources import Source, digest_of

_HELD_OUT = 11  # seed of what is held out, which is no setting: runs of other seeds leave out the same


def held_out(documents: int, share: float) -> NDArray[np.bool_]:
    """Which of some documents are held out, ``[n]``: a share of them, at least one.

    Raises:
        DataError: nothing would be left to train on.
    """
    count = max(1, round(share * documents))
    if count >= documents:
        raise DataError(
            f"held_out must leave documents to train on; got {share} of {documents}. Give more documents, or a path "
            "of others."
        )
    chosen = np.zeros(documents, np.bool_)
    chosen[np.random.default_rng(_HELD_OUT).permutation(documents)[:count]] = True
    return chosen


class Some(Source):
    """The documents of a source that are `chosen`, ``[n]``, in its order."""

    def __init__(self, source: Source, chosen: NDArray[np.bool_]) -> None:
        self._source, self._chosen, self._indices = source, chosen, np.flatnonzero(chosen)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._source[int(self._indices[index])]

    def where(self, index: int) -> str:
        return self._source.where(int(self._indices[index]))

    def blocks(self) -> NDArray[np.int64]:
        ends = np.cumsum(self._source.blocks())
        return np.diff(np.cumsum([0, *self._chosen])[[0, *ends]]).astype(np.int64)

    def digest(self) -> str:
        return digest_of([self._source.digest(), self._indices])


class Renamed(Source):
    """Rows whose text, or whose conversation, lies under a name of its own.

    Args:
        source: of dicts. text, messages: those names; a row has one of them.
    """

    def __init__(self, source: Source, *, text: str | None = None, messages: str | None = None) -> None:
        self._source = source
        self._names = {name: kind for name, kind in ((text, TEXT), (messages, MESSAGES)) if name is not None}

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        return self._renamed(index, self._source[index])

    def __iter__(self) -> Iterator[Any]:
        return (self._renamed(index, row) for index, row in enumerate(self._source))

    def _renamed(self, index: int, row: Any) -> Any:
        found = [name for name in self._names if isinstance(row, Mapping) and row.get(name) is not None]
        if len(found) != 1:
            raise DataError(f"{self.where(index)}: {self._refusal(row)}")
        others = {name: value for name, value in row.items() if name not in (TEXT, MESSAGES, INPUT_IDS, *self._names)}
        return others | {self._names[found[0]]: row[found[0]]}

    def _refusal(self, row: Any) -> str:
        wanted = " or ".join(map(repr, self._names))
        if not isinstance(row, Mapping):
            return f"a row must be an object with {wanted}; got {type(row).__name__}."
        known = [str(name) for name in row]
        near = [one for name in self._names for one in difflib.get_close_matches(name, known, 1)]
        hint = f" The nearest is {near[0]!r}." if near and near[0] not in self._names else ""
        return f"a row must have exactly one of the fields {wanted}; got {', '.join(map(repr, known)) or 'none'}.{hint}"

    def where(self, index: int) -> str:
        return self._source.where(index)

    def blocks(self) -> NDArray[np.int64]:
        return self._source.blocks()

    def digest(self) -> str:
        return digest_of([self._source.digest(), [[*pair] for pair in self._names.items()]])
