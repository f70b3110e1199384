"""Whether a training run has the same losses, whatever mesh it runs on: rings of 1, 2 and 4, DDP, FSDP2, HSDP.

python benchmarks/loss_curves.py --out benchmarks/results/$(date +%F)-loss_curves.md      # 8 runs of 200 steps: minutes

The same sequences, weights and steps; float32. Each run's loss at each step is compared with that of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from ringspun.train.config import TrainConfig
from ringspun.train.data.text import Corpus, find_text
from ringspun.train.launch import Job, launch
from ringspun.train.reporting.log import records

BAR, SEQ_LEN = 1e-4, 64
TEXT = Path(json.__file__).parent  # nobody edits it meanwhile
RUNS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ring 2": {"ranks": 2},
    "ring 4": {"ranks": 4},
    "ring 2 x ulysses 2": {"ranks": 4, "ulysses": 2},
    "DDP: 2 copies of ring 2": {"ranks": 2, "dp_replicate": 2, "shard": "ddp"},
    "FSDP2: 2 data x ring 2": {"ranks": 2, "dp_shard": 2, "shard": "fsdp"},
    "FSDP2: ring 4": {"ranks": 4, "shard": "fsdp"},
    "HSDP: 2 copies of ring 2": {"ranks": 2, "dp_replicate": 2, "shard": "hsdp"},
}


def curve(corpus: Corpus, output: Path, steps: int, mesh: dict[str, Any]) -> list[float]:
    """The losses of a run, by step."""
    values: dict[str, Any] = {
        "model": {"layers": 2, "hidden_size": 64, "intermediate_size": 128, "heads": 4, "kv_heads": 2},
        "seq_len": SEQ_LEN,
        "batch_size": 2,
        "dtype": "float32",
        "steps": steps,
        "warmup_steps": min(20, steps - 1),
        "lr": 1e-3,
        "output": str(output),
    }
    with contextlib.redirect_stdout(sys.stderr):
        launch(Job(TrainConfig.model_validate(values | mesh), corpus))
    return [record["loss"] for record in records(output / "log.jsonl") if "loss" in record]


def report(curves: dict[str, list[float]]) -> str:
    """The table, and whether all are within the bar."""
    one = next(iter(curves.values()))
    steps = len(one)
    shown = sorted({1, steps // 8, steps // 2, steps})
    rows = [f"| run | {' | '.join(f'loss at {n}' for n in shown)} | largest difference | at step |"]
    rows.append("|---" * (len(shown) + 3) + "|")
    worst = 0.0
    for name, losses in curves.items():
        apart = [abs(a - b) / b for a, b in zip(losses, one, strict=True)]
        worst = max(worst, *apart)
        cells = [*(f"{losses[n - 1]:.6f}" for n in shown), f"{max(apart):.1e}", str(apart.index(max(apart)) + 1)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    verdict = "holds" if worst <= BAR else "is missed"
    return "\n".join([*rows, "", f"Worst of all: {worst:.1e}. The bar, {BAR:g} relative at every step, {verdict}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    corpus, curves = find_text(TEXT), {}
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, mesh) in enumerate(RUNS.items()):
            curves[name] = curve(corpus, Path(folder) / str(number), arguments.steps, mesh)
    text = (
        "# Loss curves on meshes\n\n"
        f"    python benchmarks/loss_curves.py --steps {arguments.steps}\n\n"
        f"torch {torch.__version__}, gloo, float32. A Llama of 2 layers, width 64, 4 heads (2 of keys), on the bytes\n"
        f"of Python's json package: 2 sequences of {SEQ_LEN} tokens a step, AdamW, clipped at 1, {arguments.steps}\n"
        "steps. Differences are relative, from one process, where they are largest.\n\n"
        f"{report(curves)}\n"
    )
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
