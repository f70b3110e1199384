"""Memory, time and comparisons: bars."""

from __future__ import annotations

from rich.text import Text

from ringspun.pictures.figures.compare import CompareFigure, Way
from ringspun.pictures.figures.memory import MemoryFigure
from ringspun.pictures.figures.timeline import Run, TimelineFigure
from ringspun.pictures.palette import BLUE, COMPUTE, GREEN, ITEM_COLOURS, ITEM_WORDS, WAIT
from ringspun.pictures.terminal.glyphs import HEIGHTS, legend
from ringspun.pictures.units import count, n_bytes, seconds

WIDTH = 50
LINE = 60
_ITEMS = "█▓▒░▚◆"
"""A glyph for each item."""


def of_memory(figure: MemoryFigure) -> list[Text]:
    """Stacked bars, a line for each rank."""
    most = max((sum(row) for row in figure.held), default=1) or 1
    lines = []
    for rank, row in zip(figure.ranks, figure.held, strict=True):
        line = Text(f"{f'rank {rank}':>10}  ", style="dim")
        drawn = 0
        for i, (item, held) in enumerate(zip(figure.items, row, strict=True)):
            until = round(WIDTH * sum(row[: i + 1]) / most)
            line.append(_ITEMS[i] * (until - drawn), style=ITEM_COLOURS[item] if held else "")
            drawn = until
        line.append(" " * (WIDTH - drawn + 1) + n_bytes(sum(row)))
        lines.append(line)
    used = [i for i in range(len(figure.items)) if any(row[i] for row in figure.held)]
    entries = [(_ITEMS[i], ITEM_COLOURS[figure.items[i]], ITEM_WORDS[figure.items[i]]) for i in used]
    alone, part = sum(figure.whole), most / max(sum(figure.whole), 1)
    told = f"one rank with the whole sequence: {n_bytes(alone)}; the fullest here holds {part:.0%} of that"
    halves = [legend(*entries[:3]), *([legend(*entries[3:])] if entries[3:] else [])]
    return [*lines, Text(""), *halves, Text(told, style="dim")]


def of_timeline(figure: TimelineFigure) -> list[Text]:
    """A line for each rank of each run, all on one axis."""
    whole = max((run.total_s for run in figure.runs), default=0.0) or 1.0
    lines = []
    for run in figure.runs:
        parts = " + ".join(
            f"{word} {seconds(s)}" for word, s in zip(("forward", "backward"), run.seconds, strict=False)
        )
        lines.append(Text(f"{run.name}: {parts}", style="bold"))
        lines += [_track(run, rank, whole) for rank in figure.ranks]
        lines.append(_border(run, whole))
    return [
        *lines,
        _axis(whole),
        Text(""),
        legend(("█", COMPUTE, "computes, even steps"), ("▓", COMPUTE, "odd steps"), ("·", WAIT, "waits")),
        Text("beside each rank, how much of its time it computes", style="dim"),
    ]


def _track(run: Run, rank: int, whole: float) -> Text:
    line = Text(f"{f'rank {rank}':>10}  ", style="dim")
    mine = [s for s in run.spans if s.ring_rank == rank]
    place = 0
    for i in range(LINE):
        a, b = i * whole / LINE, (i + 1) * whole / LINE
        while place < len(mine) and mine[place].end_s <= a:
            place += 1
        best, most = " ", 0.0
        for span in mine[place:]:
            if span.start_s >= b:
                break
            time = min(b, span.end_s) - max(a, span.start_s)
            if time > most:
                best, most = "·" if span.what == "wait" else "█▓"[span.step % 2], time
        line.append(best, style=WAIT if best == "·" else COMPUTE)
    line.append(f" {run.spent_s(rank, 'compute') / run.total_s if run.total_s else 0:.0%}", style="dim")
    return line


def _border(run: Run, whole: float) -> Text:
    """Where backward begins."""
    if len(run.seconds) < 2:
        return Text("")
    return Text(" " * (12 + round(LINE * run.seconds[0] / whole)) + "╵ backward", style="dim")


def _axis(whole: float) -> Text:
    line = "0".ljust(LINE // 2 - 3) + seconds(whole / 2)
    return Text(" " * 12 + line.ljust(LINE - 4) + seconds(whole), style="dim")


def of_compare(figure: CompareFigure) -> list[Text]:
    """A block of lines for each way: time as a bar, and its numbers."""
    most = max((way.total_s for way in figure.ways), default=0.0) or 1.0
    lines = []
    for i, way in enumerate(figure.ways):
        lines += [*_way(way, most, best=i == figure.quickest and len(figure.ways) > 1), Text("")]
    told = (
        "wait: for the busiest rank at every step, forward and backward, over balance",
        "heights: most over mean of each step of forward, from 1 to 4 and more",
    )
    return [*lines, legend(("█", BLUE, "forward"), ("▒", BLUE, "backward")), *(Text(t, style="dim") for t in told)]


def _fewer(heights: tuple[float, ...], most: int = WIDTH) -> list[float]:
    """At most `most` of them, the largest of neighbours."""
    each = -(-len(heights) // most)
    return [max(heights[i : i + each]) for i in range(0, len(heights), each)]


def _way(way: Way, most: float, *, best: bool) -> list[Text]:
    title = Text(f"{way.layout}, {way.route}", style="bold")
    title.append("  ◀ quickest" if best else "", style=GREEN)
    bar = Text("  ")
    first = round(WIDTH * way.seconds[0] / most)
    bar.append("█" * first, style=BLUE)
    bar.append("▒" * (round(WIDTH * way.total_s / most) - first), style=BLUE)
    bar.append(f" {seconds(way.total_s)}")
    low, high = way.tokens
    tokens = count(low) if low == high else f"{count(low)} to {count(high)}"
    sent, held = n_bytes(sum(way.sent_bytes)), n_bytes(way.memory_bytes)
    steps = Text(f"  wait {way.wait[0]:.2f} and {way.wait[1]:.2f}   ", style="dim")
    steps.append("".join(HEIGHTS[min(7, int((x - 1) / 3 * 8))] for x in _fewer(way.imbalance)), style=BLUE)
    told = f"  a rank sends {sent}, a link {n_bytes(way.link_bytes)}; holds {held}; {tokens} tokens"
    return [title, bar, steps, Text(told, style="dim")]
