"""`report.html`: a run's curves, stages and settings on one page, drawn from what lies in its folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ringspun.errors import DataError, RingspunError
from ringspun.pictures.figures import RunFigure, run
from ringspun.pictures.page import page
from ringspun.train.output import LOG, REPORT, RUN, write_whole
from ringspun.train.reporting.log import records


def pictures_name(stage: int) -> str:
    """The file of a stage's ring, step by step; stages are counted from 0, and from 1 in the name."""
    return "ring.html" if stage == 0 else f"ring-stage-{stage + 1}.html"


def write_settings(folder: Path, *, steps: int, config: Mapping[str, Any]) -> None:
    """Writes `run.json`: what the log does not tell.

    Args:
        steps: planned. config: as JSON has it.
    Raises:
        ConfigError: it cannot be written.
    """
    write_whole(folder / RUN, json.dumps({"steps": steps, "config": config}, indent=1).encode() + b"\n")


def figure_of(folder: Path, logged: Sequence[Mapping[str, Any]] | None = None) -> RunFigure:
    """The numbers of a run, whether it goes on, ended, or was killed.

    Args:
        logged: lines of its log; default those in the folder.
    Raises:
        DataError: no run's folder, or no step is done.
    """
    found = records(folder / LOG) if logged is None else logged
    if not any("loss" in record for record in found):
        raise DataError(f"run must be the output folder of a training run that has done a step; got {folder}.")
    told = _settings(folder / RUN)
    stages = {record.get("stage", 0) for record in found}
    pictures = {n: name for n in stages if (folder / (name := pictures_name(n))).exists()}
    try:
        return run.of(
            found, steps=told.get("steps", 0), settings=tuple(_flat(told.get("config", {}))), pictures=pictures
        )
    except (KeyError, TypeError, AttributeError) as problem:
        raise DataError(f"{folder / LOG} must have lines as a run writes them; {problem!r}.") from None


def write_page(folder: Path, logged: Sequence[Mapping[str, Any]] | None = None) -> Path:
    """Draws `report.html` anew.

    Args:
        logged: see `figure_of`.
    Raises:
        DataError: see `figure_of`. ConfigError: it cannot be written.
    """
    write_whole(folder / REPORT, page([figure_of(folder, logged)]).encode())
    return folder / REPORT


@contextmanager
def drawn_on_failure(folder: Path) -> Iterator[None]:
    """Around ranks whose rank 0 may be ended before it can draw its page: it is drawn here, if there is a step."""
    try:
        yield
    except BaseException:
        with suppress(RingspunError):
            write_page(folder)
        raise


def _settings(path: Path) -> dict[str, Any]:
    """Of a run of an earlier version, or a damaged file, nothing."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and JSON, without what is None."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield before + name, json.dumps(value)
