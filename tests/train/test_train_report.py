"""What a run shows, and what lies in its folder of it: live, at the end, and after an interruption."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ringspun.errors import DataError
from ringspun.pictures import Scene
from ringspun.pictures.figures import RunFigure
from ringspun.train.reporting import run_page
from ringspun.train.reporting.log import records
from ringspun.train.reporting.report import Report, StepRecord
from ringspun.train.reporting.run_page import figure_of, write_page

STAGE = {"seq_len": 64, "first_step": 1, "steps": 4, "text": "ring 1"}
LATER = {"seq_len": 256, "first_step": 5, "steps": 4, "text": "ring 2"}


def a_step(step: int, **more: Any) -> StepRecord:
    return StepRecord(step, 1.0 / step, 1.0, 0.1, 0.1, 10.0, 1, 0, **more)


def held_by(page: Path) -> dict[str, Any]:
    text = page.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    (figure,) = json.loads(found[1])["figures"]
    return dict(figure)


def as_json(figure: RunFigure) -> Any:
    return json.loads(json.dumps(figure.as_dict()))


@pytest.fixture
def said() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def console(said: io.StringIO) -> Console:
    return Console(file=said, width=500)


def test_stages_and_evaluations_stay_in_the_log_of_a_resumed_run(tmp_path: Path, console: Console) -> None:
    """As far as its checkpoint goes, and once, though they are told again."""

    def switch(report: Report) -> None:
        report.evaluation(4, 0, {"loss@64": 0.5})
        report.stage(1, **LATER)  # type: ignore[arg-type]
        report.evaluation(4, 1, {"loss@256": 0.75})

    with Report(tmp_path, steps=8, stages=2, console=console) as report:
        report.stage(0, **STAGE)  # type: ignore[arg-type]
        for step in range(1, 5):
            report.step(a_step(step))
        switch(report)
        whole = records(tmp_path / "log.jsonl")
        report.step(a_step(5, stage=1))
        report.evaluation(5, 1, {"loss@256": 0.25})
    assert [next(k for k in ("begins", "evaluation", "loss") if k in r) for r in whole] == [
        "begins", *["loss"] * 4, "evaluation", "begins", "evaluation"
    ]  # fmt: skip
    assert whole[6] == {"step": 4, "stage": 1, "begins": LATER}
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    with Report(tmp_path, steps=8, done=4, stages=2, console=console) as report:
        switch(report)
    assert records(tmp_path / "log.jsonl") == whole
    with Report(tmp_path, steps=8, done=2, stages=2, console=console) as report:
        report.stage(0, **STAGE | {"text": "ring 3"})  # type: ignore[arg-type]
    assert records(tmp_path / "log.jsonl") == [
        *whole[:3], {"step": 2, "stage": 0, "begins": STAGE | {"text": "ring 3"}}
    ]  # fmt: skip


def test_a_line_shows_the_stage_the_measures_and_the_memory(
    tmp_path: Path, said: io.StringIO, console: Console
) -> None:
    with Report(tmp_path, steps=1, stages=2, console=console) as report:
        report.stage(0, **STAGE)  # type: ignore[arg-type]
        report.step(a_step(1, mfu=0.421, waiting=0.0614, waiting_most=0.123, peak_bytes=(1 << 20, 3 << 19)))
        report.evaluation(1, 0, {"loss@64": 0.5, "lines@64": 0.25})
    assert said.getvalue().splitlines()[:3] == [
        "stage 1 of 2: steps 1 to 4 of 64 tokens; ring 1",
        "step 1/1: loss 1.0000, 10 tokens/s, MFU 42%, waits 6.1% (most 12%), peak 1.5 MiB a rank",
        "after step 1, as in stage 1: loss@64 0.5000, lines@64 0.2500",
    ]


def test_what_is_not_known_is_not_shown(tmp_path: Path, said: io.StringIO, console: Console) -> None:
    with Report(tmp_path, steps=1, console=console) as report:
        report.stage(0, **STAGE)  # type: ignore[arg-type]
        report.step(a_step(1))
    assert said.getvalue().splitlines()[0] == "step 1/1: loss 1.0000, 10 tokens/s"
    assert "mfu" not in records(tmp_path / "log.jsonl")[-1]


def test_a_bar_names_its_stage(tmp_path: Path) -> None:
    shown = io.StringIO()
    with Report(tmp_path, steps=9, stages=2, console=Console(file=shown, force_terminal=True, width=200)) as report:
        report.stage(1, **LATER)  # type: ignore[arg-type]
        report.step(a_step(5, stage=1, mfu=0.5))
    text = shown.getvalue()
    assert "stage 2 of 2, 256 tokens" in text and "5/9" in text and "MFU 50%" in text


def test_tensorboard_gets_stages_and_evaluations(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[tuple[str, float, int]] = []
    with Report(tmp_path, steps=2, console=console) as report:
        monkeypatch.setattr(report._board, "add_scalar", lambda *scalar: got.append(scalar))
        report.step(a_step(1, stage=1, seq_len=64, mfu=0.5))
        report.evaluation(1, 1, {"loss@64": 2.0})
    names = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "tokens_per_s": 10.0, "stage": 1, "seq_len": 64, "mfu": 0.5}
    assert sorted(got) == sorted([*((f"train/{k}", v, 1) for k, v in names.items()), ("evaluation/loss@64", 2.0, 1)])


def test_the_page_holds_the_run_its_config_and_its_rings(tmp_path: Path, console: Console) -> None:
    config = {"seq_len": 64, "model": {"layers": 2, "kv_heads": None}, "clip_norm": float("inf")}
    with Report(tmp_path, steps=8, stages=2, config=config, console=console) as report:
        for number, stage in enumerate((STAGE, LATER)):
            report.stage(number, **stage)  # type: ignore[arg-type]
            report.step(a_step(1 + 4 * number, stage=number))
            report.sequence(Scene.of(16, 1 + number))
    held = held_by(tmp_path / "report.html")
    assert held == as_json(figure_of(tmp_path)) and held["words"].startswith("5 of 8 steps, 2 stages")
    assert held["settings"] == [["seq_len", "64"], ["model.layers", "2"], ["clip_norm", "Infinity"]]
    assert [stage["pictures"] for stage in held["stages"]] == ["ring.html", "ring-stage-2.html"]
    assert all((tmp_path / stage["pictures"]).exists() for stage in held["stages"])
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "report.html").unlink()
    assert write_page(tmp_path).read_bytes() == before  # anew from what lies there


def test_the_page_is_drawn_when_a_run_is_interrupted(tmp_path: Path, console: Console) -> None:
    with pytest.raises(KeyboardInterrupt), Report(tmp_path, steps=8, console=console) as report:
        report.step(a_step(1))
        raise KeyboardInterrupt
    assert held_by(tmp_path / "report.html")["done"] == 1


def test_a_page_that_cannot_be_written_is_told_and_hides_nothing(
    tmp_path: Path, said: io.StringIO, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, data: bytes) -> None:
        raise OSError(28, os.strerror(28))

    with pytest.raises(ValueError, match="the cause"), Report(tmp_path, steps=2, console=console) as report:
        report.step(a_step(1))
        monkeypatch.setattr(Path, "write_bytes", full)
        raise ValueError("the cause")
    assert said.getvalue().count("report.html is not drawn: output must be a folder that can be written") == 1
    assert not (tmp_path / "report.html").exists() and figure_of(tmp_path).done == 1


@pytest.mark.parametrize("damage", ["nothing", "no step", "a stage that says nothing", "run.json"])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, damage: str) -> None:
    log = {
        "nothing": "",
        "no step": json.dumps({"step": 0, "stage": 0, "begins": STAGE}),
        "a stage that says nothing": '{"step": 0, "begins": {}}\n{"step": 1, "loss": 1.0}',
        "run.json": '{"step": 1, "loss": 1.0}',
    }[damage]
    (tmp_path / "log.jsonl").write_text(log)
    if damage == "run.json":  # the log tells enough
        (tmp_path / "run.json").write_text("[")
        assert figure_of(tmp_path).settings == ()
        return
    with pytest.raises(DataError, match=r"must be the output folder of a training run|must have lines as a run writes"):
        figure_of(tmp_path)


def test_ranks_that_fail_leave_a_page(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    for folder, drawn in ((tmp_path, True), (tmp_path / "none", False)):
        with pytest.raises(KeyboardInterrupt), run_page.drawn_on_failure(folder):
            raise KeyboardInterrupt
        assert (folder / "report.html").exists() == drawn
