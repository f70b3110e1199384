"""Heat maps of exact answers and lines of losses: what they hold, on a terminal, in files and on a page."""

from __future__ import annotations

import json
import math

import pytest

from ringspun.evaluation.heatmap import curves, heatmap
from ringspun.evaluation.perplexity import LossByPosition
from ringspun.evaluation.retrieval import Grid
from ringspun.pictures.page import page
from ringspun.pictures.save import save
from tests.pictures.test_page import Parsed
from tests.pictures.test_plot import held_by_png, held_by_svg
from tests.pictures.test_terminal import lines, shown

GRID = Grid("lines", (512, 16384), ((5, 5, 4), (25, 0, 3)), ((5, 5, 5), (25, 25, 25)))
LOSS = LossByPosition((0, 16, 32, 48), (15, 16, 0), (8,), ((3.0, 2.5, math.nan), (3.125, 2.75, math.nan)))
FIGURES = [heatmap(GRID, model="runs/x, step 12"), curves(LOSS, notes=("2 sequences",))]


def test_on_a_terminal():
    assert lines(shown(FIGURES[0])) == [
        "lines: 42 of 90 answers exact, runs/x, step 12",
        "",
        "           0   33   67",
        "   512  █100 █100 ▓ 80",
        "16,384  █100 ·  0 ░ 12",
        "",
        "   512  14 of 15 exact, 93.3% [70.2%, 98.8%]",
        "16,384  28 of 75 exact, 37.3% [27.3%, 48.6%]",
        "",
        "· none   ░ under 1/3   ▒ under 2/3   ▓ less than all   █ all exact",
        "tokens down, depth in the document right (percent); in brackets, 95 % intervals",
    ]
    assert lines(shown(FIGURES[1])) == [
        "perplexity 15.52 over 48 tokens",
        "(2 sequences)",
        "",
        "           tokens           whole context        at most 8 tokens",
        "             0-15                  3.0000                  3.1250",
        "            16-31                  2.5000                  2.7500",
        "            32-47                    none                    none",
        "              all                  2.7419                  2.9315",
        "",
        "loss in nats per token",
    ]


def test_many_depths_fit_into_eighty_columns():
    many = Grid("lines", (512,), ((1,) * 40,), ((2,) * 40,))
    text = shown(heatmap(many), encoding="ascii")
    assert max(map(len, text.splitlines())) <= 80 and "+" * 40 in text


@pytest.mark.parametrize("figure", FIGURES, ids=["retrieval", "loss"])
def test_files_hold_the_numbers_that_they_show(figure, tmp_path):
    told = json.loads(json.dumps(figure.as_dict()))
    for ending, held in ((".png", held_by_png), (".svg", held_by_svg)):
        save([figure], tmp_path / f"figure{ending}")
        assert held(tmp_path / f"figure{ending}") == told
    svg = (tmp_path / "figure.svg").read_text()
    assert ("[70.2%, 98.8%]" in svg) == (figure.name == "retrieval")


def test_a_page_holds_both_and_says_where_its_numbers_are_from():
    parsed = Parsed(page(FIGURES))
    assert [figure["figure"] for figure in json.loads(parsed.text("data"))["figures"]] == ["retrieval", "loss"]
    assert parsed.text("h1").strip() == "What a model finds in its context"
    assert any("Drawn by ringspun from its answers." in text for _, text in parsed.texts)
