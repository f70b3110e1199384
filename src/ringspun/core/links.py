"""Links: how long messages take, as measured. What a choice of route and a plan of a cluster are made from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ringspun.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True)
class Link:
    """One rank's way to its neighbour.

    Args:
        message_bytes: lengths that were measured, ascending. alone_s: how long a message of each took with nobody else
            sending (seconds). together_s: with every rank sending to its neighbour at once.
    """

    message_bytes: tuple[int, ...]
    alone_s: tuple[float, ...]
    together_s: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes = self.message_bytes
        if not sizes or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
            raise ConfigError(f"message_bytes must be ascending, from 1 on; got {sizes}.")
        for name in ("alone_s", "together_s"):
            times = getattr(self, name)
            if len(times) != len(sizes) or not all(isinstance(t, int | float) and 0 < t < 1e9 for t in times):
                raise ConfigError(f"{name} must hold a positive time for each of {len(sizes)} lengths; got {times}.")

    @property
    def latency_s(self) -> float:
        """Time of the shortest message (seconds)."""
        return self.alone_s[0]

    @property
    def peak(self) -> float:
        """Most bytes per second of one rank, with nobody else sending."""
        return max(n / t for n, t in zip(self.message_bytes, self.alone_s, strict=True))

    @property
    def shared(self) -> float:
        """How much slower a rank's longest message is when all send: 1 where every rank has a link of its own, the
        number of ranks where they share one."""
        return self.together_s[-1] / self.alone_s[-1]

    def seconds(self, n_bytes: int, *, together: bool = True) -> float:
        """Time of a message, straight between the lengths that were measured; beyond the longest at its rate.

        Args:
            together: with every rank sending at once.
        """
        times = self.together_s if together else self.alone_s
        longest = self.message_bytes[-1]
        if n_bytes > longest:
            return times[-1] * n_bytes / longest
        return float(np.interp(n_bytes, self.message_bytes, times))


@dataclass(frozen=True)
class Links:
    """The links of a ring.

    Args:
        ranks: how many there were. near: between ranks of one node. far: between nodes; None: there is one node.
        node: ranks of a node; None: all. where: what was measured, in words.
    """

    ranks: int
    near: Link
    far: Link | None = None
    node: int | None = None
    where: str = ""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Links:
        """What `save` wrote.

        Raises:
            ConfigError: not such a file.
        """
        try:
            read = json.loads(path.read_text())
            if read.pop("format") != FORMAT:
                raise ConfigError("format must be 1.")
            near, far = (_link(read.pop(name)) for name in ("near", "far"))
            if near is None:
                raise ConfigError("near must be there.")
            return Links(near=near, far=far, **read)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise ConfigError(
                f"links must be a file that `ringspun bench links` wrote; got {path}, {type(problem).__name__}: "
                f"{problem}. Measure again."
            ) from None


def _link(read: Mapping[str, Any] | None) -> Link | None:
    return None if read is None else Link(**{name: tuple(values) for name, values in read.items()})
