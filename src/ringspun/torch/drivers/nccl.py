"""`Nccl`: one rank per process over torch.distributed's nccl backend, which moves tensors of GPUs while they compute.

Nothing is waited for while a call goes on. All of it is queued, and order is told by events:

    caller's stream   pack, seal --o                o-- look at what the       ...tiles of the last step
                                    \\              /    messages say --o
    own stream                       o-- (nccl) --o                      \\
                                                                          o-- compare it: one flag, copied to the host

A message begins when everything that the caller had queued by then is done, so its buffer is packed, or nobody reads it
any more; the caller's next work begins when the message is there. That is all that a buffer needs to be used again
(`ringspun.torch.buffers` keeps what one stream gave back for that stream). A call is over for the host when the
flag has come, which is before the tiles of the last step are done: the device does not run dry meanwhile.

What a message says of itself is looked at on the device, and the host polls an event of its own, with a timeout of its
own: torch's watchdog would end the process without a word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringspun.errors import DtypeError, UnsupportedByRing
from ringspun.torch.drivers.base import RankProgram, T, Transfer, Verdict
from ringspun.torch.drivers.group import GroupDriver, Works, backends, cuda_device
from ringspun.torch.drivers.streams import CudaStreams, Event, Streams

SPIN_S = 1e-3
POLL_S = 5e-5
"""A wait asks for its event again and again; after `SPIN_S` it sleeps in between."""
ALL = "all messages of the call"
OF_GROUP = 0.9
"""Of the group's own timeout: at its end torch's watchdog ends the process."""


class Nccl(GroupDriver):
    """One rank of a ring of processes on GPUs, a GPU each. Making the first one over a group is collective: it opens
    the group's communicator, so that calls in which not every rank has a message need none.

    Args:
        group: process group whose order is the ring's order (any world ranks); where it also has gloo for CPUs, as
            ``"cpu:gloo,cuda:nccl"``, ranks agree over that, and tensors of CPUs can be moved too.
        timeout_s: longest wait for a peer; at most nine tenths of the group's own timeout counts.
        streams: of the GPU; default: those of the one that the group is bound to, or of the current one.
    Raises:
        PeerError: another rank does not come. UnsupportedByRing: the backend does not batch messages.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float = 600.0, streams: Streams | None = None) -> None:
        streams = CudaStreams(cuda_device(group)) if streams is None else streams
        if backends(group).get("cuda") == "nccl" and not group._get_backend(streams.device).supports_coalescing:
            raise UnsupportedByRing(
                "nccl must send and receive messages of a batch together; got a backend that starts them one by one, "
                "which hangs. Leave TORCH_DISTRIBUTED_DEBUG=DETAIL unset: it wraps nccl in one of those."
            )
        super().__init__(group, timeout_s=min(timeout_s, OF_GROUP * _timeout_of(group, streams.device)))
        self._streams = streams
        on_cpus = backends(group).get("cpu") == "gloo"
        self.meeting = torch.device("cpu") if on_cpus else streams.device
        self.devices = ("cpu", streams.device.type) if on_cpus else (streams.device.type,)
        self._verdict: Verdict | None = None
        self._seen: Event | None = None
        if not self.state.opened:
            self._open()
            self.state.opened = True

    def clock(self, ring_rank: int) -> Callable[[], float] | None:
        return None  # of the host, which queues ahead of the device

    def defers(self, device: torch.device) -> bool:
        return device.type == self._streams.device.type

    def _open(self) -> None:
        """Open the communicator: batched messages go over the group's one, which torch makes with all ranks at its
        first use. If that were a call in which some rank has no message, it would wait for ever."""
        what, one = "opening the communicator", torch.ones(1, device=self._streams.device)
        self._await(self._guarded(lambda: dist.all_reduce(one, group=self.group, async_op=True), what), what)

    # -- messages ----------------------------------------------------------------------------------------------------

    def run(self, programs: Sequence[RankProgram[T]]) -> list[T]:
        if self._streams.capturing:
            raise UnsupportedByRing(
                "attention over nccl must not be captured in a CUDA graph: after each call the host looks at what "
                "arrived. Capture what stands between the calls."
            )
        self._verdict = self._seen = None
        return super().run(programs)

    def _post(self, transfers: list[Transfer]) -> Works:
        if not any(self.defers(t.buffer.device) for t in transfers):
            return super()._post(transfers)
        streams = self._streams
        for t in transfers:
            if t.buffer.device != streams.device:  # torch would open another communicator, with all ranks
                raise DtypeError(
                    f"tensors must be on {streams.device}, on which this group's messages lie (ring rank "
                    f"{self.ring_rank}); got {t.buffer.device}. Call torch.cuda.set_device before the group is made."
                )
        streams.own.wait_event(streams.current().record_event())
        with streams.on(streams.own):
            works = super()._post(transfers)
        works.queued = True
        return works

    def _land(self, ticket: Works) -> None:
        if not ticket.queued:
            super()._land(ticket)
            return
        streams = self._streams
        with streams.on(streams.own):
            for work, what in zip(ticket.works, ticket.whats, strict=True):
                self._guarded(work.wait, what)  # given a time it would hold up this thread, not the stream
        streams.current().wait_event(streams.own.record_event())

    def _hear(self, verdict: Verdict) -> None:
        self._verdict, self._seen = verdict, self._streams.current().record_event()

    def _conclude(self) -> None:
        with self._logged(ALL):  # of ranks that no message came to as well: collectives are counted alike on all
            verdict = self._verdict
            if verdict is None or not self._is_up(verdict):
                return
        verdict.judge()

    def _is_up(self, verdict: Verdict) -> bool:
        """The flag of a verdict, waited for here."""
        assert self._seen is not None
        streams = self._streams
        streams.own.wait_event(self._seen)
        with streams.on(streams.own):
            flag = verdict.flag()
            told = streams.host(flag.shape, flag.dtype)
            told.copy_(flag, non_blocking=True)
            read = streams.own.record_event()
        self._guarded(lambda: self._poll(read), ALL)
        return bool(told)

    # -- agreements and other collectives ------------------------------------------------------------------------------

    def _meet(self, work: Any, what: str, device: torch.device) -> None:
        if self.defers(device):
            self._guarded(work.wait, what)
        elif self.meeting.type == "cpu":
            super()._meet(work, what, device)
        else:  # somebody will read it here
            self._await(work, what)

    def _await(self, work: Any, what: str) -> None:
        """Wait here for work of the device."""
        self._guarded(work.wait, what)
        done = self._streams.current().record_event()
        with self.counts.waits.timed():
            self._guarded(lambda: self._poll(done), what)

    def _carried_on(self, device: torch.device) -> torch.device:
        return device if self.defers(device) else self.meeting

    def _poll(self, event: Event) -> None:
        """Wait until the device has come past an event."""
        start = time.monotonic()
        while not event.query():
            passed = time.monotonic() - start
            if passed > self._timeout.total_seconds():
                raise TimeoutError("nothing")
            time.sleep(0.0 if passed < SPIN_S else POLL_S)


def _timeout_of(group: dist.ProcessGroup, device: torch.device) -> float:
    """The group's own timeout (seconds)."""
    options = getattr(group._get_backend(device), "options", None)
    return float("inf") if options is None else float(options._timeout.total_seconds())
