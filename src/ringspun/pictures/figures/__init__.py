"""The numbers of each picture, as plain frozen data. Each module has ``of(scene, ...)``."""

from ringspun.pictures.figures.balance import BalanceFigure
from ringspun.pictures.figures.base import Figure, Kind
from ringspun.pictures.figures.compare import CompareFigure
from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.schedule import ScheduleFigure
from ringspun.pictures.figures.timeline import TimelineFigure

__all__ = [
    "BalanceFigure",
    "CompareFigure",
    "Figure",
    "Kind",
    "LayoutFigure",
    "MaskFigure",
    "MemoryFigure",
    "ScheduleFigure",
    "TimelineFigure",
]
