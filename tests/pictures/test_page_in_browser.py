"""Pages in a real browser, headless: that they load, move, show every tile at its step, and can be read by anyone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from ringspun import Contiguous, Full, Zigzag
from ringspun.core.partition import Partition, Sides
from ringspun.core.route import Ring
from ringspun.core.wire import Payload
from ringspun.pictures import Scene
from ringspun.pictures.figures import layout, run, schedule
from ringspun.pictures.figures.base import KINDS
from ringspun.pictures.page import page
from tests.pictures.browser import NAMES, Browser, executable
from tests.pictures.scenes import SCENES, a_run, all_figures

pytestmark = pytest.mark.skipif(executable() is None, reason=f"needs a browser on the PATH: {', '.join(NAMES)}")
NARROW = [375, 320]


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    program = executable()
    assert program is not None
    with Browser(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def shown(browser, tmp_path):
    """Shows figures as a page; still, unless asked otherwise."""

    def show(figures, **how):
        file = tmp_path / "page.html"
        file.write_text(page(figures), encoding="utf-8")
        browser.open(file, **({"prefers_reduced_motion": "reduce"} | how))
        return file

    return show


@pytest.mark.parametrize("width", [1280, *NARROW])
@pytest.mark.parametrize("colours", ["light", "dark"])
def test_it_loads_without_a_complaint_or_a_request_and_fits(browser, shown, width, colours):
    file = shown(all_figures(SCENES["zigzag"]), width=width, prefers_color_scheme=colours)
    browser.run("look.opened()")
    assert browser.problems == [] and browser.requests == [file.as_uri()]
    assert browser.run("document.documentElement.scrollWidth") <= browser.run("innerWidth") == width
    assert browser.run("[...document.querySelectorAll('section')].map(s => s.dataset.figure)") == [
        "schedule", "layout", "mask", "balance", "memory", "timeline", "compare", "run",
        "retrieval", "loss",
    ]  # fmt: skip
    assert browser.run("[...document.querySelectorAll('section')].every(s => s.querySelector('svg'))")


def test_a_request_or_a_fault_would_be_noticed(browser, tmp_path):
    file = tmp_path / "bad.html"
    file.write_text("<img src='x.png'><script>undefinedName()</script>")
    browser.open(file)
    browser.run("new Promise(done => setTimeout(done, 50))")
    assert browser.requests == [file.as_uri(), (tmp_path / "x.png").as_uri()]
    assert any("undefinedName" in problem for problem in browser.problems)


NAMES_OF = {Payload.KV: "KV", Payload.DKV: "dKV", Payload.QUERIES: "Q", Payload.DQ: "dQ"}


@pytest.mark.parametrize("name", SCENES)
def test_every_tile_and_message_is_shown_at_its_step(browser, shown, name):
    figure = schedule.of(SCENES[name])
    shown([figure])
    for direction in ("forward", "backward"):
        one = getattr(figure, direction)
        browser.run(f"document.querySelector('input[value={direction}]').click()")
        assert one.tiles, "the scene's tiles are few enough to be drawn one by one"
        for step in range(len(one.steps) - 1):
            state, seen = browser.run("look.state()"), browser.run("look.tiles()")
            wanted = [[t[1] == step, t[0], t[1], KINDS[t[2]].value, *t[3:7]] for t in one.tiles if t[1] <= step]
            assert sorted(seen) == sorted(wanted)
            assert state["held"] == [[r, row[step]] for r, row in zip(figure.ranks, one.sources, strict=True)]
            sends = [m for m in one.messages if m[0] == step]
            assert sorted(state["moves"]) == sorted([m[3], m[4], m[6], NAMES_OF[Payload(m[5])]] for m in sends)
            assert [int(r[3].replace(",", "")) for r in state["rows"]] == [row[step] for row in one.pairs]
            assert [r[2] for r in state["rows"]] == [row[step] for row in one.kinds]
            assert browser.run("look.step()") == step and state["where"] == f"step {step + 1} of {len(one.steps) - 1}"
            assert state["said"].startswith(f"{direction.capitalize()}, step {step + 1} of ")
            browser.press("ArrowRight")
    assert browser.problems == []


def step(browser: Browser) -> int:
    value: int = browser.run("look.step()")
    return value


def test_keys_buttons_and_the_slider_move_it(browser, shown):
    shown([schedule.of(SCENES["zigzag"])])
    for key, wanted in [
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("ArrowLeft", 1),
        ("End", 3),
        ("ArrowRight", 3),
        ("Home", 0),
    ]:
        browser.press(key)
        assert step(browser) == wanted
    browser.click("[aria-label='Next step']")
    browser.click("[aria-label='Next step']")
    assert step(browser) == 2
    browser.click("[aria-label='Step before']")
    assert step(browser) == 1
    browser.press("ArrowRight")  # the button that has the focus needs no arrows
    assert step(browser) == 2
    browser.run("document.querySelector('input[type=range]').focus()")
    browser.press("ArrowRight")  # the slider moves by itself, and once
    assert step(browser) == 3 and "step 4 of 4" in browser.run("document.querySelector('.said').textContent")
    browser.click("input[value=rank]")
    assert browser.run("document.querySelector('.tile').parentNode.classList.contains('by-rank')")


def test_all_of_it_is_reached_by_tab(browser, shown):
    shown([schedule.of(SCENES["zigzag"])])
    met = []
    for _ in range(8):
        browser.press("Tab")
        met.append(browser.run("look.focused()"))
    assert met == [
        "forward", "Play", "Step before", "f0-slider", "Next step", "kind", "forward, step 1 of 4: rank by rank",
        "All steps as a table",
    ]  # fmt: skip


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_it_plays_to_the_end_and_stops(browser, shown, motion):
    """A screen reader is not told of every step of a film, only where it stopped."""
    shown([schedule.of(SCENES["all keys of some heads"])], prefers_reduced_motion=motion)
    browser.press(" ")
    seen, live = browser.run("look.played()")
    steps = schedule.of(SCENES["all keys of some heads"]).forward.steps[-1]
    assert seen == list(range(steps))
    assert live == ["playing: off", "stopped: polite"]


def test_blocks_move_unless_less_motion_is_asked_for(browser, shown):
    figures = [schedule.of(SCENES["zigzag"])]
    shown(figures, prefers_reduced_motion="no-preference")
    browser.press("ArrowRight")
    assert browser.run("look.moves()")
    shown(figures)
    browser.press("ArrowRight")
    assert not browser.run("look.moves()") and step(browser) == 1
    assert browser.run("getComputedStyle(document.querySelector('.tile')).transitionDuration") == "0s"


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_every_text_has_contrast(browser, shown, colours):
    """AA: 4.5, also on the blocks of a ring with many colours."""
    shown(
        [schedule.of(SCENES["a window on one direction"]), *all_figures(SCENES["zigzag"])], prefers_color_scheme=colours
    )
    browser.run("look.opened()")
    found = browser.run("look.contrasts()")
    assert len(found) > 200 and [x for x in found if x[1] < 4.5] == []


def test_a_screen_reader_is_told_of_everything(browser, shown):
    shown(all_figures(SCENES["zigzag"]))
    told = browser.names()
    assert ("slider", "Step of the ring") in told and ("group", "Steps of the ring") in told
    assert {name for role, name in told if role == "button"} == {"Play", "Step before", "Next step"}
    named = ("button", "slider", "image", "img", "radio", "region", "table", "heading", "SvgRoot", "DisclosureTriangle")
    assert [(role, name) for role, name in told if role in named and not name.strip()] == []
    assert sum(role in ("image", "img", "SvgRoot") for role, _ in told) >= 8
    live = browser.run(
        "(s => [s.getAttribute('aria-live'), s.getAttribute('aria-atomic'), s.id])(document.querySelector('.said'))"
    )
    assert live == ["polite", "true", "f0-said"]
    assert (
        browser.run("document.querySelector('input[type=range]').getAttribute('aria-valuetext')")
        == "forward, step 1 of 4"
    )
    ids = browser.run("look.ids()")
    assert len(ids) == len(set(ids))
    assert set(browser.run("look.referred()")) <= set(ids)


@pytest.mark.parametrize("width", NARROW)
def test_a_finger_hits_every_control(browser, shown, width):
    """WCAG 2.2, 2.5.8: 24 x 24 at least."""
    shown([schedule.of(SCENES["zigzag"])], width=width)
    assert all(min(size) >= 24 for size in browser.run("look.controls()"))


def readings(browser: Browser) -> list[str]:
    found: list[str] = browser.run("[...document.querySelectorAll('.run h3 ~ .note')].map(note => note.textContent)")
    return found


def drawn(browser: Browser) -> list[list[str]]:
    curves = "[...document.querySelectorAll('.curve[data-curve]')].map(c => [c.dataset.curve, c.dataset.stage])"
    found: list[list[str]] = browser.run(curves)
    return found


def test_a_run_is_read_step_by_step_and_stage_by_stage(browser, shown):
    figure = a_run()
    shown([figure], width=375)
    assert drawn(browser) == [[c.name, str(c.stage)] for panel in figure.panels for c in panel.curves]
    assert browser.run("document.querySelectorAll('[data-switch]').length") == len(figure.panels)
    assert all(min(size) >= 24 for size in browser.run("look.controls()"))
    assert readings(browser)[0] == "training 1.5; loss@64 2.75 (step 6); loss@256 2 (step 6)"  # at the last step
    slider = "document.querySelector('input[type=range]')"
    browser.run(f"{slider}.focus()")
    browser.press("Home")
    assert (step(browser), readings(browser)[0]) == (0, "")
    browser.press("ArrowRight", 2)
    assert readings(browser)[0] == "training 5" and "fullest rank 3.00 MiB; emptiest rank 2.00 MiB" in readings(browser)
    assert browser.run(f"{slider}.getAttribute('aria-valuetext')") == "step 2: training 5"
    browser.click("input[value='stage 2']")
    assert browser.run(f"[{slider}.min, {slider}.max].map(Number)") == [6, 10] and step(browser) == 6
    assert {stage for _, stage in drawn(browser)} == {"1"} and not browser.run(
        "document.querySelector('[data-switch]')"
    )
    browser.resize(1280, 900)
    assert step(browser) == 6 and browser.run("document.querySelector(\"input[value='stage 2']\").checked")
    assert browser.run("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))") == ["ring-stage-2.html"]
    browser.run("look.opened()")
    cells = browser.run(
        "[...document.querySelectorAll('details tbody tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert cells[0] == ["6", "2", "", "2.75", "2"] and ["model.layers", "2"] in cells and browser.problems == []


def test_what_was_not_measured_has_no_column(browser, shown):
    heads = "[...document.querySelector('thead').querySelectorAll('th')].map(th => th.textContent)"
    shown([a_run()])
    assert browser.run(heads) == [
        "Stage",
        "Tokens",
        "Steps",
        "Mesh",
        "Loss",
        "Tokens/s",
        "MFU",
        "Waiting, mean",
        "most",
        "Peak memory",
    ]
    shown([run.of([{"step": 1, "loss": 2.0, "tokens_per_s": 1e6}])])
    assert browser.run(heads) == ["Stage", "Steps", "Loss", "Tokens/s"] and browser.problems == []


def test_another_width_keeps_the_step(browser, shown):
    shown([schedule.of(SCENES["zigzag"])])
    browser.click("input[value=backward]")
    browser.press("End")
    browser.resize(375, 800)
    assert step(browser) == 4 and browser.run("document.querySelector('input[value=backward]').checked")


def test_messages_that_are_not_listed_are_not_told_to_be_none(browser, shown, monkeypatch):
    monkeypatch.setattr(schedule, "MOST_MESSAGES", 3)
    shown([schedule.of(SCENES["zigzag"])])
    state = browser.run("look.state()")
    assert {row[4] for row in state["rows"]} == {"not listed"} and "too many to be listed" in state["said"]
    browser.press("End")
    assert "too many to be listed" in browser.run("look.state()")["said"]
    shown([schedule.of(SCENES["one rank"])])
    state = browser.run("look.state()")
    assert {row[4] for row in state["rows"]} == {"\u2013"} and "Nothing is sent." in state["said"]


def test_queries_holders_are_not_told_of_keys_that_are_dealt_otherwise(browser, shown):
    sides = Sides(Partition(12, 2, Contiguous()), Partition(12, 2, Zigzag()))
    for scene, wanted in ((Scene(sides, Full(), Ring()), 2), (Scene.of(12, 2, layout=Contiguous()), 4)):
        shown([schedule.of(scene), layout.of(scene)])
        assert browser.run("document.querySelectorAll('.walk svg:has(.tile) rect.block').length") == wanted


def test_many_tiles_are_drawn_shard_by_shard(browser, shown, monkeypatch):
    monkeypatch.setattr(schedule, "MOST_TILES", 3)
    figure = schedule.of(SCENES["zigzag"])
    assert figure.forward.tiles == ()
    shown([figure])
    browser.press("End")
    assert sorted(t[4:7:2] for t in browser.run("look.tiles()")) == [[q, k] for q in range(4) for k in range(4)]
    assert json.loads(json.dumps(figure.notes[0])) + "." in browser.run("document.querySelector('main').textContent")
