"""Pictures on a terminal of 80 columns."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper

import pytest
from rich.console import Console

from ringspun import Causal, Contiguous, Documents, Striped, Window
from ringspun.core.route import Direct
from ringspun.pictures import Scene, terminal
from ringspun.pictures.figures import OF_SCENE, Kind, balance, compare, layout, mask, schedule, timeline
from ringspun.pictures.terminal.glyphs import KINDS
from ringspun.planner.hardware import cluster

WALK = Scene.of(16, 4)


def shown(figure, encoding: str = "utf-8", colour: str | None = None) -> str:
    raw = BytesIO()
    file = TextIOWrapper(raw, encoding=encoding)
    terminal.show(figure, Console(file=file, width=80, color_system=colour, force_terminal=colour is not None))
    file.flush()
    return raw.getvalue().decode(encoding)


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def test_a_schedule():
    assert lines(shown(schedule.of(WALK))) == [
        "causal over 16 tokens, zigzag on 4 ranks, ring",
        "",
        "forward: keys travel; beside each glyph, whose KV",
        "      step  0       1       2       3",
        "    rank 0  ◣ 0     █ 3     █ 2     █ 1",
        "    rank 1  ◣ 1     █ 0     █ 3     █ 2",
        "    rank 2  ◣ 2     █ 1     █ 0     █ 3",
        "    rank 3  ◣ 3     █ 2     █ 1     █ 0",
        "  all send  28.5K   28.5K   28.5K",
        "",
        "backward: keys travel; beside each glyph, whose KV",
        "      step  0       1       2       3       4",
        "    rank 0  ·       █ 3     █ 2     █ 1     ◣ 0",
        "    rank 1  ·       █ 0     █ 3     █ 2     ◣ 1",
        "    rank 2  ·       █ 1     █ 0     █ 3     ◣ 2",
        "    rank 3  ·       █ 2     █ 1     █ 0     ◣ 3",
        "  all send  28.5K   85.0K   85.0K   56.5K",
        "",
        "· idle   █ full   ◣ causal",
    ]


def test_a_mask_and_a_layout():
    assert lines(shown(mask.of(Scene.of(6, 2, Causal() & Documents([2, 3]))))) == [
        "causal & documents([2, 3]) over 6 tokens, zigzag on 2 ranks, ring",
        "",
        "    0       4",
        "0 │ ██··········",
        "1 │ ████········",
        "2 │ ····██······",
        "3 │ ····████····",
        "4 │ ····██████··",
        "5 │ ············",
        "",
        "█ allowed   · not",
        "queries down, keys right; 9 pairs allowed, 75.0% hidden, 2 regions",
    ]
    assert lines(shown(layout.of(Scene.of(16, 4))))[2:7] == [
        "              0       2       4       6       8       10      12      14",
        "rank 0      4 ████████················································████████",
        "rank 1      4 ········████████································████████········",
        "rank 2      4 ················████████················████████················",
        "rank 3      4 ························████████████████························",
    ]


def test_no_token_is_shown_too():
    for make in OF_SCENE.values():
        assert "0 tokens" in shown(make(Scene.of(0, 2)))


def test_balance_has_its_numbers():
    text = lines(shown(balance.of(Scene.of(16, 4, layout=Contiguous()))))
    assert "    rank 2  10       16       16       0" in text
    assert " most/mean  1.00     1.33     2.00     4.00" in text
    assert "takes 1.71 x balance" in text[2] and "       2 → 3  " in "\n".join(text)


def everything():
    scenes = [WALK, Scene.of(1000, 7, layout=Striped()), Scene.of(4096, 16, Window(100)), Scene.of(1 << 20, 64)]
    for scene in [*scenes, Scene.of(900, 3, documents=Documents([500, 1, 399]), route=Direct())]:
        for make in OF_SCENE.values():
            yield make(scene)
        yield layout.of(scene, most_ranks=terminal.ROWS)
        yield mask.of(scene, terminal.ROWS)
        if scene.ring_size < 64:
            yield timeline.of(scene, *timeline.on(scene, cluster("H100", scene.ring_size)))
        yield compare.of([scene], *timeline.on(scene, cluster("H100", scene.ring_size)))


def test_nothing_is_wider_than_80_columns_and_colour_adds_nothing():
    """No line is wrapped either: a wrapped table cannot be read."""
    for figure in everything():
        plain = shown(figure)
        assert max(map(len, plain.splitlines())) <= 80
        for part in terminal.body(figure):
            assert len(part.plain.rstrip()) <= 80, part.plain
        assert shown(figure, encoding="ascii").isascii()


def test_kinds_differ_without_colour():
    assert len({KINDS[kind] for kind in Kind}) == len(Kind)
    coloured = shown(schedule.of(WALK), colour="truecolor")
    assert "\x1b[38;2;" in coloured and "\x1b[" not in shown(schedule.of(WALK))


def test_what_is_no_figure_is_refused():
    with pytest.raises(TypeError, match="figure must be one"):
        terminal.body("x")
