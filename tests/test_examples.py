"""The programs in examples/ run as they say, in one process and by torchrun, and compute what they claim."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ringspun.testing.jobs import as_job

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


@pytest.mark.parametrize("example", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_stays_short(example):
    """A program to start from, not a framework; one that saves and resumes has more to show."""
    most = 75 if example == "fsdp2.py" else 60
    assert len((EXAMPLES / example).read_text(encoding="utf-8").splitlines()) <= most
