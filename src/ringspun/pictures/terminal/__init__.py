"""Figures on a terminal: 80 columns, and as readable without colour, for no two things differ by colour alone."""

from __future__ import annotations

from functools import singledispatch

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ringspun.pictures.figures.balance import BalanceFigure
from ringspun.pictures.figures.base import Figure
from ringspun.pictures.figures.compare import CompareFigure
from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure
from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.run import RunFigure
from ringspun.pictures.figures.schedule import ScheduleFigure
from ringspun.pictures.figures.timeline import TimelineFigure
from ringspun.pictures.terminal import bars, curves, evaluation, planes, steps
from ringspun.pictures.terminal.glyphs import in_ascii

COLUMNS = 64
"""Cells of a row at most: with what stands beside them, 80 columns."""
ROWS = 32
"""Ranks of a layout, and cells of a mask's side, at most."""


def show(figure: Figure, console: Console) -> None:
    """Print a figure; in ASCII where the console's encoding is no Unicode."""
    plain = not console.encoding.lower().startswith("utf")
    title = Text(figure.words, style="bold")
    notes = [Text(f"({note})", style="dim") for note in figure.notes]
    for part in (title, *notes, Text(""), *body(figure)):
        console.print(in_ascii(part) if plain and isinstance(part, Text) else part, highlight=False)


def renderable(figure: Figure) -> RenderableType:
    """A figure for rich."""
    return Group(Text(figure.words, style="bold"), *(Text(f"({n})", style="dim") for n in figure.notes), *body(figure))


@singledispatch
def body(figure: Figure) -> list[Text]:
    """The lines of a figure."""
    raise TypeError(f"figure must be one that a terminal can show; got {type(figure).__name__}.")


body.register(MaskFigure, planes.of_mask)
body.register(LayoutFigure, planes.of_layout)
body.register(ScheduleFigure, steps.of_schedule)
body.register(BalanceFigure, steps.of_balance)
body.register(MemoryFigure, bars.of_memory)
body.register(TimelineFigure, bars.of_timeline)
body.register(CompareFigure, bars.of_compare)
body.register(RunFigure, curves.of_run)
body.register(RetrievalFigure, evaluation.of_retrieval)
body.register(LossFigure, evaluation.of_loss)
