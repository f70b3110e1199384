"""Streams and events, as far as the NCCL driver knows them: little enough that tests can stand in for a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's order."""

    def query(self) -> bool:
        """Whether the device has come past it. Waits for nothing."""
        ...


class Stream(Protocol):
    """Work of a device that runs in order."""

    def record_event(self) -> Event:
        """An event behind all that was queued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on run after an event."""
        ...


class Streams(ABC):
    """The streams of one device that a driver uses.

    Args:
        device: whose. own: the driver's own stream.
    """

    device: torch.device
    own: Stream

    @abstractmethod
    def current(self) -> Stream:
        """The stream that the caller computes on."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Within it, work is queued on a stream."""

    @abstractmethod
    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that a copy from the device may be queued into."""

    @property
    @abstractmethod
    def capturing(self) -> bool:
        """Whether work is being written into a graph instead of queued."""


class CudaStreams(Streams):
    """Those of a GPU; `device` has an index."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        assert isinstance(stream, torch.cuda.Stream)
        return torch.cuda.stream(stream)

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        # by name: `torch.set_default_device("cuda")` would else ask for pinned memory of the GPU, which there is not
        return torch.empty(torch.Size(shape), dtype=dtype, device="cpu", pin_memory=True)

    @property
    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()
