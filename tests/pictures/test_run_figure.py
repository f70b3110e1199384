"""The numbers behind the picture of a training run, from the lines of its log."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun.pictures.figures import run
from ringspun.pictures.page import page
from ringspun.pictures.terminal.curves import LINE, of_run
from tests.pictures.scenes import a_log, a_run


def curves(figure: run.RunFigure, title: str) -> dict[tuple[str, int], list[tuple[int, float]]]:
    (panel,) = [panel for panel in figure.panels if panel.title == title]
    return {(c.name, c.stage): list(zip(c.steps, c.values, strict=True)) for c in panel.curves}


def test_a_run_of_two_stages():
    figure = a_run()
    assert (figure.words, figure.notes) == ("9 of 10 steps, 2 stages, sequences of 64, 256 tokens", ())
    one, two = figure.stages
    assert (one.first_step, one.steps, one.done, one.text, one.pictures) == (1, 6, 6, "ring 1", "")
    assert (one.loss, one.tokens_per_s, one.mfu, one.waiting, one.peak_bytes) == (
        (5.5, 3.0),
        3500.0,
        0.035,
        None,
        3 << 20,
    )
    assert (two.first_step, two.steps, two.done, two.pictures) == (7, 4, 3, "ring-stage-2.html")
    assert two.waiting == (pytest.approx(0.1), pytest.approx(0.2)) and two.peak_bytes == 9 << 20
    assert [(panel.title, panel.unit) for panel in figure.panels] == [
        ("Loss", ""), ("Lines", ""), ("Speed", "tokens/s"), ("MFU", "share"), ("Waiting for messages", "share"),
        ("Peak memory of a step", "bytes"), ("Gradient norm", ""), ("Learning rate", ""),
    ]  # fmt: skip
    assert curves(figure, "Loss") == {
        ("training", 0): [(n, 6 - n / 2) for n in range(1, 7)],
        ("training", 1): [(n, 6 - n / 2) for n in range(7, 10)],
        ("loss@64", 0): [(6, 2.5)],  # before the switch
        ("loss@64", 1): [(6, 2.75)],  # after it
        ("loss@256", 1): [(6, 2.0)],
    }
    assert curves(figure, "Peak memory of a step")["fullest rank", 1] == [(8, 9 << 20)]


def test_what_a_resumed_run_tells_again():
    """An evaluation counts as it was measured last; another mesh stands behind the first."""
    begins = {"seq_len": 64, "first_step": 1, "steps": 6, "text": "ring 4"}
    log = [*a_log()[:5], {"step": 4, "stage": 0, "begins": begins}, {"step": 4, "stage": 0, "evaluation": {"x": 1.0}}]
    figure = run.of([*log, {"step": 4, "stage": 0, "evaluation": {"x": 2.0}}], steps=6)
    assert figure.stages[0].text == "ring 1; from step 5 on ring 4" and figure.words.startswith("4 of 6 steps, ")
    assert curves(figure, "X") == {("x", 0): [(4, 2.0)]}


def test_a_log_of_an_earlier_version_and_of_no_stages():
    log = [{"step": n, "loss": float(n), "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 5.0} for n in range(1, 4)]
    figure = run.of(log, steps=8)
    assert figure.words == "3 of 8 steps"
    assert [(s.first_step, s.steps, s.done, s.seq_len, s.mfu) for s in figure.stages] == [(1, 8, 3, 0, None)]
    assert "MFU" not in [panel.title for panel in figure.panels]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(1, 50), st.data())
def test_points_are_means_of_steps_of_one_stage(sizes: list[int], most: int, data: st.DataObject):
    stages = [stage for stage, size in enumerate(sizes) for _ in range(size)]
    losses = data.draw(st.lists(st.floats(-9, 9), min_size=len(stages), max_size=len(stages)))
    log = [{"step": n, "stage": s, "loss": x} for n, (s, x) in enumerate(zip(stages, losses, strict=True), 1)]
    figure = run.of(log, most=most)
    every = -(-len(log) // most)
    assert bool(figure.notes) == (every > 1)
    found = curves(figure, "Loss")
    assert list(found) == [("training", stage) for stage in range(len(sizes))]
    assert sum(map(len, found.values())) < most + len(sizes)
    first = 0
    for (_, stage), points in found.items():
        ends = [first, *(step for step, _ in points)]
        assert ends[-1] == first + sizes[stage]
        for (a, b), (_, value) in zip(pairwise(ends), points, strict=True):
            assert b - a <= every and value == pytest.approx(sum(losses[a:b]) / (b - a), abs=1e-12)
        first = ends[-1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_is_left_out(value: float):
    log = [{"step": n, "loss": float(n), "grad_norm": value} for n in (1, 2)]
    figure = run.of([*log, {"step": 2, "stage": 0, "evaluation": {"loss@8": value}}])
    assert [panel.title for panel in figure.panels] == ["Loss"] and len(figure.panels[0].curves) == 1
    page([figure])  # its JSON has no NaN


def test_a_terminal_shows_each_curve_where_its_steps_are():
    lines = [line.plain for line in of_run(a_run())]
    assert lines[0] == "stage 1, steps 1 to 6 of 64 tokens; ring 1"
    assert lines[4:6] == ["  loss 2.5 to 1.5, 8.0 k tokens/s, MFU 8.0%", "  waits 10% to 20%, peak 9.0 MiB"]
    line = lines[lines.index("  training") - 1]
    heights: list[Any] = [line[2 + step * LINE // 11] for step in range(1, 10)]
    assert heights == sorted(heights, reverse=True) and heights[0] == "█" and line.endswith(" 1.5")
    assert line[2] == " " and len(line[2 : 2 + LINE].replace(" ", "")) == 9
    assert json.dumps(lines[-1]).count("\\u2575") == 2  # a mark, and what it means
