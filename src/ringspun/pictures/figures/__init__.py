"""The numbers of each picture, as plain frozen data. Each module has ``of(scene, ...)``."""

from collections.abc import Callable, Mapping

from ringspun.pictures.figures import balance, layout, mask, memory, schedule
from ringspun.pictures.figures.balance import BalanceFigure
from ringspun.pictures.figures.base import Figure, Kind
from ringspun.pictures.figures.compare import CompareFigure
from ringspun.pictures.figures.evaluation import LossFigure, RetrievalFigure
from ringspun.pictures.figures.layout import LayoutFigure
from ringspun.pictures.figures.mask import MaskFigure
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.run import RunFigure
from ringspun.pictures.figures.schedule import ScheduleFigure
from ringspun.pictures.figures.timeline import TimelineFigure
from ringspun.pictures.scene import Scene

OF_SCENE: Mapping[str, Callable[[Scene], Figure]] = {
    "schedule": schedule.of,
    "layout": layout.of,
    "mask": mask.of,
    "balance": balance.of,
    "memory": memory.of,
}
"""Figures that need nothing but a scene, in the order in which a page shows them."""

__all__ = [
    "OF_SCENE",
    "BalanceFigure",
    "CompareFigure",
    "Figure",
    "Kind",
    "LayoutFigure",
    "LossFigure",
    "MaskFigure",
    "MemoryFigure",
    "RetrievalFigure",
    "RunFigure",
    "ScheduleFigure",
    "TimelineFigure",
]
