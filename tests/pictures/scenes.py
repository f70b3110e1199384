"""Scenes that the tests of pages and traces draw."""

from __future__ import annotations

from typing import Any

from ringspun import Causal, Contiguous, Documents, Striped, Window, Zigzag
from ringspun.core.links import Link
from ringspun.core.route import AllGather, Bidirectional, Direct
from ringspun.pictures import Scene
from ringspun.pictures.figures import (
    Figure,
    LossFigure,
    RetrievalFigure,
    RunFigure,
    balance,
    compare,
    layout,
    mask,
    memory,
    run,
    schedule,
    timeline,
)
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


def a_log() -> list[dict[str, Any]]:
    """Of a run of 10 steps, 6 of 64 tokens on one rank and then 4 of 256 on two, of which 3 are done."""
    lines: list[dict[str, Any]] = []
    for stage, (first, steps, seq_len, text) in enumerate([(1, 6, 64, "ring 1"), (7, 4, 256, "ring 2")]):
        begins = {"seq_len": seq_len, "first_step": first, "steps": steps, "text": text}
        lines.append({"step": first - 1, "stage": stage, "begins": begins})
        if stage:
            lines.append({"step": 6, "stage": 0, "evaluation": {"loss@64": 2.5, "lines@64": 0.5}})
            lines.append({"step": 6, "stage": 1, "evaluation": {"loss@64": 2.75, "lines@64": 0.25, "loss@256": 2.0}})
        for step in range(first, min(first + steps, 10)):
            told = {"step": step, "loss": 6 - step / 2, "grad_norm": 1.0, "lr": 3e-4 / step, "seconds": 0.5}
            told |= {"tokens_per_s": 1000.0 * step, "documents": 3, "documents_cut": 1, "stage": stage}
            told |= {"seq_len": seq_len, "mfu": step / 100} | ({"waiting": 0.1, "waiting_most": 0.2} if stage else {})
            lines.append(told | ({"peak_bytes": [step << 20, (step + 1) << 20]} if step in (2, 8) else {}))
    return lines


def a_run() -> RunFigure:
    """The picture of that."""
    return run.of(a_log(), settings=[("model.layers", "2"), ("output", '"runs/a"')], pictures={1: "ring-stage-2.html"})


def predicted(scene: Scene) -> timeline.TimelineFigure:
    """Its time on devices of 1 TFLOP/s, two in a node."""
    return timeline.of(scene, _work(scene), PLACE)


def _work(scene: Scene) -> Work:
    return Work(scene.wire, 1e12)


def an_evaluation() -> list[Figure]:
    """Answers to questions at two lengths; losses with whole and truncated contexts, one bucket without a token."""
    return [
        RetrievalFigure("lines: 42 of 90 answers exact", ("tokens are bytes",), "lines", (512, 16384),
                        ((5, 5, 4), (25, 0, 3)), ((5, 5, 5), (25, 25, 25)), ((0.702, 0.988), (0.273, 0.486))),
        LossFigure("perplexity 15.52 over 48 tokens", (), (0, 16, 32, 48), (8,),
                   ((3.0, 2.5, None), (3.125, 2.75, None)), (2.742, 2.931)),
    ]  # fmt: skip


def all_figures(scene: Scene) -> list[Figure]:
    """One of each kind."""
    ways = compare.of([scene, SCENES["both ways round"]], _work(scene), PLACE)
    return [
        *(of.of(scene) for of in (schedule, layout, mask, balance, memory)),
        predicted(scene),
        ways,
        a_run(),
        *an_evaluation(),
    ]
