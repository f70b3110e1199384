"""`ringspun plan`: answers in words and in JSON, and what cannot be is told in one line."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from ringspun.cli.options import tokens
from ringspun.cli.plan import app
from ringspun.core.links import Link, Links
from ringspun.train.config import load_config

EIGHT = ("--model", "llama-3-8b", "--device", "H100", "--devices", "8")


def told(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def asked(*arguments: str):
    return json.loads(told(*arguments, "--json"))


def test_help_is_quick_and_loads_no_framework():
    """In seconds of the processor: other work on the machine is no fault."""
    program = (
        "import sys; sys.argv = ['ringspun', 'plan', '--help']\n"
        "from ringspun.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('loaded:', *(m for m in ('torch', 'jax', 'transformers', 'ringspun.planner') if m in sys.modules))"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "accuracy" in done.stdout and done.stdout.splitlines()[-1].split() == ["loaded:"]
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_a_length_is_planned_and_explained():
    answer = asked("train", *EIGHT, "--seq-len", "128K", "--price", "2.5", "--keep", "2")
    best, second = answer["plans"]
    assert answer["verdict"]["ring"] and best["split"]["ring"] > 1
    assert best["seq_len"] == 131072 and best["step_s"] <= second["step_s"]
    assert best["memory_bytes"]["total"] == pytest.approx(sum(best["memory_bytes"]["items"].values()))
    assert best["longest"]["low"] < best["longest"]["tokens"] < best["longest"]["high"]
    per_second = 2.5 * 8 / 3600
    assert best["cost_per_billion_tokens"] == pytest.approx(1e9 / best["tokens_per_s"] * per_second)
    words = told("train", *EIGHT, "--seq-len", "128K", "--price", "2.5")
    assert "llama-3-8b (8.0B) on 8 x H100, sequences of 131,072 tokens" in words and "\nRing." in words
    assert "a hop inside a node takes" in words and "█" in words and "a billion tokens cost" in words
    assert "GiB are left for attention" in words


def test_the_longest_length_is_asked_for_by_naming_none():
    answer = asked("train", *EIGHT, "--keep", "1")
    assert answer["plans"][0]["seq_len"] == int(answer["plans"][0]["longest"]["tokens"])


@pytest.mark.parametrize(
    ("options", "instead"),
    [
        (["--devices", "8", "--node", "1", "--seq-len", "8K", "--batch", "1"], "dp 8"),  # 8K on 8 ranks over InfiniBand
        (["--devices", "8", "--node", "1", "--seq-len", "8K"], "dp 8"),
        (["--devices", "64", "--seq-len", "8K", "--batch", "1"], "dp"),  # one sequence, short slices
    ],
)
def test_when_not_to_ring(options, instead):
    """Short slices, a slow link, one sequence: a sequence for each device is many times quicker."""
    answer = asked("train", "--model", "llama-3-8b", "--device", "H100", *options)
    assert not answer["verdict"]["ring"] and instead in answer["verdict"]["instead"]
    assert "\nDo not ring: " in told("train", "--model", "llama-3-8b", "--device", "H100", *options)


def test_decode_does_not_ring():
    options = ("--model", "llama-3-405b", "--device", "H100", "--devices", "4", "--tp", "8", "--new", "128K")
    answer = asked("infer", *options)
    assert answer["decode_s"]["best"] != "a ring"
    assert answer["decode_s"]["ring"] > 5 * answer["decode_s"]["merge"]
    assert answer["travels"] == "kv" and answer["hidden"]
    words = told("infer", *options)
    assert "decode: do not ring" in words and "they do not fit" in words
    assert asked("infer", *options[:-1], "1K", "--cached", "127K")["travels"] == "q"


def test_the_best_is_exported_as_a_config_that_train_takes(tmp_path):
    path = tmp_path / "run.toml"
    told("train", *EIGHT, "--seq-len", "128K", "--ring-only", "--batch", "1", "--export", str(path))
    config = load_config(path)
    assert (config.seq_len, config.ranks, config.layout) == (131072, 8, "zigzag")
    assert (config.model.layers, config.model.heads, config.model.kv_heads) == (32, 32, 8)
    found = told("train", "--model", "gpt2", *EIGHT[2:], "--seq-len", "8K", "--export", str(path), code=2)
    assert "model must be a Llama for `ringspun train`" in found and "tokens" in found  # and the plan is told


@pytest.mark.parametrize("options", [("--seq-len", "128K"), ("--seq-len", "8K"), ("--seq-len", "300K"), ()])
def test_an_export_is_the_whole_plan(tmp_path, options):
    """Devices, sequences of a step, what is kept and who holds the weights: as was planned."""
    path = tmp_path / "run.toml"
    answer = asked("train", *EIGHT, *options, "--max-tp", "1", "--export", str(path))
    plan, config = answer["plans"][0], load_config(path)
    split = plan["split"]
    assert (config.processes, config.ranks, config.ulysses) == (8, split["ring"] * split["ulysses"], split["ulysses"])
    assert (config.batch_size, config.shard) == (plan["passes"] * split["dp"], "fsdp")
    assert (config.seq_len, config.checkpointing, config.layout) == tuple(
        plan[key] for key in ("seq_len", "checkpointing", "layout")
    )


def test_an_export_that_has_no_place_is_told(tmp_path):
    line = told("train", *EIGHT, "--seq-len", "128K", "--ring-only", "--batch", "1", "--export", str(tmp_path), code=1)
    assert "ringspun plan: export must be a place for a file; " in line


def test_a_reader_that_leaves_is_no_broken_export():
    """As `ringspun plan list --json | head -1`."""
    program = "import sys; from ringspun.cli import main; sys.argv[0] = 'ringspun'; main()"
    command = [sys.executable, "-c", program, "plan", "list", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert "export" not in running.stderr.read()


def test_a_measured_profile_replaces_links(tmp_path):
    """A link a thousand times slower than NVLink."""
    slow = Link((1024, 1 << 20), (1e-4, 1e-2), (1e-4, 1e-2))
    path = tmp_path / "links.json"
    Links(8, slow).save(path)
    options = ("train", *EIGHT, "--seq-len", "128K", "--batch", "1", "--ring-only")
    fast, measured = asked(*options), asked(*options, "--links", str(path))
    assert measured["plans"][0]["step_s"] > 3 * fast["plans"][0]["step_s"]
    assert "links must not be given with near or far" in told(*options, "--links", str(path), "--far", "x", code=2)


def test_unequal_ranks_are_given_shares():
    options = ("shares", "--model", "llama-3-8b", "--device", "H100", "--seq-len", "64K", "--speeds", "1,1,0.5,0.5")
    best, *others = asked(*options, "--mask", "full", "--keep", "50")["ways"]
    assert best["tokens"][0] == pytest.approx(2 * best["tokens"][3], rel=0.01) and sum(best["tokens"]) == 65536
    assert max(other["seconds"] for other in others) > 1.4 * best["seconds"]
    assert "ms a layer" in told(*options)


def test_slices_accuracy_and_lists():
    rows = asked("links", "--model", "llama-7b", "--device", "a100")["rows"]
    assert [(r["link"], r["peak"]) for r in rows] == [("nvlink3", 1040), ("ib-hdr", 12480)]
    assert all(r["reached"] > r["peak"] for r in rows)
    assert "nvlink3" in told("links", "--model", "llama-7b", "--device", "a100")
    known = asked("list")
    assert set(known) == {"devices", "links", "models"} and known["devices"]["H100"]["source"]
    assert "llama-3-405b" in told("list")
    words = told("accuracy")
    assert re.search(r"itemised memory, one recipe +│ 23 +│ 36 ", words)
    assert "a scaling law, fitted" in words and "llama-3-70b" in words


def test_brackets_of_a_name_are_no_markup(tmp_path):
    known = asked("list")["models"]["gpt2"]
    sizes = {"n_embd": known["hidden"], "n_head": 12, "n_layer": 12, "vocab_size": 50257, "model_type": "gpt2"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, "_name_or_path": "[/mine] [bold]"}))
    words = told("train", "--model", str(path), "--device", "H100", "--devices", "2", "--seq-len", "8K")
    assert words.startswith("[/mine] [bold] (0.1B) on 2 x H100")


def test_a_terminal_without_blocks_gets_bars(monkeypatch):
    """As Windows' code page 1252, which pipes use there."""
    program = "import sys; from ringspun.cli import main; sys.argv[0] = 'ringspun'; main()"
    command = [sys.executable, "-c", program, "plan", "train", *EIGHT, "--seq-len", "128K", "--batch", "1"]
    monkeypatch.setenv("PYTHONIOENCODING", "cp1252")
    done = subprocess.run(command, capture_output=True, text=True, encoding="cp1252", timeout=60, check=True)
    assert "###" in done.stdout and "its memory at the peak" in done.stdout


@pytest.mark.parametrize(
    ("text", "value"), [("131072", 131072), ("1,048,576", 1 << 20), ("1_000", 1000), ("1.5K", 1536), (" 2m ", 2 << 20)]
)
def test_tokens_are_read_as_people_write_them(text, value):
    assert tokens(text) == value


@pytest.mark.parametrize("text", ["1kk", "1MK", "1,5M", "1,50", "K", "", "inf", "nan", "1e15", "0.3", "-1"])
def test_what_may_be_another_number_is_none(text):
    with pytest.raises(ValueError, match="tokens must be a whole number from 1 on"):
        tokens(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["train", "--model", "lama-3-8b", *EIGHT[2:]],
            "model must be a known one; got 'lama-3-8b'. The nearest: llama-3",
        ),
        (
            ["train", *EIGHT[:3], "H1000", "--devices", "8"],
            "device must be a known one; got 'H1000'. The nearest: H100",
        ),
        (["train", *EIGHT[:5], "0"], "devices must be at least 1 and at most 1,048,576; got 0."),
        (
            ["train", *EIGHT, "--seq-len", "128X"],
            "tokens must be a whole number from 1 on (131072, 128K, 1M); got '128X'",
        ),
        (["train", *EIGHT, "--seq-len", "-1"], "tokens must be a whole number"),
        (["train", *EIGHT, "--seq-len", "0.3"], "tokens must be a whole number"),
        (["train", *EIGHT, "--mask", "causl"], "mask"),
        (["train", *EIGHT, "--keep", "0"], "keep must be at least 1; got 0."),
        (["train", *EIGHT, "--links", "/nowhere"], "links must be a file that `ringspun bench links` wrote"),
        (["train", *EIGHT, "--device-file", "/nowhere"], "device-file must be a readable file; got /nowhere"),
        (["train", *EIGHT, "--seq-len", "100M", "--batch", "1"], "seq_len must fit 8 x H100; got 104,857,600 tokens"),
        (
            ["shares", *EIGHT[:4], "--seq-len", "8K", "--speeds", "1,x"],
            "speeds must be a comma list of positive numbers",
        ),
        (["shares", *EIGHT[:4], "--seq-len", "8K", "--speeds", "1"], "speeds must be at least 2; got 1."),
        (["train", *EIGHT, "--seq-len", "8K", "--price", "1e308", "--json"], "figures must be finite for --json"),
        (["shares", *EIGHT[:4], "--seq-len", "1e12", "--speeds", "1,2"], "seq-len must be at most 268435456; got 1000"),
        (["shares", *EIGHT[:4], "--seq-len", "2", "--speeds", "1,2,3"], "seq-len must be at least 3; got 2."),
        (["infer", *EIGHT, "--new", "8K", "--tp", "3"], "tp must divide heads; got 3 and llama-3-8b's 32 heads"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(options, words):
    line = told(*options, code=2)
    assert line.startswith("ringspun plan: ") and words in line and line.count("\n") == 1
