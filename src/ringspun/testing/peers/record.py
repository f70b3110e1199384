"""A whole comparison as a value, and as a file, so that half an hour's measurement can be told again in another way."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ringspun.core.host import cores
from ringspun.errors import DataError
from ringspun.testing.peers.comparing import Outcome
from ringspun.testing.peers.rows import Row


@dataclass(frozen=True)
class Comparison:
    """Rows and what came of each peer in them.

    Args:
        rounds, judged_tokens, tokens: as of `compare`. machine: in words. rows: in the order of the tables.
    """

    rounds: int
    judged_tokens: int
    tokens: int | None
    machine: str
    rows: tuple[tuple[Row, tuple[Outcome, ...]], ...] = ()

    def and_row(self, row: Row, found: Sequence[Outcome]) -> Comparison:
        """One row more."""
        return replace(self, rows=(*self.rows, (row, tuple(found))))

    def to_json(self) -> str:
        """All of it; `from_files` reads it."""
        rows = [{"row": asdict(row), "peers": [asdict(o) for o in found]} for row, found in self.rows]
        return json.dumps({**asdict(replace(self, rows=())), "rows": rows}, indent=1)

    def save(self, path: Path) -> None:
        """Write it.

        Raises:
            DataError: a place where no file can be.
        """
        try:
            path.write_text(self.to_json())
        except OSError as problem:
            raise DataError(f"save must be a place for a file; got {path}: {problem.strerror}.") from None

    @classmethod
    def from_files(cls, paths: Sequence[Path]) -> Comparison:
        """What was saved, the rows of all files one after the other.

        Raises:
            DataError: a file that holds no comparison, or files that were not measured alike.
        """
        read = [_read(path) for path in paths]
        settings = {replace(one, rows=()) for one in read}
        if len(settings) != 1:
            raise DataError(f"files must be measured alike; got {', '.join(map(str, paths))} of different settings.")
        return replace(read[0], rows=tuple(row for one in read for row in one.rows))


def machine() -> str:
    """What the figures depend on, in words."""
    return f"{platform.machine()}, {cores()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def _read(path: Path) -> Comparison:
    try:
        told = json.loads(path.read_text())
        rows = tuple((Row(**one["row"]), tuple(_outcome(o) for o in one["peers"])) for one in told.pop("rows"))
        return Comparison(**told, rows=rows)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as problem:
        raise DataError(f"{path} must be a file of `ringspun bench peers --save`; got {problem!r}.") from None


def _outcome(told: dict[str, Any]) -> Outcome:
    return Outcome(**{**told, "forward_s": tuple(told["forward_s"]), "both_s": tuple(told["both_s"])})
