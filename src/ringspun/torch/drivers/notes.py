"""Notes in a group's store: where each rank last was, so that even a timeout can say who is missing and why.

A note is a courtesy, never needed for a right result. The store lives in another process, which may be dead or frozen:
it is asked by a thread that is waited for only so long, and never again once it did not answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import Store

T = TypeVar("T")


class Notes:
    """This rank's note and those of its peers.

    Args:
        store: the group's. ring_rank: whose note this is. patience_s: longest wait for the store (seconds).
    """

    def __init__(self, store: Store, ring_rank: int, *, patience_s: float) -> None:
        self._store, self._ring_rank, self._patience_s = store, ring_rank, patience_s
        self._silent = False
        self._came = 0

    def come(self, topic: str, fields: dict[str, str], error: str | None) -> dict[str, Any]:
        """Leave word that this rank comes to an agreement; the note."""
        # counted in the store, over all contexts of the group
        count = self._ask(lambda: int(self._store.add(f"ringspun/{self._ring_rank}/agreements", 1)))
        self._came = self._came if count is None else count
        note = {"topic": topic, "fields": fields, "error": error, "came": self._came}
        self._leave(note)
        return note

    def leave_error(self, error: str) -> None:
        """Leave word that this rank failed outside of any agreement."""
        self._leave({"topic": "a failed call", "fields": {}, "error": error, "came": self._came})

    def last_words(self, size: int) -> str:
        """What the peers' notes say, as a sentence with a leading space: errors first, else where each was."""
        if self._silent:
            return " The group's store does not answer: the process that hosts it is dead or frozen."
        words: list[str] = []
        for rank in range(size):
            if rank == self._ring_rank:
                continue
            note = self._read(rank)
            if self._silent:
                return self.last_words(size)
            if note is None:
                words.insert(0, f"ring rank {rank} has not been heard of")
            elif (note["error"] or "").startswith("PeerError"):  # a consequence like this rank's own, no cause
                words.append(f"ring rank {rank} gave up waiting too ({note['error'].split(': ', 2)[-1].rstrip('.')})")
            elif note["error"]:
                words.insert(0, f"ring rank {rank} reported {note['error']}")
            else:
                inside = ", ".join(f"{k}={v}" for k, v in note["fields"].items())
                late = "has not come, it " if note["came"] < self._came else ""
                words.append(f"ring rank {rank} {late}last agreed on {note['topic']} ({inside})")
        return f" {'; '.join(words)}." if words else ""

    def _leave(self, note: dict[str, Any]) -> None:
        text = json.dumps(note)
        self._ask(lambda: self._store.set(f"ringspun/{self._ring_rank}", text))

    def _read(self, ring_rank: int) -> dict[str, Any] | None:
        key = f"ringspun/{ring_rank}"
        text = self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)
        return None if text is None else dict(json.loads(text))

    def _ask(self, question: Callable[[], T]) -> T | None:
        """The store's answer; None, and no more questions, if it fails or takes too long."""
        if self._silent:
            return None
        answer: list[T] = []

        def run() -> None:
            try:
                answer.append(question())
            except (RuntimeError, ValueError):  # its host is gone; the wait that follows will say so
                self._silent = True

        thread = threading.Thread(target=run, daemon=True, name="ringspun-notes")
        thread.start()
        thread.join(self._patience_s)
        self._silent = self._silent or thread.is_alive()
        return answer[0] if answer else None


def describe(failure: BaseException, limit: int = 500) -> str:
    """An error in one string, cut: one that quotes others' must not grow with the ring."""
    text = f"{type(failure).__name__}: {failure}"
    return text if len(text) <= limit else text[:limit] + "..."
