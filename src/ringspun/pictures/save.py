"""Figures as files, each kind by its ending."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ringspun.errors import ConfigError
from ringspun.pictures.figures.base import Figure
from ringspun.pictures.figures.timeline import TimelineFigure
from ringspun.pictures.page import page
from ringspun.pictures.trace import trace_text


def save(figures: Sequence[Figure], path: Path) -> None:
    """Write figures to a file: ``.json`` their numbers, ``.svg`` and ``.png`` one of them drawn, ``.html`` one page of
    all, ``.trace.json`` a timeline for Perfetto.

    Raises:
        ConfigError: another ending, or several figures where one is written. MissingExtra: no matplotlib.
        OSError: it cannot be written.
    """
    for ending, write in WRITERS.items():
        if path.name.endswith(ending):
            write(figures, path)
            return
    raise ConfigError(f"save must be a file that ends in {', '.join(WRITERS)}; got {path.name!r}.")


def as_json(figures: Sequence[Figure]) -> str:
    """One object: a figure, or several under ``figures``."""
    found = [figure.as_dict() for figure in figures]
    return json.dumps(found[0] if len(found) == 1 else {"figures": found}, indent=1)


def _json(figures: Sequence[Figure], path: Path) -> None:
    path.write_text(as_json(figures) + "\n", encoding="utf-8")


def _plot(figures: Sequence[Figure], path: Path) -> None:
    from ringspun.pictures import plot

    plot.save(_one(figures, path), path)


def _page(figures: Sequence[Figure], path: Path) -> None:
    path.write_text(page(figures), encoding="utf-8")


def _trace(figures: Sequence[Figure], path: Path) -> None:
    figure = _one(figures, path)
    if not isinstance(figure, TimelineFigure):
        raise ConfigError(f"save must be given a timeline for {path.name!r}; got {figure.name}.")
    path.write_text(trace_text(figure), encoding="utf-8")


def _one(figures: Sequence[Figure], path: Path) -> Figure:
    if len(figures) != 1:
        raise ConfigError(f"save must be given one figure for {path.name!r}; got {len(figures)}. Draw them one by one.")
    return figures[0]


WRITERS: dict[str, Callable[[Sequence[Figure], Path], None]] = {
    ".trace.json": _trace,
    ".json": _json,
    ".svg": _plot,
    ".png": _plot,
    ".html": _page,
}
"""By ending; the first that fits."""
