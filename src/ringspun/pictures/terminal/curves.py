"""A training run: a line of blocks for each curve, stages marked below, and a paragraph for each stage."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from ringspun.pictures.figures.run import Panel, RunFigure, Stage, shown
from ringspun.pictures.palette import BLUE, GREEN, ORANGE, PURPLE, SKY
from ringspun.pictures.terminal.glyphs import HEIGHTS

LINE = 60
"""Columns of a curve."""
_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY)


def of_run(figure: RunFigure) -> list[Text]:
    """Stages first, then panel by panel."""
    lines = [line for stage in figure.stages for line in _stage(stage, figure)]
    for panel in figure.panels:
        lines += [Text(""), Text(panel.title, style="bold"), *_panel(panel, figure)]
    return [*lines, Text(""), _axis(figure)]


def _stage(stage: Stage, figure: RunFigure) -> Iterator[Text]:
    last = stage.first_step + stage.steps - 1
    name = f"stage {stage.number + 1}, " if len(figure.stages) > 1 else ""
    of = f" of {stage.seq_len:,} tokens" if stage.seq_len else ""
    yield Text(f"{name}steps {stage.first_step:,} to {last:,}{of}" + (f"; {stage.text}" if stage.text else ""))
    told = []
    if stage.loss is not None:
        told.append(f"loss {stage.loss[0]:.4g} to {stage.loss[1]:.4g}")
    if stage.tokens_per_s is not None:
        told.append(shown(stage.tokens_per_s, "tokens/s"))
    if stage.mfu is not None:
        told.append(f"MFU {shown(stage.mfu, 'share')}")
    if stage.waiting is not None:
        told.append(f"waits {' to '.join(shown(part, 'share') for part in stage.waiting)}")
    if stage.peak_bytes is not None:
        told.append(f"peak {shown(stage.peak_bytes, 'bytes')}")
    for few in (told[:3], told[3:]):
        if few:
            yield Text("  " + ", ".join(few), style="dim")


def _panel(panel: Panel, figure: RunFigure) -> Iterator[Text]:
    values = [value for curve in panel.curves for value in curve.values]
    low, high = (0.0 if panel.unit else min(values)), max(values)
    for name, colour in zip(panel.names, _COLOURS * len(panel.names), strict=False):
        points = [p for c in panel.curves if c.name == name for p in zip(c.steps, c.values, strict=True)]
        line = Text("  ")
        line.append(_sparks(points, figure.steps, low, high), style=colour)
        line.append(f" {shown(points[-1][1], panel.unit)}")
        yield line
        yield Text(f"  {name}", style="dim")


def _sparks(points: Sequence[tuple[int, float]], steps: int, low: float, high: float) -> str:
    """The mean of the values in each column as a height; a space where there is none."""
    columns: list[list[float]] = [[] for _ in range(LINE)]
    for step, value in points:
        columns[min(LINE - 1, step * LINE // (steps + 1))].append(value)
    scale = (len(HEIGHTS) - 1) / ((high - low) or 1.0)
    return "".join(HEIGHTS[round((sum(c) / len(c) - low) * scale)] if c else " " for c in columns)


def _axis(figure: RunFigure) -> Text:
    line = [" "] * LINE
    for stage in figure.stages[1:]:
        line[min(LINE - 1, stage.first_step * LINE // (figure.steps + 1))] = "╵"
    marks = "".join(line).rstrip()
    told = f"0 to {figure.steps:,} steps" + ("; ╵ a stage begins" if marks else "")
    return Text(f"  {marks}\n  {told}" if marks else f"  {told}", style="dim")
