"""Figures as SVG and PNG, by matplotlib: colours for any colour vision, and every file holds the numbers it shows."""

from __future__ import annotations

import json
import re
from functools import singledispatch
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from ringspun.errors import ConfigError, MissingExtra
from ringspun.pictures.figures.base import Figure

try:
    import matplotlib as mpl
except ModuleNotFoundError:  # pragma: no cover (the tests have it)
    raise MissingExtra("pictures must be drawn by matplotlib; install it: pip install 'ringspun[plot]'.") from None

from ringspun.pictures.figures.balance import BalanceFigure
from ringspun.pictures.figures.compare import CompareFigure
from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure
from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.run import RunFigure
from ringspun.pictures.figures.schedule import ScheduleFigure
from ringspun.pictures.figures.timeline import TimelineFigure
from ringspun.pictures.plot import bars, curves, evaluation, planes, steps
from ringspun.pictures.plot.style import STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

DPI = 144
"""Of a PNG."""


def save(figure: Figure, path: Path) -> None:
    """Write a figure as SVG or PNG. Its numbers are in the file: SVG's and PNG's ``Description`` is `as_dict` as JSON.

    Raises:
        ConfigError: another ending. OSError: it cannot be written.
    """
    ending = path.suffix.lower()
    if ending not in (".svg", ".png"):
        raise ConfigError(f"path must end in .svg or .png; got {path.name!r}.")
    told = {"Title": figure.words, "Description": json.dumps(figure.as_dict(), separators=(",", ":"))}
    if ending == ".png":
        with mpl.rc_context(STYLE):
            draw(figure).savefig(path, format="png", dpi=DPI, metadata=told)
        return
    text = StringIO()
    with mpl.rc_context(STYLE):
        draw(figure).savefig(text, format="svg", metadata={**told, "Date": None})
    path.write_text(_numbered(text.getvalue()), encoding="utf-8")


def _numbered(svg: str) -> str:
    """The same with its clip paths numbered, which matplotlib names by where they lie in memory: the same figure is
    then the same file."""
    names: dict[str, str] = {}
    return re.sub(r'(?<=["#])p[0-9a-f]{10}(?=[")])', lambda m: names.setdefault(m[0], f"p{len(names)}"), svg)


def drawn(figure: Figure) -> Drawing:
    """A figure as matplotlib's, to show or to go on with."""
    with mpl.rc_context(STYLE):
        return draw(figure)


@singledispatch
def draw(figure: Figure) -> Drawing:
    """A figure in the style that is in force."""
    raise ConfigError(f"figure must be one that can be drawn; got {type(figure).__name__}.")


draw.register(MaskFigure, planes.of_mask)
draw.register(LayoutFigure, planes.of_layout)
draw.register(ScheduleFigure, steps.of_schedule)
draw.register(BalanceFigure, steps.of_balance)
draw.register(MemoryFigure, bars.of_memory)
draw.register(TimelineFigure, bars.of_timeline)
draw.register(CompareFigure, bars.of_compare)
draw.register(RunFigure, curves.of_run)
draw.register(RetrievalFigure, evaluation.of_retrieval)
draw.register(LossFigure, evaluation.of_loss)
