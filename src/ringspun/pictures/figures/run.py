"""The numbers behind a picture of a training run: curves by step, apart for each stage, and what each stage came to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from ringspun.pictures.figures.base import Figure
from ringspun.pictures.units import count

MOST_POINTS = 400
"""Of a curve, about; each is then the mean of several steps."""
Record = Mapping[str, Any]
_MEASURED = (
    ("Speed", "tokens/s", {"tokens_per_s": "all ranks together"}),
    ("MFU", "share", {"mfu": "model FLOP/s over the ranks' peak"}),
    ("Waiting for messages", "share", {"waiting": "mean of the ranks", "waiting_most": "the rank that waits most"}),
    ("Peak memory of a step", "bytes", {"fullest": "fullest rank", "emptiest": "emptiest rank"}),
    ("Gradient norm", "", {"grad_norm": "before clipping"}),
    ("Learning rate", "", {"lr": "learning rate"}),
)
"""Title, unit, and names by field of a step's record."""


@dataclass(frozen=True)
class Curve:
    """One quantity in one stage. `steps` are those done when it was measured."""

    name: str
    stage: int
    steps: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    """Curves on one axis.

    Args:
        unit: "" (a number), "share" (of 1), "bytes" or "tokens/s".
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the curves, each once."""
        return tuple(dict.fromkeys(curve.name for curve in self.curves))


@dataclass(frozen=True)
class Stage:
    """One stage.

    Args:
        number: counted from 0. seq_len: 0: not told. first_step: counted from 1. steps: planned. done: of them.
        text: its mesh and rotations; one after the other where a resumed run changed them.
        loss: first and last. tokens_per_s, mfu: medians. waiting: means, of all ranks and of the one that waits most.
        peak_bytes: of the fullest rank in the step that was profiled. pictures: file of the ring's; "": none.
        None: not measured.
    """

    number: int
    seq_len: int
    first_step: int
    steps: int
    done: int
    text: str
    loss: tuple[float, float] | None
    tokens_per_s: float | None
    mfu: float | None
    waiting: tuple[float, float] | None
    peak_bytes: int | None
    pictures: str


@dataclass(frozen=True)
class RunFigure(Figure):
    """A run so far.

    Args:
        steps: planned. done: of them. settings: dotted keys of the config, and values as JSON.
    """

    name: ClassVar[str] = "run"
    title: ClassVar[str] = "A training run"
    source: ClassVar[str] = "the log of a run"
    steps: int
    done: int
    stages: tuple[Stage, ...]
    panels: tuple[Panel, ...]
    settings: tuple[tuple[str, str], ...]


def of(
    records: Sequence[Record],
    *,
    steps: int = 0,
    settings: Sequence[tuple[str, str]] = (),
    pictures: Mapping[int, str] | None = None,
    most: int = MOST_POINTS,
) -> RunFigure:
    """A run from its log.

    Args:
        records: of the log, in order (`ringspun.train.reporting.log`). steps: planned; default those that are told of.
        settings: see `RunFigure`. pictures: by stage, the file of its ring's. most: points of a curve.
    """
    done = [_with_memory(r) for r in records if "loss" in r]
    every = max(1, -(-len(done) // most))
    begun = _begun(records, done, steps)
    planned = max(steps, *(s["first_step"] + s["steps"] - 1 for s in begun.values()), 0)
    last = done[-1]["step"] if done else 0
    stages = tuple(_stage(n, told, done, (pictures or {}).get(n, "")) for n, told in sorted(begun.items()))
    notes = (f"each point of a curve is the mean of {every:,} steps",) if every > 1 else ()
    panels = [*_evaluated(records, done, every)]
    panels += [Panel(title, unit, tuple(_curves(done, names, every))) for title, unit, names in _MEASURED]
    return RunFigure(
        _words(last, planned, stages), notes, planned, last, stages,
        tuple(panel for panel in panels if panel.curves), tuple(settings),
    )  # fmt: skip


def _words(last: int, planned: int, stages: Sequence[Stage]) -> str:
    lengths = list(dict.fromkeys(f"{stage.seq_len:,}" for stage in stages if stage.seq_len))
    words = f"{last:,} of {planned:,} steps" + (f", {len(stages)} stages" if len(stages) > 1 else "")
    return words + (f", sequences of {', '.join(lengths)} tokens" if lengths else "")


def _with_memory(record: Record) -> Record:
    peaks = record.get("peak_bytes")
    return {**record, "fullest": max(peaks), "emptiest": min(peaks)} if peaks else record


def _begun(records: Sequence[Record], done: Sequence[Record], steps: int) -> dict[int, dict[str, Any]]:
    """What was told of each stage when it began; of steps without, what they say themselves."""
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if "begins" in record:
            told = dict(record["begins"])
            before = found.get(record["stage"])
            if before is not None and before["text"] != told["text"]:
                told["text"] = f"{before['text']}; from step {record['step'] + 1:,} on {told['text']}"
            found[record["stage"]] = told
    for record in done:
        number, length = record.get("stage", 0), record.get("seq_len", 0)
        found.setdefault(number, {"seq_len": length, "first_step": record["step"], "steps": 0, "text": ""})
    if len(found) == 1:  # of a run without stages, nobody said
        (only,) = found.values()
        only["steps"] = only["steps"] or max(steps, len(done))
    return found


def _stage(number: int, told: Mapping[str, Any], done: Sequence[Record], pictures: str) -> Stage:
    mine = [r for r in done if r.get("stage", 0) == number]

    def values(field: str) -> list[float]:
        return [r[field] for r in mine if _finite(r.get(field))]

    losses, waits = values("loss"), (values("waiting"), values("waiting_most"))
    middle = {field: median(found) if (found := values(field)) else None for field in ("tokens_per_s", "mfu")}
    return Stage(
        number, told["seq_len"], told["first_step"], told["steps"] or len(mine), len(mine), told["text"],
        (losses[0], losses[-1]) if losses else None, middle["tokens_per_s"], middle["mfu"],
        (sum(waits[0]) / len(waits[0]), sum(waits[1]) / len(waits[1])) if all(waits) else None,
        max((r["fullest"] for r in mine if "fullest" in r), default=None), pictures,
    )  # fmt: skip


def _evaluated(records: Sequence[Record], done: Sequence[Record], every: int) -> Iterator[Panel]:
    """The loss with those of held-out sequences, and a panel of each other kind of value: what stands before an @."""
    found: dict[str, dict[tuple[str, int], dict[int, float]]] = {}
    for record in records:
        for name, value in record.get("evaluation", {}).items():
            if _finite(value):
                points = found.setdefault(name.partition("@")[0], {}).setdefault((name, record["stage"]), {})
                points[record["step"]] = value  # measured again: the last
    curves = {
        kind: tuple(Curve(*which, tuple(points), tuple(points.values())) for which, points in these.items())
        for kind, these in found.items()
    }
    yield Panel("Loss", "", (*_curves(done, {"loss": "training"}, every), *curves.pop("loss", ())))
    for kind, those in curves.items():
        yield Panel(kind[:1].upper() + kind[1:], "", those)


def _curves(done: Sequence[Record], names: Mapping[str, str], every: int) -> Iterator[Curve]:
    for field, name in names.items():
        stages: dict[int, list[tuple[int, float]]] = {}
        for record in done:
            if _finite(record.get(field)):
                stages.setdefault(record.get("stage", 0), []).append((record["step"], record[field]))
        for stage, points in stages.items():
            groups = [points[a:b] for a, b in pairwise([*range(0, len(points), every), len(points)])]
            steps = tuple(group[-1][0] for group in groups)
            yield Curve(name, stage, steps, tuple(sum(v for _, v in group) / len(group) for group in groups))


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def shown(value: float, unit: str) -> str:
    """A value of a panel, for people."""
    if unit == "share":
        return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
    if unit == "bytes":
        return f"{value / (1 << 20):,.1f} MiB"
    return f"{count(value)} {unit}" if unit else f"{value:.4g}"
