"""Scenes that the tests of pages and traces draw."""

from __future__ import annotations

from ringspun import Causal, Contiguous, Documents, Striped, Window, Zigzag
from ringspun.core.links import Link
from ringspun.core.route import AllGather, Bidirectional, Direct
from ringspun.pictures import Scene
from ringspun.pictures.figures import Figure, balance, compare, layout, mask, memory, schedule, timeline
from ringspun.planner.ring import Place, Work

SCENES = {
    "zigzag": Scene.of(32, 4, Causal(), Zigzag()),
    "a window on one direction": Scene.of(45, 5, Window(12), Contiguous()),
    "documents, direct": Scene.of(23, 3, Causal() & Documents([4, 10, 9]), Contiguous(), Direct()),
    "stripes, in the order of ranks": Scene.of(150, 3, Causal(), Striped()),
    "both ways round": Scene.of(24, 3, Causal(), Zigzag(), Bidirectional()),
    "all keys of some heads": Scene.of(16, 2, Causal(), Contiguous(), AllGather()),
    "one rank": Scene.of(6, 1, Causal(), Contiguous()),
}
LINK = Link((1 << 10, 1 << 20), (2e-6, 3e-5), (2e-6, 3e-5))
PLACE = Place(LINK, LINK, 2)


def predicted(scene: Scene) -> timeline.TimelineFigure:
    """Its time on devices of 1 TFLOP/s, two in a node."""
    return timeline.of(scene, _work(scene), PLACE)


def _work(scene: Scene) -> Work:
    return Work(scene.wire, 1e12)


def all_figures(scene: Scene) -> list[Figure]:
    """One of each kind."""
    ways = compare.of([scene, SCENES["both ways round"]], _work(scene), PLACE)
    return [*(of.of(scene) for of in (schedule, layout, mask, balance, memory)), predicted(scene), ways]
