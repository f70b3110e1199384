"""Streams where there is no GPU: they say in which order a device would work, and find what it might do at once.

Every stream has a clock, and an event keeps what its stream knew of all clocks; so of any two pieces of work it is
known whether one must be over before the other begins. Ops of torch are noted with the memory that they read and write,
on the stream that is current (`Watch`), messages on a stream of the backend's own (`WatchedNccl`); two that touch the
same bytes, one of them writing, and in no order, are a race. On the CPU all is done at once, so numbers are right too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringspun.core.route.base import Action
from ringspun.torch.drivers.nccl import Nccl
from ringspun.torch.drivers.streams import Streams

Clock = dict[str, int]


@dataclass
class StandingEvent:
    clock: Clock
    done: bool = True

    def query(self) -> bool:
        return self.done


@dataclass(eq=False)
class StandingStream:
    name: str
    streams: StandingStreams
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> StandingEvent:
        self.streams.told.append(f"{self.name}: record")
        return StandingEvent(dict(self.clock), self.streams.done)

    def wait_event(self, event: StandingEvent) -> None:
        self.streams.told.append(f"{self.name}: wait")
        if self.name != self.streams.deaf:
            self.join(event.clock)

    def join(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def tick(self) -> int:
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]


@dataclass
class _Bytes:
    """Of some memory: who wrote it last, and who has read it since."""

    keep: Any
    wrote: tuple[str, int, str] | None = None
    read: dict[str, tuple[int, str]] = field(default_factory=dict)


class StandingStreams(Streams):
    """Args:
    device: whose tensors are taken for a GPU's. done: whether the device ever comes past an event.
    deaf: a stream that waits for nothing, for tests of the tests.
    """

    def __init__(self, device: str = "cpu", *, done: bool = True, deaf: str = "") -> None:
        self.device, self.done, self.graph, self.deaf = torch.device(device), done, False, deaf
        self.told: list[str] = []
        self.races: list[str] = []
        self.caller, self.own, self.nccl = (StandingStream(name, self) for name in ("caller", "own", "nccl"))
        self._now = [self.caller]
        self._memory: dict[int, _Bytes] = {}
        self._hosts: dict[int, Tensor] = {}

    def current(self) -> StandingStream:
        return self._now[-1]

    @contextmanager
    def on(self, stream: StandingStream) -> Iterator[None]:
        self._now.append(stream)
        yield
        self._now.pop()

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        told = torch.empty(torch.Size(shape), dtype=dtype)
        self._hosts[told.untyped_storage()._cdata] = told  # nobody reads it before an event has come
        return told

    @property
    def capturing(self) -> bool:
        return self.graph

    def touch(self, stream: StandingStream, what: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """A piece of work on a stream."""
        time = stream.tick()
        for x, writing in [(x, False) for x in reads] + [(x, True) for x in writes]:
            storage = x.untyped_storage()
            if not storage.nbytes() or x.device != self.device or storage._cdata in self._hosts:
                continue
            held = self._memory.setdefault(storage._cdata, _Bytes(storage))
            others = [held.wrote] if held.wrote else []
            others += [(name, *seen) for name, seen in held.read.items()] if writing else []
            for name, then, by in others:
                if name != stream.name and stream.clock.get(name, 0) < then:
                    self.races.append(f"{what} on {stream.name} beside {by} on {name}")
            if writing:
                held.wrote, held.read = (stream.name, time, what), {}
            else:
                held.read[stream.name] = (time, what)


class Watch(TorchDispatchMode):
    """Notes every op with what it reads and writes."""

    def __init__(self, streams: StandingStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        names = func._schema.arguments
        given = [*zip(names, args, strict=False), *((a, kwargs[a.name]) for a in names if a.name in (kwargs or {}))]
        reads, writes = [], []
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(x for x in tree_leaves(value) if isinstance(x, Tensor))
        if func.namespace == "c10d":  # noted as messages
            return found
        if not all(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):  # no view
            writes += [x for x in tree_leaves(found) if isinstance(x, Tensor)]
            self.streams.touch(self.streams.current(), str(func), reads, writes)
        return found


class NobodyReads(TorchFunctionMode):
    """Raises where the host looks into a tensor, or waits for a device."""

    READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert not (name in self.READS and isinstance(args[0], Tensor)), f"{name} while a call goes on"
        return func(*args, **(kwargs or {}))


class _QueuedWork:
    """A batch of messages on the backend's stream. `wait` lets the current stream wait for it."""

    def __init__(self, driver: WatchedNccl, work: Any, event: StandingEvent) -> None:
        self._driver, self._work, self._event = driver, work, event

    def wait(self, *given: Any) -> None:
        assert not given, "a work that is given a time holds up the host"
        self._driver.streams.current().wait_event(self._event)
        for work in self._work:
            work.wait()


class WatchedNccl(Nccl):
    """The driver over a group that moves tensors of CPUs; its messages are noted as nccl's own stream would run them:
    in the order in which they were started, each when all that its starter's stream held was done."""

    def __init__(self, group: dist.ProcessGroup, **asked: Any) -> None:
        self.streams = asked.setdefault("streams", StandingStreams())
        super().__init__(group, **asked)

    def _post(self, transfers):
        works = super()._post(transfers)
        if not transfers:
            return works
        nccl = self.streams.nccl
        nccl.join(self.posted.clock)
        sends, receives = ([t.buffer for t in transfers if t.action == a] for a in (Action.SEND, Action.RECEIVE))
        self.streams.touch(nccl, "messages", sends, receives)
        works.works = [_QueuedWork(self, works.works, StandingEvent(dict(nccl.clock)))]
        works.whats = [", ".join(works.whats)]
        return works

    def _start(self, operations, what):
        self.posted = StandingEvent(dict(self.streams.current().clock))
        self.streams.told.append(f"{self.streams.current().name}: messages")
        return super()._start(operations, what)

    def _driven(self, program):
        with Watch(self.streams), NobodyReads():
            return super()._driven(program)

    def _conclude(self):
        with Watch(self.streams):
            super()._conclude()
