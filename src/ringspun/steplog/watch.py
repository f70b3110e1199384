"""Dumping on a signal, also from a process that hangs in a wait.

Python runs signal handlers in the main thread between two bytecodes, and a rank that waits for a peer sits inside of
gloo, in C++, for minutes. But the C handler that Python installs writes the signal's number into a file descriptor at
once (`signal.set_wakeup_fd`), and gloo waits without the interpreter's lock; so a thread that reads that descriptor
can write the dump meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from types import FrameType

from ringspun.steplog.log import FOLDER_VARIABLE, dump


def dump_on_signal(folder: str | os.PathLike[str] | None = None, number: int | None = None) -> None:
    """From now on, write `dump` whenever this process gets a signal, whatever it is doing. Call it in the main thread.

    A handler that the signal had before still runs (in the main thread, when it can). The descriptor that
    `signal.set_wakeup_fd` had, asyncio's for instance, still gets every signal; an event loop started later takes the
    descriptor over, so call this again after.

    Args:
        folder: as of `dump`, decided now. number: of the signal; default SIGUSR1.
    Raises:
        ValueError: not in the main thread.
    """
    number = signal.SIGUSR1 if number is None else number
    place = Path(folder if folder is not None else os.environ.get(FOLDER_VARIABLE) or ".").absolute()
    before = signal.getsignal(number)

    def handle(received: int, frame: FrameType | None) -> None:
        if callable(before):
            before(received, frame)

    signal.signal(number, handle)  # without a handler of Python's own, its C handler is not there to write
    ours, written = os.pipe()
    os.set_blocking(written, False)
    others = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(ours, others, number, place), daemon=True, name="ringspun-steplog").start()


def _watch(ours: int, others: int, number: int, place: Path) -> None:
    """Read signals' numbers for ever: dump at `number`, and pass all on."""
    while received := os.read(ours, 1):
        if received[0] == number:
            with contextlib.suppress(OSError):  # a full disk must not end the watch
                dump(place, reason=f"signal {signal.Signals(number).name}")
        if others >= 0:
            with contextlib.suppress(OSError):  # closed since
                os.write(others, received)
