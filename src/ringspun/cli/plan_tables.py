"""What `ringspun plan` shows on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from ringspun.planner.explain import Verdict
from ringspun.planner.hardware import GIB, Hardware
from ringspun.planner.memory import Memory
from ringspun.planner.models import Model
from ringspun.planner.search import Plan, Question

BAR = 30
"""Characters of a full bar."""


def console() -> Console:
    """Names are people's own: none of their brackets is markup."""
    return Console(highlight=False, markup=False)


def show_answer(question: Question, plans: Sequence[Plan], why: Verdict, hints: Sequence[str]) -> None:
    """Verdict, plans, the best one's time and memory, and hints."""
    out, best = console(), plans[0]
    c = question.cluster
    out.print(
        f"{question.model.name} ({question.model.parameters / 1e9:.1f}B) on {c.count} x {c.device.name}, "
        f"sequences of {best.job.seq_len:,} tokens, {best.passes * best.job.split.dp} a step, {question.mask}"
    )
    out.print("Ring." if why.ring else f"Do not ring: {why.instead}.", style="bold")
    show_lines([*why.reasons, *why.changes, *_rates(best, question.price), *hints], out)
    out.print(_plans(plans))
    bar = "#" if out.options.ascii_only else "█"
    out.print(_times(best, bar))
    out.print(_memory(best.memory, bar))


def _rates(best: Plan, price: float | None) -> list[str]:
    told = [f"{best.tokens_per_s:,.0f} tokens per second, {best.seconds:.3g} s a step, {best.passes} passes"]
    told.append(
        f"{best.memory.left_for_attention / GIB:.1f} GiB are left for attention (or the loss) beside what stands"
    )
    if price is not None:
        told.append(f"a billion tokens cost {best.cost(price):,.0f} at {price:g} per device and hour")
    return told


def show_lines(lines: Sequence[str], out: Console | None = None) -> None:
    """One line each."""
    printer = out or console()
    for line in lines:
        printer.print(f"- {line}")


def _plans(plans: Sequence[Plan]) -> Table:
    table = Table("split", "layout, route", "kept, ZeRO", title="the quickest first", title_justify="left", box=SIMPLE)
    for name in ("step s", "MFU", "GiB", "longest"):
        table.add_column(name, justify="right")
    for plan in plans:
        job = plan.job
        way = f"{job.layout}, {job.route}" if job.split.ring > 1 else "-"
        row = [str(job.split), way, f"{job.checkpointing}, {job.zero}", f"{plan.seconds:.3g}", f"{plan.mfu:.0%}"]
        table.add_row(*row, f"{plan.memory.total / GIB:.1f}", _short(plan.longest.tokens))
    return table


def _short(tokens: float) -> str:
    return f"{tokens / 2**20:.1f}M" if tokens >= 2**20 else f"{tokens / 1024:.0f}K"


def _bars(title: str, items: Mapping[str, float], whole: float, unit: str, scale: float, bar: str) -> Table:
    table = Table("", "", title=title, title_justify="left", show_header=False, box=None)
    table.add_column(justify="right")
    for name, value in items.items():
        if value > 0:
            table.add_row(name, bar * max(1, round(BAR * value / whole)), f"{value / scale:.3g} {unit}")
    return table


def _times(plan: Plan, bar: str) -> Table:
    return _bars("a pass of the best", plan.time.items, plan.time.total, "s", 1, bar)


def _memory(found: Memory, bar: str) -> Table:
    title = f"its memory at the peak, {found.peak_phase}: {found.total / GIB:.1f} of {found.capacity / GIB:.1f} GiB"
    left = {"left": max(0.0, found.capacity - found.total)}
    return _bars(title, {**found.items, **left}, max(found.capacity, found.total), "GiB", GIB, bar)


def show_slices(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of `plan links`."""
    table = Table("device", "link", "by peaks, every pair", "reached, causal, there and back")
    for row in rows:
        reached = row["reached"]
        table.add_row(
            row["device"], row["link"], f"{row['peak']:,.0f}", "never" if reached is None else f"{reached:,.0f}"
        )
    console().print(table)


def show_ways(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of `plan shares`."""
    table = Table("layout", "route", "ms a layer", "tokens of each rank", box=SIMPLE)
    for row in rows:
        table.add_row(row["layout"], row["route"], f"{1e3 * row['seconds']:.3g}", ", ".join(map(str, row["tokens"])))
    console().print(table)


def show_accuracy(data: Mapping[str, Any]) -> None:
    """The tables of `plan accuracy`."""
    out = console()
    table = Table(
        "way", "exact", "within one", "worst", "mean", title=data["max_context"]["what"], title_justify="left"
    )
    for name, row in data["max_context"]["ways"].items():
        table.add_row(name, *(str(row[k]) for k in ("exact", "within_one", "worst")), f"{row['mean']:.2f}")
    out.print(table)
    table = Table("model", "devices", "published", "predicted", "error", "fitted", title=data["offloaded"]["what"])
    table.title_justify = "left"
    for row in data["offloaded"]["rows"]:
        table.add_row(
            row["model"], str(row["devices"]), f"{row['published']:,.0f}", f"{row['predicted']:,.0f}",
            f"{row['error']:+.1%}", row["fitted"],
        )  # fmt: skip
    out.print(table)


def show_known(hardware: Hardware, models: Mapping[str, Model]) -> None:
    """The tables of `plan list`."""
    out = console()
    table = Table("device", "TFLOP/s", "GiB", "node", "links", "source")
    for name, d in hardware.devices.items():
        links = " / ".join(filter(None, (d.near, d.far)))
        table.add_row(name, f"{d.flops / 1e12:,.0f}", f"{d.memory_gib:g}", str(d.node), links, f"{d.source} ({d.date})")
    out.print(table)
    table = Table("link", "GB/s one way", "latency us", "source", "assumed")
    for name, link in hardware.links.items():
        rate = f"{link.links} x {link.bytes_per_s / 1e9:g}" if link.links > 1 else f"{link.bytes_per_s / 1e9:g}"
        table.add_row(name, rate, f"{1e6 * link.latency_s:g}", f"{link.source} ({link.date})", link.assumed)
    out.print(table)
    table = Table("model", "parameters", "layers", "hidden", "heads", "KV heads", "window")
    for name, m in models.items():
        sizes = (m.layers, m.hidden, m.heads, m.kv_heads, m.window or "")
        table.add_row(name, f"{m.parameters:,}", *map(str, sizes))
    out.print(table)
