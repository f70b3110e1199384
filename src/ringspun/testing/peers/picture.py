"""A comparison as a picture: of each row, how long every peer takes over ours."""

from __future__ import annotations

from pathlib import Path

from ringspun.testing.peers.record import Comparison
from ringspun.testing.peers.report import words_of

MARKS = "osD^v<>Ph*X"


def draw(comparison: Comparison, path: Path) -> None:
    """Write it; the kind of picture by the path's suffix."""
    from matplotlib.figure import Figure

    results = comparison.rows
    figure = Figure(figsize=(11, 1.6 + 0.42 * len(results)), layout="constrained")
    axes = figure.subplots()
    names = [outcome.peer for outcome in results[0][1]]
    for i, name in enumerate(names):
        points = [
            (outcome.median_s / found[0].median_s, y, bool(outcome.instead))
            for y, (_, found) in enumerate(results)
            for outcome in found
            if outcome.peer == name and outcome.both_s and found[0].both_s
        ]
        color, mark = f"C{i % 10}", MARKS[i % len(MARKS)]
        if points:
            axes.plot([], [], mark, color=color, label=name)
        shift = 0.06 * (i - len(names) / 2)  # equal ones would hide each other
        for x, y, instead in points:
            axes.plot(x, y + shift, mark, color=color, fillstyle="none" if instead else "full")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_minor_formatter("")  # whose labels would lie one over the other
    axes.xaxis.set_major_formatter("{x:g}")
    for scale in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        scale("{x:g}")
    axes.set_yticks(range(len(results)), [words_of(row, comparison.tokens) for row, _ in results])
    axes.invert_yaxis()
    axes.grid(alpha=0.3)
    axes.set(
        xlabel="seconds of forward + backward over ringspun's ring; hollow: full causal attention instead",
        title="The same attention by everybody",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.savefig(path, dpi=120)
