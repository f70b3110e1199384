"""A schedule and its balance: a line for each rank, a column for each step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from ringspun.pictures.figures.balance import BalanceFigure, PassBalance
from ringspun.pictures.figures.base import Kind
from ringspun.pictures.figures.schedule import PassFigure, ScheduleFigure
from ringspun.pictures.palette import BLUE, KIND_COLOURS, ORANGE
from ringspun.pictures.terminal.glyphs import KINDS, kind, legend, shade
from ringspun.pictures.units import count, n_bytes

WIDTH = 64
MOST_LINKS = 8


def of_schedule(figure: ScheduleFigure) -> list[Text]:
    """Whose block each rank computes with at each step, and what of it."""
    lines = [*_pass("forward", figure, figure.forward), Text(""), *_pass("backward", figure, figure.backward)]
    shown = {k for one in (figure.forward, figure.backward) for row in one.kinds for k in row}
    return [*lines, Text(""), legend(*((KINDS[k], KIND_COLOURS[k], k.value) for k in Kind if k in shown))]


def _pass(name: str, figure: ScheduleFigure, one: PassFigure) -> list[Text]:
    columns = len(one.steps) - 1
    room = min(8, max(1, WIDTH // max(columns, 1)))
    widest = len(str(figure.ring_size - 1))
    names = room >= widest + 2 and columns == one.steps[-1]
    what = "KV" if one.travels == "keys" else "Q"
    title = f"{name}: {one.travels} travel" + (f"; beside each glyph, whose {what}" if names else "")
    lines = [Text(title, style="bold"), _heads(one.steps, room)]
    for rank, kinds, sources in zip(figure.ranks, one.kinds, one.sources, strict=True):
        line = Text(f"{f'rank {rank}':>10}  ", style="dim")
        for of, source in zip(kinds, sources, strict=True):
            cell = kind(of)
            owner = f"{' ' * (room > widest + 2)}{source}" if names and source >= 0 and of != Kind.IDLE else ""
            line.append_text(cell.append(f"{owner:<{room - 1}}"))
        line.rstrip()
        lines.append(line)
    if one.messages and room >= 6:
        sent = [sum(m[-1] for m in one.messages if m[0] == step) for step in range(columns)]
        lines.append(
            _cells("all send", [n_bytes(x).replace(" ", "").replace("iB", "") if x else "" for x in sent], room)
        )
    return lines


def _heads(steps: Sequence[int], room: int) -> Text:
    """Every so many columns the number of the step."""
    widest = len(str(steps[-1])) + 1
    every = -(-widest // room)
    line = Text(f"{'step':>10}  ", style="dim")
    for i, step in enumerate(steps[:-1]):
        if i % every == 0:
            line.append(f"{step:<{room * every}}")
    line.rstrip()
    return line


def _cells(label: str, cells: Sequence[str], room: int) -> Text:
    line = Text(f"{label:>10}  ", style="dim")
    line.append("".join(f"{cell:<{room}}" for cell in cells).rstrip())
    return line


def of_balance(figure: BalanceFigure) -> list[Text]:
    """Pairs of each rank and step, as numbers where there is room, else as shades; and bytes of the links."""
    lines = []
    for name, one in (("forward", figure.forward), ("backward", figure.backward)):
        lines += [*_balance(name, figure, one), Text("")]
    return [*lines, *_links(figure)]


def _balance(name: str, figure: BalanceFigure, one: PassBalance) -> list[Text]:
    columns = len(one.steps) - 1
    room = min(9, max(1, WIDTH // max(columns, 1)))
    most = max((max(row, default=0) for row in one.pairs), default=0)
    title = f"{name}: pairs of a head; waiting at every step takes {one.wait:.2f} x balance"
    lines = [Text(title, style="bold"), _heads(one.steps, room)]
    for rank, row in zip(figure.ranks, one.pairs, strict=True):
        if room >= 7:
            lines.append(_cells(f"rank {rank}", [count(x).replace(" ", "") for x in row], room))
            continue
        line = Text(f"{f'rank {rank}':>10}  ", style="dim")
        for pairs in row:
            line.append(shade(pairs / most if most else 0.0), style=BLUE if pairs else "dim")
            line.append(" " * (room - 1))
        line.rstrip()
        lines.append(line)
    if room >= 5:
        lines.append(_cells("most/mean", [f"{max(one.imbalance[a:b]):.2f}" for a, b in pairwise(one.steps)], room))
    else:
        lines.append(
            Text(f"{'':12}darkest: {count(most)} pairs; most/mean up to {max(one.imbalance):.2f}", style="dim")
        )
    return lines


def _links(figure: BalanceFigure) -> list[Text]:
    if not figure.links:
        return [Text("nothing is sent", style="dim")]
    lines = [Text("bytes of a link, forward and backward", style="bold")]
    most = sum(figure.links[0][2:])
    for sender, receiver, forward, backward in figure.links[:MOST_LINKS]:
        line = Text(f"{f'{sender} → {receiver}':>12}  ", style="dim")
        first = round(36 * forward / most)
        line.append("█" * first, style=BLUE)
        line.append("▒" * (round(36 * (forward + backward) / most) - first), style=ORANGE)
        line.append(f"  {n_bytes(forward)} + {n_bytes(backward)}")
        lines.append(line)
    left = len(figure.links) - MOST_LINKS
    lines += [Text(f"{'':14}and {left:,} links more, with no more bytes", style="dim")] if left > 0 else []
    return [*lines, legend(("█", BLUE, "forward"), ("▒", ORANGE, "backward"))]
