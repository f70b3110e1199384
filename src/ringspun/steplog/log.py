"""The step log of one rank in one ring: its newest rows, always on, and how a process writes them to a file.

A row marks a moment; what it says lasts until the next row. So a call reads

    CALL  RECEIVE SEND  COMPUTE 0  WAIT LANDED  RECEIVE SEND  COMPUTE 1  ...  WAIT LANDED  END

and everything inside of a call that is not between WAIT and LANDED is this rank's own work.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = 1
KEPT = 512
"""Rows of one log."""
FOLDER_VARIABLE = "RINGSPUN_LOG_DIR"


class What(IntEnum):
    """What happens at a row."""

    CALL = 0
    """A call begins."""
    SEND = 1
    RECEIVE = 2
    """A message is posted."""
    WAIT = 3
    LANDED = 4
    """The messages of this step and moment are waited for; they are all here."""
    COMPUTE = 5
    """The tiles of this step begin."""
    END = 6
    """The call ends."""
    AGREE = 7
    AGREED = 8
    """An agreement, or another collective, begins; it ends."""
    FAILED = 9
    """The ring ended here; `words` are the error's."""


class Row(NamedTuple):
    """One row.

    Args:
        call: its number on the ring; of `AGREE`, the agreement's. phase: 0 forward; backward: 1 + the number of its
            forward call; -1: no call. what: a `What`. step: of the schedule. moment: at which messages are
            waited for: 0 before and 1 after the tiles of the next step, 2 more for each step later.
        payload, source: what they carry. peer: ring rank at the other end. n_bytes: their length.
        monotonic: when (ns). words: what is agreed on, or what failed.
    """

    call: int
    phase: int
    what: int
    step: int
    moment: int
    payload: int
    source: int
    peer: int
    n_bytes: int
    monotonic: int
    words: str


class StepLog:
    """The newest rows of one rank of a ring.

    Args:
        ring: name of the ring, alike on its ranks. ranks: world rank of each ring rank. ring_rank: whose log it is.
        kept: rows held.
    """

    def __init__(self, ring: str, ranks: tuple[int, ...], ring_rank: int, *, kept: int = KEPT) -> None:
        self.ring, self.ranks, self.ring_rank = ring, ranks, ring_rank
        self.monotonic: Callable[[], int] = time.monotonic_ns
        self.wall: Callable[[], int] = time.time_ns
        self._rows: deque[tuple[Any, ...]] = deque(maxlen=kept)
        self._agreements = itertools.count()
        if len(ranks) > 1:  # nobody waits for nobody
            _LOGS.add(self)

    def note(
        self, call: int, phase: int, what: What, step: int = -1, moment: int = -1, payload: int = -1,
        source: int = -1, peer: int = -1, n_bytes: int = 0, words: str = "",
    ) -> None:  # fmt: skip
        """Add one row; see `Row`."""
        now = self.monotonic()  # the wall's time is added when it is asked for: clocks are most of a row's cost
        self._rows.append((call, phase, what, step, moment, payload, source, peer, n_bytes, now, words))

    def agree(self, words: str) -> int:
        """An agreement on `words` begins; its number."""
        number = next(self._agreements)
        self.note(number, -1, What.AGREE, words=words)
        return number

    @property
    def rows(self) -> list[Row]:
        """What is held, oldest first."""
        return [Row(*row) for row in list(self._rows)]  # the copy is one step for other threads

    @property
    def place(self) -> str:
        """Where this rank is, for an error message: ``in call 3 (forward)``, ``after call 3``, ``before call 0``."""
        for row in reversed(self.rows):
            if row.phase >= 0:
                return f"{'after' if row.what == What.END else 'in'} {call_words(row.call, row.phase)}"
        return "before call 0"

    def as_data(self) -> dict[str, Any]:
        """For a dump, with both clocks at its time; `full`: whether older rows were dropped, or will be by the next."""
        rows = self.rows
        told = {"ring": self.ring, "ranks": self.ranks, "ring_rank": self.ring_rank, "rows": rows}
        return told | {"full": len(rows) == self._rows.maxlen, "monotonic": self.monotonic(), "wall": self.wall()}


def call_words(call: int, phase: int) -> str:
    """A call by its number and phase."""
    return f"call {call} ({'forward' if phase == 0 else f'backward of call {phase - 1}'})"


def dump(folder: str | os.PathLike[str] | None = None, *, reason: str = "by hand", failure: str = "") -> Path:
    """Write the step logs of all rings of this process to one JSON file; later dumps of a process replace earlier ones.

    Args:
        folder: where; made if absent. Default: the environment's ``RINGSPUN_LOG_DIR``, else the working directory.
        reason: why, in words. failure: the error that ended a ring, if one did.
    Returns:
        The file.
    Raises:
        OSError: it cannot be written.
    """
    place = Path(folder if folder is not None else os.environ.get(FOLDER_VARIABLE) or ".")
    place.mkdir(parents=True, exist_ok=True)
    logs = sorted(_LOGS, key=lambda log: (log.ring, log.ring_rank))
    host, pid = socket.gethostname(), os.getpid()
    told = {
        "format": FORMAT,
        "reason": reason,
        "failure": failure,
        "host": host,
        "boot": _boot(),
        "pid": pid,
        "columns": Row._fields,
        "logs": [log.as_data() for log in logs],
    }
    alone = len({g.ranks[g.ring_rank] for g in logs}) == 1
    who = f"rank{logs[0].ranks[logs[0].ring_rank]}" if alone else "ranks"
    file = place / f"ringspun-{who}-{host}-{pid}.json"
    part = file.with_suffix(f".{threading.get_ident()}.part")
    part.write_text(json.dumps(told), encoding="utf-8")
    part.replace(file)
    return file


def _boot() -> str:
    """What processes share whose monotonic clocks are one: a boot of a machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # pragma: no cover (not Linux)
        return socket.gethostname()


_LOGS: weakref.WeakSet[StepLog] = weakref.WeakSet()
"""Every log of this process: what a signal shall find."""
