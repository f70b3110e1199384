"""The programs in examples/ run as they say, in one process and by torchrun, and compute what they claim."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.testing.jobs import as_job
from ringspun.train import loop

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 90


def by_torchrun(example: str, ranks: int) -> str:
    """What the program prints, started by torchrun. It gets SIGTERM at the limit: then torchrun ends its ranks."""
    options = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--local-addr=localhost"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, f"--nproc-per-node={ranks}"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    environment["OMP_NUM_THREADS"] = "1"
    with subprocess.Popen(
        [*command, str(EXAMPLES / example)],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            out, problems = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                out, problems = process.communicate(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
    assert process.returncode == 0, problems[-3000:]
    return out


def here(example: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the program prints, run in this process."""
    torch.set_num_threads(1)
    try:
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return capsys.readouterr().out


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a job of one rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))


def differences(printed: str) -> list[float]:
    lines = printed.splitlines()
    assert len(lines) == 4, printed
    return [float(line.split()[-1]) for line in lines]


@pytest.mark.processes
def test_step_prints_the_same_losses_on_one_rank_and_on_two(alone, capsys):
    """An example whose loss depends on the number of ranks, that no longer learns, or that hangs."""
    one, two = here("step.py", capsys), by_torchrun("step.py", ranks=2)
    losses = [[float(x) for x in re.findall(r"^step \d: loss ([\d.]+)$", text, re.MULTILINE)] for text in (one, two)]
    assert len(losses[0]) == 3 and losses[0][2] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], abs=3e-5)


def test_replace_sdpa_compares_its_gradients_on_a_loopback(monkeypatch, capsys):
    """An example that no longer agrees with one process, or compares nothing."""
    monkeypatch.delenv("RANK", raising=False)
    assert all(0 <= error < 1e-12 for error in differences(here("replace_sdpa.py", capsys)))


def test_replace_sdpa_runs_as_a_job_of_one(alone, capsys):
    """The branch with a process group."""
    assert all(error < 1e-12 for error in differences(here("replace_sdpa.py", capsys)))


@pytest.mark.processes
def test_usp_llama_has_the_gradients_of_one_process(alone, capsys):
    """On rings and split heads at once, and as a job of one."""
    for printed in (here("usp_llama.py", capsys), by_torchrun("usp_llama.py", ranks=4)):
        loss, whole, error = re.findall(r"loss ([\d.]+), alone ([\d.]+), gradients differ by (\S+) of", printed)[0]
        assert loss == whole and float(error) < 1e-12


@pytest.mark.processes
def test_fsdp2_has_the_same_losses_on_any_mesh_and_resumes(alone, capsys):
    """And its resumed step is the one that it took before, to the last digit shown."""
    texts = here("fsdp2.py", capsys), by_torchrun("fsdp2.py", ranks=2)
    one, two = ([float(x) for x in re.findall(r"\d\.\d{5}", text)] for text in texts)
    assert len(one) == 5 and one[3] < one[0] - 0.1
    assert two == pytest.approx(one, abs=3e-5)
    assert one[4] == one[3] and two[4] == two[3]


def on_rank(ring_rank: int, example: str) -> str:
    """What the program prints on a process of a pool, whose group it may not end."""
    said = io.StringIO()
    with as_job(), mock.patch.object(dist, "destroy_process_group"), contextlib.redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")
    return said.getvalue()


@pytest.mark.processes
def test_hf_trainer_prints_the_same_losses_on_one_rank_and_on_two(capsys, pools):
    """Packed documents, micro-batches, an evaluation; alone it is no job at all."""
    one, two = here("hf_trainer.py", capsys), pools(2).run(on_rank, "hf_trainer.py")[0]
    losses = [[float(x) for x in re.findall(r"\d\.\d{5}", text.partition("losses")[2])] for text in (one, two)]
    assert len(losses[0]) == 4 and losses[0][3] < losses[0][0] - 0.5
    assert losses[1] == pytest.approx(losses[0], abs=3e-5)


def trained(*arguments: str | Path) -> str:
    """What `ringspun train` prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.processes
def test_a_checkpoints_context_is_extended_by_one_command(tmp_path, monkeypatch, capsys):
    """From the checkpoint that the example makes, over two processes, to one for `from_pretrained`; foreseen before."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr(sys, "argv", ["make_checkpoint.py", str(tmp_path / "runs" / "tiny")])
    here("fine_tune/make_checkpoint.py", capsys)
    (tmp_path / "examples" / "fine_tune").mkdir(parents=True)
    shutil.copy(EXAMPLES / "fine_tune" / "run.toml", tmp_path / "examples" / "fine_tune")
    (tmp_path / "docs").symlink_to(EXAMPLES.parent / "docs")
    run, output = tmp_path / "examples" / "fine_tune" / "run.toml", ("--output", tmp_path / "out")
    foreseen = trained(run, *output, "--dry-run")
    assert "dp_replicate 2" in foreseen and "begins anew" in foreseen and not (tmp_path / "out").exists()
    trained(run, *output, "--export", tmp_path / "exported")
    records = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [r["seq_len"] for r in records if "loss" in r] == [128] * 4 + [512] * 4
    before, *_, after = [r["evaluation"]["loss@128"] for r in records if "evaluation" in r]
    assert after < before - 0.3, "it learns"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    assert (model.config.max_position_embeddings, model.config.rope_parameters["rope_theta"]) == (512, 1e5)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == model.config.vocab_size


def test_a_model_of_ones_own_is_trained_by_a_recipe(tmp_path, monkeypatch):
    """Its recipe is in 60 lines, and learns."""
    monkeypatch.setattr(
        loop, "peak_memory", lambda: nullcontext(SimpleNamespace(bytes=0))
    )  # the profiler takes seconds
    run = EXAMPLES / "custom_model" / "run.toml"
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be; " * 200)
    trained(run, "--data", text, "--output", tmp_path / "out")
    losses = [
        r["loss"]
        for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()
        if "loss" in (r := json.loads(line))
    ]
    assert len(losses) == 8 and losses[-1] < losses[0] - 0.5
    foreseen = trained(run, "--data", text, "--output", tmp_path / "out", "--dry-run", "--device", "H100")
    assert "a recipe's model" in foreseen and "has all its 8 steps" in foreseen


@pytest.mark.parametrize(
    "example",
    [*sorted(path.name for path in EXAMPLES.glob("*.py")), "custom_model/recipe.py", "fine_tune/make_checkpoint.py"],
)
def test_an_example_stays_short(example):
    """A program to start from, not a framework; one that saves and resumes has more to show."""
    most = 75 if example == "fsdp2.py" else 60
    assert len((EXAMPLES / example).read_text(encoding="utf-8").splitlines()) <= most
