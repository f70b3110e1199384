"""The pictures of README and docs: ``python -m ringspun.pictures.docs docs/pictures`` (`make pictures`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ringspun.core.layout import Contiguous, Striped
from ringspun.core.mask import Causal, Documents
from ringspun.core.route import Direct
from ringspun.pictures.figures import Figure, balance, compare, layout, mask, memory, schedule, timeline
from ringspun.pictures.save import save
from ringspun.pictures.scene import Scene
from ringspun.planner.hardware import cluster

PACKED = Documents([5, 7, 4])
LONG = 1 << 17


def _compared() -> Figure:
    scenes = [Scene.of(LONG, 8, layout=Contiguous()), Scene.of(LONG, 8), Scene.of(LONG, 8, layout=Striped())]
    scenes.append(Scene.of(LONG, 8, route=Direct()))
    return compare.of(scenes, *timeline.on(scenes[0], cluster("H100", 8)))


def _time() -> Figure:
    scene = Scene.of(LONG, 8, layout=Contiguous())
    return timeline.of(scene, *timeline.on(scene, cluster("H100", 8)))


PICTURES: Mapping[str, Callable[[], Figure]] = {
    "mask": lambda: mask.of(Scene.of(16, 4, Causal() & PACKED)),
    "layout": lambda: layout.of(Scene.of(64, 4)),
    "schedule": lambda: schedule.of(Scene.of(16, 4)),
    "balance": lambda: balance.of(Scene.of(LONG, 8, layout=Contiguous())),
    "memory": lambda: memory.of(Scene.of(LONG, 8)),
    "timeline": _time,
    "compare": _compared,
}
"""By the name of the file."""


def main(folder: Path) -> None:
    """Write all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, make in PICTURES.items():
        save([make()], folder / f"{name}.svg")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
