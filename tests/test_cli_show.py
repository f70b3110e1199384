"""`ringspun show`: pictures from strings, as text, JSON and files; what cannot be is told in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ringspun import Causal, Documents, Window
from ringspun.cli.show import app
from ringspun.pictures.page import page
from ringspun.train.reporting import run_page
from tests.pictures.scenes import a_log
from tests.pictures.test_measured import log_of, rings


def told(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def asked(*arguments: str):
    return json.loads(told(*arguments, "--json"))


def test_pictures_are_shown_without_a_framework(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.5}')
    program = (
        "import sys\n"
        "from ringspun.cli import main\n"
        f"for words in (['all', '--seq-len', '64'], ['run', {str(tmp_path)!r}]):\n"
        "    sys.argv = ['ringspun', 'show', *words]\n"
        "    try: main()\n"
        "    except SystemExit: pass\n"
        "print('loaded:', *(m for m in ('torch', 'jax', 'matplotlib') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    out = done.stdout
    assert out.splitlines()[-1].split() == ["loaded:"]
    for words in ("queries down", "beside each rank its tokens", "forward: keys travel", "bytes of a link",
                  "one rank with the whole sequence", "predicted: forward", "1 of 1 steps"):  # fmt: skip
        assert words in out
    assert max(map(len, out.replace(str(tmp_path), "run").splitlines())) <= 80


def test_a_run_is_drawn_anew(tmp_path):
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in a_log()))
    assert asked("run", str(tmp_path))["done"] == 9 and not (tmp_path / "report.html").exists()
    out = told("run", str(tmp_path))
    assert "stage 2, steps 7 to 10 of 256 tokens; ring 2" in out and f"wrote {tmp_path / 'report.html'}" in out
    assert (tmp_path / "report.html").read_text() == page([run_page.figure_of(tmp_path)])
    told("run", str(tmp_path), "--save", str(tmp_path / "run.html"))
    assert (tmp_path / "run.html").read_bytes() == (tmp_path / "report.html").read_bytes()
    assert "run must be the output folder of a training run" in told("run", str(tmp_path / "none"), code=2)
    assert "run must come with one folder" in told("run", code=2)


def test_strings_say_what_is_drawn():
    found = asked("schedule", "--mask", "causal & window(5)", "--layout", "contiguous", "--route", "direct",
                  "--ranks", "2", "--seq-len", "20", "--backward", "queries")  # fmt: skip
    assert found["words"] == "causal & window(5) over 20 tokens, contiguous on 2 ranks, direct"
    assert found["backward"]["travels"] == "queries"
    assert sum(map(sum, found["forward"]["pairs"])) == (Causal() & Window(5)).as_array(20).sum()
    packed = asked("mask", "--documents", "7,0,5", "--seq-len", "14", "--mask", "full")
    assert packed["pairs"] == 49 + 25 == Documents([7, 0, 5]).as_array(14).sum()
    assert asked("mask", "--documents", "7,5")["pairs"] == (Causal() & Documents([7, 5])).as_array(12).sum()
    assert asked("memory", "--seq-len", "64K", "--dtype", "float32")["held"][0][0] == (
        2 * asked("memory", "--seq-len", "64K")["held"][0][0]
    )
    assert [f["figure"] for f in asked("mask,layout")["figures"]] == ["mask", "layout"]


def test_ways_are_compared_for_documents_of_a_file(tmp_path):
    data = tmp_path / "texts.jsonl"
    data.write_text('{"text": "abc"}\n{"input_ids": [1, 2, 3, 4, 5]}\n"hello"\n')
    assert asked("mask", "--data", str(data))["words"].startswith("causal & documents([4, 5, 6]) over 15 tokens")
    assert asked("mask", "--data", str(data), "--seq-len", "10")["words"].startswith("causal & documents([4, 5, 1])")
    found = asked("compare", "contiguous", "zigzag/direct", "--ranks", "8", "--documents", "9000,1000,30000")
    assert [(w["layout"], w["route"]) for w in found["ways"]] == [("contiguous", "ring"), ("zigzag", "direct")]
    text = told("compare", "contiguous", "zigzag", "--ranks", "8", "--seq-len", "64K")
    assert text.index("zigzag, ring  ◀ quickest") > text.index("contiguous, ring\n") and "a rank sends" in text


def test_a_measured_run_beside_the_predicted(tmp_path):
    rings(tmp_path, [log_of(0), log_of(1)])
    logs = [x for i in (0, 1) for x in ("--log", str(tmp_path / f"{i}.json"))]
    found = asked("timeline", "--ranks", "2", *logs)
    assert [run["name"] for run in found["runs"]] == ["predicted", "measured"]
    assert [f["figure"] for f in asked("layout,timeline", "--ranks", "2", *logs)["figures"]] == ["layout", "timeline"]
    text = told("timeline", "--ranks", "2", *logs)
    assert "measured: forward 6 ms + backward 6 ms" in text and "predicted: forward" in text
    assert "log must be of a ring of 4 ranks" in told("timeline", *logs, code=2)


@pytest.mark.parametrize("ending", [".svg", ".png", ".html", ".json", ".trace.json"])
def test_files(tmp_path, ending):
    path = tmp_path / f"x{ending}"
    assert told("timeline", "--ranks", "2", "--save", str(path)) == f"wrote {path}\n"
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "picture must be one of mask, layout"),
        (["mask", "--mask", "causl"], "did you mean 'causal'"),
        (["mask", "--layout", "zigzg"], "did you mean 'zigzag'"),
        (["compare", "zigzag", "dirct"], "did you mean 'direct'"),
        (
            ["compare", "zigzag/striped"],
            "one layout and one route at most; got 'zigzag/striped', which has two layouts",
        ),
        (["compare", "direct/zigzag/ring"], "which has two routes"),
        (["compare", "zigzg/ring"], "did you mean 'zigzag'"),
        (["schedule", "--route", "double_ring(3)"], "inner must divide the ring's 4 ranks"),
        (["schedule", "--heads", "8", "--kv-heads", "3"], "kv-heads must divide heads"),
        (["mask", "--documents", "3,5", "--seq-len", "6"], "documents must fit the sequence"),
        (["mask", "--documents", "3", "--data", "x"], "must not both be given"),
        (["mask", "--data", "no-such-file"], "data must exist"),
        (["mask", "zigzag"], "mask must be asked for alone"),
        (["mask", "--call", "3"], "must come with timeline"),
        (["timeline", "--call", "3"], "call must come with log"),
        (["timeline", "--log", str(Path(__file__).parent)], "log must be a step log or a folder of ringspun-*.json"),
        (["timeline", "--device", "H1000"], "device must be"),
        (["mask", "--save", "x.gif"], "save must be a file that ends in"),
        (["mask", "--ranks", "0"], "ranks must be at least 1"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(arguments, words):
    output = told(*arguments, code=2)
    assert words in output and output.startswith("ringspun show: ") and "Traceback" not in output
    assert len(output.strip().splitlines()) == 1
