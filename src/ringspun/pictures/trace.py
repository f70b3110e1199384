"""A timeline as a trace that Perfetto (https://ui.perfetto.dev), chrome://tracing and TensorBoard's profiler open.

A rank of a run is a process. Its first track is what it computes and waits for; each rank that it sends to has a track
of its messages, and more where several are under way at once: spans of a track never overlap.

Source: "Trace Event Format", Google, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
Times are microseconds, written in full nanoseconds.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ringspun.core.wire import Payload
from ringspun.pictures.figures.timeline import PASSES, Run, TimelineFigure, Transfer

Event = dict[str, Any]
OWN_TRACK = 0
"""What a rank itself does."""
_NAMES = {"compute": "step {}", "wait": "wait"}


def trace(figure: TimelineFigure) -> dict[str, Any]:
    """The runs of a figure as one trace: every run begins at 0, so that the measured lies beside the predicted."""
    events = [event for place, run in enumerate(figure.runs) for event in _of_run(figure, run, place)]
    told = {"made by": "ringspun", "what": figure.words, "notes": "; ".join(figure.notes)}
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": told}


def trace_text(figure: TimelineFigure) -> str:
    """The same as the text of a file."""
    return json.dumps(trace(figure), allow_nan=False)


def _of_run(figure: TimelineFigure, run: Run, place: int) -> Iterator[Event]:
    transfers: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in run.transfers:
        transfers[transfer.sender].append(transfer)
    for ring_rank in figure.ranks:
        process = place * figure.ring_size + ring_rank + 1  # 0 is the idle process of some viewers
        yield _named("process_name", process, OWN_TRACK, name=f"{run.name}: rank {ring_rank}")
        yield _named("process_sort_index", process, OWN_TRACK, sort_index=process)
        yield _named("thread_name", process, OWN_TRACK, name="compute")
        for rank, direction, step, what, start_s, end_s in run.spans:
            if rank == ring_rank:
                told = {"pass": PASSES[direction], "step": step}
                yield _span(_NAMES[what].format(step), what, process, OWN_TRACK, start_s, end_s, told)
        yield from _messages(transfers[ring_rank], process)


def _messages(transfers: Iterable[Transfer], process: int) -> Iterator[Event]:
    """Messages of one rank on a track for each receiver, and on further ones where they would overlap."""
    free: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by receiver: track, and until when (ns) it is taken
    tracks = OWN_TRACK
    for t in sorted(transfers, key=lambda t: (_ns(t.start_s), _ns(t.end_s))):
        lanes = free[t.receiver]
        lane = next((i for i, (_, until) in enumerate(lanes) if until <= _ns(t.start_s)), len(lanes))
        if lane == len(lanes):
            tracks += 1
            lanes.append((tracks, 0))
            yield _named(
                "thread_name", process, tracks, name=f"to rank {t.receiver}" + (f" ({lane + 1})" if lane else "")
            )
        track = lanes[lane][0]
        lanes[lane] = track, _ns(t.end_s)
        name = f"{Payload(t.payload).name} {t.source}"
        told = {"pass": PASSES[t.direction], "step": t.step, "bytes": t.n_bytes}
        yield _span(name, "message", process, track, t.start_s, t.end_s, told)


def _span(
    name: str, category: str, process: int, track: int, start_s: float, end_s: float, told: dict[str, Any]
) -> Event:
    start, end = _ns(start_s), _ns(end_s)
    times = {"ts": start / 1000, "dur": (end - start) / 1000}
    return {"name": name, "cat": category, "ph": "X", **times, "pid": process, "tid": track, "args": told}


def _named(what: str, process: int, track: int, **told: Any) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": track, "args": told}


def _ns(time_s: float) -> int:
    """Whole nanoseconds, so that a span ends where the next one begins."""
    return round(time_s * 1e9)
