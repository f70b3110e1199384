"""Stages beside full length from the start: the curves of two runs of examples/line_retrieval, and what they took.

python benchmarks/line_retrieval.py --out benchmarks/results/$(date +%F)-line_retrieval.md

Reads the logs and answers of examples/line_retrieval/results; trains nothing. Beside the page it draws both losses.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ringspun.train.reporting.log import records

RESULTS = Path("examples/line_retrieval/results")
RUNS = {"stages": ("log.jsonl", "lines.json"), "full length": ("full_length_log.jsonl", "full_length_lines.json")}
SMOOTH = 25
"""Steps of a running mean: a step's loss depends on how many questions its sequence asks."""


def steps_of(log: Path) -> list[dict[str, Any]]:
    """The records of steps, in order."""
    return [record for record in records(log, 10**9) if "loss" in record]


def read_bytes(steps: list[dict[str, Any]]) -> list[float]:
    """Bytes of the run behind each step."""
    return list(accumulate(step["tokens_per_s"] * step["seconds"] for step in steps))


def by_length(steps: list[dict[str, Any]]) -> dict[int, list[float]]:
    """Seconds of the steps, by the bytes of a sequence."""
    found: dict[int, list[float]] = {}
    for step in steps:
        found.setdefault(step["seq_len"], []).append(step["seconds"])
    return found


def smooth(values: list[float]) -> list[float]:
    return [float(np.mean(values[max(0, i - SMOOTH + 1) : i + 1])) for i in range(len(values))]


def page(runs: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]], picture: str) -> str:
    lines = [
        "# Line retrieval: stages, and full length from the start",
        "",
        "    python benchmarks/line_retrieval.py",
        "",
        "The runs of [examples/line_retrieval](../../examples/line_retrieval/README.md), seed 0, two cores.",
        "The run of stages had the machine to itself; that of full length shared it, so its minutes are also told as",
        "its steps would have taken in the last stage of the other, whose steps are the same work.",
        "",
        "| run | steps | bytes | minutes | at the other's step | loss, last 25 steps | exact at 16,384 |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = median(by_length(runs["stages"][0])[16384])
    for name, (steps, answers) in runs.items():
        seconds = sum(step["seconds"] for step in steps)
        exact = answers["bars"]["exact at 16384, at least 0.95"]["value"]
        quiet = f"{len(steps) * alone / 60:.1f}" if name != "stages" else ""
        loss = smooth([step["loss"] for step in steps])[-1]
        count, size, minutes = len(steps), read_bytes(steps)[-1], seconds / 60
        lines.append(f"| {name} | {count} | {size:,.0f} | {minutes:.1f} | {quiet} | {loss:.3f} | {exact:.1%} |")
    lines += ["", "Seconds of a step, median (least):", ""]
    for name, (steps, _) in runs.items():
        told = ", ".join(f"{n:,} bytes {median(s):.2f} ({min(s):.2f})" for n, s in by_length(steps).items())
        lines.append(f"- {name}: {told}")
    lines += ["", f"![Loss by bytes read]({picture})", ""]
    return "\n".join(lines)


def draw(runs: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, (steps, _) in runs.items():
        megabytes = [x / 1e6 for x in read_bytes(steps)]
        axes.plot(megabytes, smooth([step["loss"] for step in steps]), label=name)
    axes.axhline(float(np.log(10)), color="gray", linestyle=":", label="a digit by chance")
    axes.set(xlabel="MB read", ylabel=f"loss, mean of {SMOOTH} steps", title="Line retrieval: stages, or full length")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    runs = {
        name: (steps_of(RESULTS / log), json.loads((RESULTS / answers).read_text()))
        for name, (log, answers) in RUNS.items()
    }
    picture = out.with_suffix(".png")
    draw(runs, picture)
    out.write_text(page(runs, picture.name), encoding="utf-8")
    print(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
