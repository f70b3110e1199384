"""What was used last, kept by count and by bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """The values used last: at most `kept`, and of more than `least` no more than `budget_bytes`."""

    def __init__(self, kept: int, budget_bytes: int = 1 << 28, least: int = 16) -> None:
        self.kept, self.budget_bytes, self.least = kept, budget_bytes, least
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: K) -> V | None:
        """The value of `key`, or None."""
        found = self._values.get(key)
        return None if found is None else found[0]

    def use(self, key: K, value: V, n_bytes: int = 0) -> None:
        """`value` is now the one used last; the oldest make room."""
        self._bytes += n_bytes - self._values.get(key, (None, 0))[1]
        self._values[key] = value, n_bytes
        self._values.move_to_end(key)
        while len(self) > self.kept or (self._bytes > self.budget_bytes and len(self) > self.least):
            _, (_, gone) = self._values.popitem(last=False)
            self._bytes -= gone

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values
