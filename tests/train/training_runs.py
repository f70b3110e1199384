"""Tiny runs for the tests of training, and the faults that some plant. Started processes import this file."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torch import distributed as dist
from torch import nn

from ringspun.errors import PeerError
from ringspun.train.config import TrainConfig
from ringspun.train.data.text import Corpus, find_text
from ringspun.train.launch import Job, launch, work
from ringspun.train.loop import Hooks

SEQ_LEN = 64
PEAK_FLOPS = 1e9  # of a rank; not measured


def tiny_toml(*, steps: int) -> str:
    """A config file of a run of seconds, for the command."""
    return f"""
seq_len = 32
steps = {steps}
dtype = "float32"
[model]
layers = 1
hidden_size = 16
intermediate_size = 16
heads = 2
"""


def tiny_config(output: Path, **changes: Any) -> TrainConfig:
    """Two layers of width 32 over 64 tokens, in float32."""
    values: dict[str, Any] = {
        "model": {"layers": 2, "hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2},
        "seq_len": SEQ_LEN,
        "ranks": 1,
        "dtype": "float32",
        "steps": 6,
        "lr": 1e-2,
        "warmup_steps": 2,
        "seed": 3,
        "checkpoint_every": 2,
        "peak_flops": PEAK_FLOPS,
        "output": str(output),
    }
    return TrainConfig.model_validate(values | changes)


def two_stages(output: Path, *, ranks: int, steps: int = 3) -> TrainConfig:
    """3 steps of `tiny_config`, then more at another length."""
    top = tiny_config(output, ranks=ranks).model_dump()
    for name in ("seq_len", "steps", "warmup_steps", "final_lr", "decay", "decay_steps"):
        top.pop(name)
    long = {"seq_len": 80, "steps": steps, "rope": 1e5}
    return TrainConfig.model_validate(top | {"stages": [{"seq_len": SEQ_LEN, "steps": 3, "warmup_steps": 2}, long]})


def write_text(folder: Path, *, lengths: tuple[int, ...] = (30, 7, 150, 1, 44, 90)) -> Corpus:
    """Small files of seeded letters, and their corpus."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number, length in enumerate(lengths):
        letters = random.choice(list("abcdefgh "), size=length)
        (folder / f"doc{number}.txt").write_text("".join(letters))
    return find_text(folder)


def logged_steps(output: Path) -> list[dict[str, Any]]:
    """The lines of steps in a run's log."""
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [record for record in records if "loss" in record]


def losses(output: Path) -> list[float]:
    """The losses that a run logged, by step."""
    records = logged_steps(output)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


def same_bits(output: Path, other: Path) -> bool:
    """Whether two runs logged the same losses and norms, and end in the same checkpoint: every bit of weights,
    optimizer and generator, and the same place in the data.
    """

    def end(folder: Path) -> tuple[Any, ...]:
        last = max((folder / "checkpoints").iterdir())
        state = json.loads((last / "state.json").read_text())
        tensors = {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}
        assert len(tensors) == 3
        records = logged_steps(folder)
        logged = [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in records]
        return last.name, logged, tensors, state["position"], state["data"]

    return end(output) == end(other)


def world_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def die_in_step_4(step: int, model: nn.Module) -> None:
    """The process is killed in the middle of a step: gradients are there, nothing is summed or saved."""
    if step == 4 and world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_checkpoint_4(step: int) -> None:
    """The process is killed when the checkpoint's files are written but not yet in place."""
    if step == 4:
        os.kill(os.getpid(), signal.SIGKILL)


def no_space_in_checkpoint_4(step: int) -> None:
    """The disk is full when the checkpoint's files are written but not yet in place."""
    if step == 4:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def poison_rank_2_in_step_3(step: int, model: nn.Module) -> None:
    """A NaN in the gradient of rank 2 alone."""
    if step == 3 and world_rank() == 2:
        gradient = next(model.parameters()).grad
        assert gradient is not None
        gradient.view(-1)[5] = torch.nan


def lock_in_step_1(step: int, model: nn.Module) -> None:
    """The lock that a rank holds tells whether it lives."""
    if step == 1:
        LOCKS.append(FileLock(Path(os.environ["LOCKS"]) / f"rank{world_rank()}.lock"))
        LOCKS[0].acquire()


LOCKS: list[Any] = []


def kill_launcher_in_checkpoint_4(step: int) -> None:
    """The launching process is killed while rank 0 saves (and never ends that by itself), and rank 1 waits for it."""
    if step == 4:
        os.kill(int(os.environ["LAUNCHER"]), signal.SIGKILL)
        time.sleep(300)


def be_launched_and_killed(folder: Path) -> None:
    """A launching process that is killed."""
    os.environ |= {"LAUNCHER": str(os.getpid()), "LOCKS": str(folder)}
    job = Job(tiny_config(folder / "run", ranks=2), write_text(folder / "text"))
    launch(replace(job, hooks=Hooks(lock_in_step_1, kill_launcher_in_checkpoint_4)))


def complain_and_cause() -> None:
    """Rank 0 complains at once that another rank is gone; rank 1, the cause, tells a little later."""
    if os.environ["RANK"] == "0":
        raise PeerError("ring rank 1 is gone")
    time.sleep(0.5)
    raise ValueError("the cause")


def launch_torn(job: Job) -> str:
    """As torchrun does: every rank launches the job, and joins."""
    try:
        launch(job)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "done"


def outcome(job: Job) -> str:
    """A rank's own account of how its job ended; a failure would make the launcher end the others."""
    try:
        work(job)
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return "done"
