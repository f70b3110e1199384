"""`RankPool`: the ranks of a gloo ring as processes, started once and called many times.

Starting processes that import torch takes seconds; calling ones that wait takes a millisecond. So a test run keeps one
pool per ring size, and every test that needs real processes calls it:

    with RankPool(4) as pool:                      # 4 processes, one gloo group
        answers = pool.run(function, 3, "x")       # function(ring_rank, 3, "x") on each; answers by rank

`function` and its arguments travel by pickle, so it must be a module's own function (no lambda, no closure). The ranks
share the default process group; a call that leaves it in disorder (a rank that did not take part in a collective) is
followed by `restart`; groups that calls made stay, each with threads of its own, until `renew`. A rank that hangs or
dies costs the whole pool: all are killed, new ones start, the call raises.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, TypeVar

from ringspun.core.host import end_with_parent
from ringspun.errors import RingspunError

T = TypeVar("T")

HOST = "127.0.0.1"
PRELOAD = ("ringspun.torch", "torch._dynamo")
"""Modules imported once, before the ranks are forked; the second is what the first call of any custom op imports."""
START_S = 60.0
"""Longest wait for the ranks of a new pool (seconds)."""


@dataclass(frozen=True)
class Failure:
    """An exception that a call raised on one rank; what can travel of it.

    Args:
        kind: name of its class. message: its text. traceback: the whole, formatted.
    """

    kind: str
    message: str
    traceback: str


class RankFailed(RingspunError, RuntimeError):
    """A call raised on some ranks; `failures` holds them by rank. The pool goes on."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        self.failures = failures
        ranks = ", ".join(map(str, failures))
        texts = "\n".join(f"--- ring rank {rank}\n{f.traceback}" for rank, f in failures.items())
        super().__init__(f"function must return on every rank; it raised on {ranks}.\n{texts}")


class RankLost(RingspunError, RuntimeError):
    """A rank hung or died during a call: `ranks`; what the others brought: `outcomes`. The pool was started afresh."""

    def __init__(self, message: str, ranks: tuple[int, ...], outcomes: dict[int, Any]) -> None:
        self.ranks, self.outcomes = ranks, outcomes
        super().__init__(message)


class RankPool:
    """Processes that form a ring over gloo, one thread each, waiting to be called. They end with this process.

    Args:
        size: ranks R. preload: modules imported once before the ranks are forked; without effect where this process has
            forked others already, or where the system cannot fork.
    """

    def __init__(self, size: int, *, preload: tuple[str, ...] = PRELOAD) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1; got {size}.")
        self.size = size
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if forks else "spawn")
        if forks:
            self._context.set_forkserver_preload([*preload, __name__])
        self._ranks: list[tuple[BaseProcess, connection.Connection]] = []
        self._store: Any = None
        self._renewed = 0
        self._start()

    def run(self, function: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
        """``function(ring_rank, *args)`` on every rank; what each returned, by rank.

        Args:
            function: a module's own function. args: what else it gets. timeout_s: longest wait for all (seconds).
        Raises:
            RankFailed: it raised on some rank. RankLost: a rank hung or died.

        >>> with RankPool(2) as pool:
        ...     pool.run(pow, 3)  # 0 ** 3 and 1 ** 3
        [0, 1]
        """
        outcomes = self.attempt(function, *args, timeout_s=timeout_s)
        failures = {rank: o for rank, o in enumerate(outcomes) if isinstance(o, Failure)}
        if failures:
            raise RankFailed(failures)
        return outcomes  # type: ignore[return-value]

    def attempt(self, function: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T | Failure]:
        """As `run`, with a `Failure` in the place of what a rank that raised would have returned.

        Raises:
            RankLost: a rank hung or died. ValueError: the pool is closed.
        """
        if not self._ranks:
            raise ValueError("pool must be open; it was closed. Use `restart`, or a new one.")
        job = pickle.dumps((sys.path, timeout_s, pickle.dumps((function, args))))
        return self._collect(job, getattr(function, "__name__", repr(function)), timeout_s)

    def restart(self) -> None:
        """End the ranks and start new ones: a fresh process group."""
        self.close(patience_s=0.0)
        self._start()

    def renew(self) -> None:
        """End all groups that calls have made, and give the same processes a fresh default group.

        Raises:
            RankLost: a rank could not, for a call had left it in disorder; the pool was started afresh.
        """
        self._renewed += 1
        self.run(_renew, self._renewed)

    def close(self, *, patience_s: float = 5.0) -> list[int | None]:
        """End the ranks; their exit codes. Those that have not ended after `patience_s` seconds are killed."""
        for _, pipe in self._ranks:
            pipe.close()  # what a rank reads as the end
        deadline = time.monotonic() + patience_s
        for process, _ in self._ranks:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        codes = [process.exitcode for process, _ in self._ranks]
        self._ranks, self._store = [], None
        return codes

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        from torch import distributed as dist

        # The store lives here, on a port that the system chose: nobody can take it before the ranks come.
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for rank in range(self.size):
            mine, theirs = self._context.Pipe()
            place = (rank, self.size, self._store.port)
            process = self._context.Process(target=_serve, args=(place, theirs), name=f"ring rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, mine))
        self._collect(None, _START, START_S)

    def _collect(self, job: bytes | None, name: str, timeout_s: float) -> list[Any]:
        """Send `job` to all ranks and wait for all answers."""
        answers: dict[int, Any] = {}
        waiting: dict[Any, int] = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        dead: list[int] = []
        deadline = time.monotonic() + timeout_s + _GRACE_S
        for pipe in list(waiting):
            try:
                if job is not None:
                    pipe.send_bytes(job)
            except OSError:
                dead.append(waiting.pop(pipe))
        while waiting:
            if dead:  # the others learn of it by a closed connection, and may tell what they make of it
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank] = pickle.loads(self._ranks[rank][1].recv_bytes())
                except (EOFError, OSError):
                    dead.append(rank)
        if dead or waiting:
            raise self._lost(name, timeout_s, dead, sorted(waiting.values()), answers)
        return [answers[rank] for rank in range(self.size)]

    def _lost(self, name: str, timeout_s: float, dead: list[int], late: list[int], answers: dict[int, Any]) -> RankLost:
        """End what is left of the pool and start a new one."""
        processes = [process for process, _ in self._ranks]
        for rank in dead:
            processes[rank].join(1.0)
        found = [f"ring rank {r} died with exit code {processes[r].exitcode}" for r in dead]
        found += [f"ring rank {r} raised {a.kind}: {a.message}" for r, a in answers.items() if isinstance(a, Failure)]
        found += [f"no answer from ring rank {r}" for r in late]
        self.close(patience_s=0.0)
        if name != _START:
            self._start()
        return RankLost(
            f"{name} must return within {timeout_s:g} s on every rank; got: {'; '.join(found)}.",
            tuple(dead or late),
            answers,
        )


_START = "the start of the pool"
_LAST_WORDS_S = 3.0
"""How long the other ranks may go on when one has died (seconds)."""
_GRACE_S = 0.5
"""Time between the moment a late rank shows on stderr where it is and the moment it is killed (seconds)."""


def _serve(place: tuple[int, int, int], pipe: connection.Connection) -> None:
    """A rank's life: join the group, then answer calls until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    end_with_parent()
    import torch
    from torch import distributed as dist

    rank, size, port = place
    torch.set_num_threads(1)
    _store_of_pool.append(dist.TCPStore(HOST, port, is_master=False))  # type: ignore[attr-defined]
    _init_group(rank, size, "first")
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            path, timeout_s, call = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            break
        sys.path[:] = path
        faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__ or 2)
        answer = _answer(rank, call)
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


_store_of_pool: list[Any] = []
"""Of a rank: how it finds the others, again after `renew`."""


def _init_group(rank: int, size: int, name: str) -> None:
    """The default group, by keys of its own in the store: those of the one before lead to closed connections."""
    from torch import distributed as dist

    store = dist.PrefixStore(name, _store_of_pool[0])  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=START_S))


def _renew(rank: int, time: int) -> None:
    from torch import distributed as dist

    size = dist.get_world_size()
    dist.destroy_process_group()
    _init_group(rank, size, f"renewed {time}")


def _answer(rank: int, call: bytes) -> bytes:
    try:
        function, args = pickle.loads(call)
        return pickle.dumps(function(rank, *args))
    except BaseException as problem:  # SystemExit too: a rank that ends silently looks like a crash
        return pickle.dumps(Failure(type(problem).__name__, str(problem), traceback.format_exc()))
