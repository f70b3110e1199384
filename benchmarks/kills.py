"""Whether a run that is killed at a random step of each stage, and started again, ends with the same bits.

python benchmarks/kills.py --out benchmarks/results/$(date +%F)-kills.md      # minutes on two cores

Three stages on two processes: data ranks, a ring, and FSDP2 on a ring. Each trial kills the whole job (SIGKILL) once in
every stage, as soon as its log has the step that was drawn, and starts the same command again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ringspun.train.reporting.log import records

STEPS = 10
CONFIG = """
dtype = "float32"
batch_size = 2
checkpoint_every = 3
peak_flops = 1e9
[model]
layers = 2
hidden_size = 16
intermediate_size = 32
heads = 2
[[stages]]
seq_len = 33
steps = 10
mesh = {dp_replicate = 2}
lr = 0.01
[[stages]]
seq_len = 65
steps = 10
rope = 1e5
mesh = {ranks = 2}
lr = 0.005
decay = "linear"
[[stages]]
seq_len = 129
steps = 10
rope = 1e6
mesh = {ranks = 2}
shard = "fsdp"
lr = 0.002
"""
STAGES = 3
COMMAND = "from ringspun.cli import main; main()"


def start(config: Path, output: Path) -> subprocess.Popen[bytes]:
    words = ["train", str(config), "--data", json.__path__[0], "--output", str(output)]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def last_step(output: Path) -> int:
    """The last step that the run's log has."""
    return max((record["step"] for record in records(output / "log.jsonl", 10**9) if "loss" in record), default=0)


def killed_at(config: Path, output: Path, step: int) -> int:
    """Starts the run, kills it when its log has `step`; the last step that the log then has."""
    job = start(config, output)
    while last_step(output) < step:
        if job.poll() is not None:
            raise SystemExit(f"the run ended by itself, with {job.returncode}, before step {step}")
        time.sleep(0.005)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    time.sleep(0.5)  # its ranks end with it
    return last_step(output)


def digest(output: Path) -> str:
    """Of the last checkpoint's weights and optimizer; not of torch's generator, from which nothing here draws."""
    last = max((output / "checkpoints").iterdir(), key=lambda path: path.name)
    files = sorted(path for path in last.rglob("*.safetensors") if not path.name.startswith("rng"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    lines = ["# Runs killed once in every stage", "", f"    python benchmarks/kills.py --trials {asked.trials}", ""]
    lines += ["30 steps in 3 stages on two processes (two copies; a ring of 2; FSDP2 on a ring of 2), a"]
    lines += ["checkpoint every 3 steps; SIGKILL to the whole job.", ""]
    lines += ["| trial | killed behind steps | weights and optimizer, SHA-256 |", "|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        config.write_text(CONFIG)
        if start(config, Path(folder) / "whole").wait():
            raise SystemExit("the uninterrupted run failed")
        expected, same = digest(Path(folder) / "whole"), True
        lines.append(f"| none | | {expected} |")
        draw = random.Random(asked.seed)
        for trial in range(asked.trials):
            output = Path(folder) / f"trial{trial}"
            wanted = [stage * STEPS + draw.randint(1, STEPS - 1) for stage in range(STAGES)]
            killed = [killed_at(config, output, step) for step in wanted]
            if start(config, output).wait():
                raise SystemExit(f"trial {trial} did not go on")
            found = digest(output)
            same &= found == expected
            lines.append(f"| {trial + 1} | {', '.join(map(str, killed))} | {found} |")
    lines += ["", "All are the same bits." if same else "**They differ.**", ""]
    asked.out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
