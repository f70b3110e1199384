"""`log.jsonl`: one line a step; a disk that is full for a while costs it nothing, one that stays full only lines.

Three kinds of lines, each with the number of steps that were done: of a step (`loss` and the rest of `StepRecord`), of
an evaluation (`evaluation`: values by name), and of a stage that begins (`begins`: its length, steps and mesh).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ringspun.train.output import write_whole


class Log:
    """The log of a run, open for more lines.

    Args:
        path: the file; made if absent.
        done: steps that the run has already. Records of later ones are dropped, and what follows a line that is none:
            an interrupted run may have written more, or half a line.

    Raises:
        ConfigError: the file cannot be written now.
    """

    def __init__(self, path: Path, *, done: int) -> None:
        self.records = records(path, done)  # also those whose lines could not be written
        self._pending = b""
        write_whole(path, b"".join(map(_line, self.records)))
        self._file = path.open("ab", buffering=0)

    @property
    def behind(self) -> bool:
        """Whether lines wait for room on the disk."""
        return bool(self._pending)

    def add(self, record: dict[str, Any]) -> None:
        """Writes a line, after those that could not be written before.

        Raises:
            OSError: not all could be written; the next call tries the rest again.
        """
        self.records.append(record)
        self._pending += _line(record)
        self._write()

    def close(self) -> None:
        """Tries once more to write what is left, and closes the file."""
        try:
            self._write()
        finally:
            self._file.close()

    def _write(self) -> None:
        while self._pending:  # a disk that fills up takes part of a line: the rest of it comes first the next time
            self._pending = self._pending[self._file.write(self._pending) :]


_KINDS: dict[str, type] = {"loss": float, "evaluation": dict, "begins": dict}


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def records(path: Path, done: float = math.inf) -> list[dict[str, Any]]:
    """The lines of a log up to step `done`, and up to a line that is none; none where there is no log."""
    if not path.exists():
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            kind = next(name for name in _KINDS if name in record)
            if record["step"] <= done and isinstance(record[kind], _KINDS[kind]):
                kept.append(record)
        except (ValueError, TypeError, KeyError, StopIteration, RecursionError):
            break
    return kept
