"""`ringspun check --suite full`: the conformance suite on local rings, first in one thread, then over processes; or on
devices of JAX."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ringspun.core.host import cores
from ringspun.core.layout import Layout
from ringspun.errors import RingspunError
from ringspun.testing.conformance import certify, versions
from ringspun.testing.report import FAILED, PASSED, REFUSED, SHOWN_FINDINGS, Report, Trial, plain
from ringspun.testing.suite import suite

DRIVERS = ("loopback", "gloo")
DEVICES = "devices"
"""What stands for the driver of jax."""
STAGE_TIMEOUT_S = 600.0
SHOWN_FAILURES = 20


@dataclass(frozen=True)
class Stages:
    """What runs: every combination. A ring of one sends nothing, so it is left out over gloo.

    Raises:
        ValueError: an unknown property; nothing to run.
    """

    drivers: tuple[str, ...]
    ranks: tuple[int, ...]
    layouts: tuple[Layout, ...]
    dtypes: tuple[str, ...]
    properties: tuple[str, ...]

    def __post_init__(self) -> None:
        suite(self.dtypes[0], self.properties)
        if not list(self.all()):
            raise ValueError("ranks must hold a ring of more than one for gloo; got 1 alone.")

    def all(self) -> Iterator[Stage]:
        """One after the other, those that share processes next to each other."""
        for driver in self.drivers:
            for size in self.ranks:
                if driver != "gloo" or size > 1:
                    for layout in self.layouts:
                        yield from (Stage(driver, size, layout, dtype) for dtype in self.dtypes)


@dataclass(frozen=True)
class Stage:
    """One run of the suite."""

    driver: str
    ranks: int
    layout: Layout
    dtype: str

    def __str__(self) -> str:
        return f"{self.driver} R={self.ranks} {self.layout} {self.dtype}"


@dataclass
class Tally:
    """What the cases of one property came to over one driver, and the one nearest to its bar."""

    passed: int = 0
    refused: int = 0
    failed: int = 0
    worst: dict[str, Any] = field(default_factory=lambda: {"of_bar": 0.0})

    def add(self, stage: Stage, trial: Trial) -> None:
        """Count a case."""
        self.passed += trial.status == PASSED
        self.refused += trial.status == REFUSED
        self.failed += trial.status == FAILED
        if trial.worst > self.worst["of_bar"]:
            numbers = {"tensor": trial.tensor, "error": trial.error, "bar": trial.bar}
            self.worst = {"of_bar": trial.worst, **numbers, "case": trial.case, "stage": str(stage)}


@dataclass
class Result:
    """What all stages came to.

    Args:
        tallies: by property and driver. failures: a line of text each. seconds: wall time. versions: of what ran.
    """

    stages: Stages
    tallies: dict[str, dict[str, Tally]]
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def count(self, status: str) -> int:
        """Cases with a status, over all properties and drivers."""
        return sum(getattr(t, status) for by_driver in self.tallies.values() for t in by_driver.values())

    @property
    def ok(self) -> bool:
        """Whether nothing failed and something passed."""
        return not self.failures and self.count("passed") > 0

    def add(self, stage: Stage, report: Report) -> None:
        """Count a report."""
        for verdict in report.verdicts:
            for trial in verdict.trials:
                self.tallies[verdict.name][stage.driver].add(stage, trial)
                if trial.status == FAILED:
                    said = [str(f) for f in trial.findings[:SHOWN_FINDINGS]] or [trial.reason]
                    self.failures.append(
                        {"property": verdict.name, "case": trial.case, "stage": str(stage), "found": said}
                    )

    def sentence(self) -> str:
        """What is certified, or that it is not."""
        total = self.count("passed") + self.count("failed")
        if not self.ok:
            return f"NOT certified: {len(self.failures)} failures in {total:,} cases."
        s = self.stages
        made = ", ".join(v if name == "machine" else f"{name} {v}" for name, v in self.versions.items())
        rings = f"rings of {', '.join(map(str, s.ranks))} over {' and '.join(s.drivers)}"
        left = [name for name, by_driver in self.tallies.items() if not any(t.passed for t in by_driver.values())]
        many = _some(len(s.properties) - len(left), "property"), _some(len(s.layouts), "layout")
        but = f" (not {', '.join(left)})" if left else ""
        what = f"{many[0]}{but}; {', '.join(s.dtypes)}; {rings}; {many[1]}"
        refused = f", {self.count('refused'):,} refused" if self.count("refused") else ""
        return f"certified: {what}; {total:,} cases passed{refused}; {made}."

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        counts = {s: self.count(s) for s in ("passed", "refused", "failed")}
        tallies = {name: {d: vars(t) for d, t in by.items()} for name, by in self.tallies.items()}
        s = self.stages
        ran = {
            "suite": "full", "drivers": s.drivers, "ranks": s.ranks, "layouts": [str(x) for x in s.layouts],
            "dtypes": s.dtypes,
        }  # fmt: skip
        said = {"failures": self.failures, "seconds": round(self.seconds, 1), "certified": self.sentence()}
        return {"ok": self.ok, **ran, **counts, "versions": self.versions, "properties": tallies, **said}


def run_suite(stages: Stages, *, as_json: bool) -> bool:
    """Run all stages and print what they came to; whether nothing failed."""
    console = Console()
    mine, machine = versions(), f"{platform.system()} {platform.machine()}"
    made = {"ringspun": mine.pop("ringspun"), **framework_version(stages.drivers), **mine, "machine": machine}
    result = Result(stages, {p: {d: Tally() for d in stages.drivers} for p in stages.properties}, versions=made)
    begin = time.perf_counter()
    if not as_json:
        console.print(_opening(stages), highlight=False)
    with ExitStack() as stack:
        progress = stack.enter_context(_progress(console, visible=not as_json))
        todo = list(stages.all())
        task = progress.add_task("", total=len(todo))
        runner = _Runner(stack)
        for stage in todo:
            progress.update(task, description=str(stage))
            try:
                result.add(stage, runner.run(stage, stages.properties))
            except RingspunError as problem:  # processes that died or hung; the pool started others
                result.failures.append({"property": "", "case": "", "stage": str(stage), "found": [str(problem)]})
            progress.advance(task)
    result.seconds = time.perf_counter() - begin
    if as_json:
        typer.echo(json.dumps(plain(result.to_dict()), indent=1))
    else:
        _print(console, result)
    return result.ok


class _Runner:
    """Runs stages in this thread, or on pools of processes, one pool per ring size."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._pools: dict[int, Any] = {}

    def run(self, stage: Stage, properties: tuple[str, ...]) -> Report:
        """The report of one stage; over processes that of the first rank that is not content."""
        if stage.driver in (DEVICES, "loopback"):
            return (_on_devices if stage.driver == DEVICES else _on_loopback)(stage, properties)
        if stage.ranks not in self._pools:
            from ringspun.testing.pool import RankPool

            self._pools[stage.ranks] = self._stack.enter_context(RankPool(stage.ranks))
        reports = self._pools[stage.ranks].run(_on_rank, stage, properties, timeout_s=STAGE_TIMEOUT_S)
        unhappy: Report = next((r for r in reports if r.properties(FAILED)), reports[0])
        return unhappy


def _on_loopback(stage: Stage, properties: tuple[str, ...]) -> Report:
    from ringspun.testing.candidates import OnRing
    from ringspun.torch import ContextParallel, Loopback

    context = ContextParallel(Loopback(stage.ranks), layout=stage.layout)
    return certify(OnRing(context), dtype=stage.dtype, properties=properties)


def _on_devices(stage: Stage, properties: tuple[str, ...]) -> Report:
    from ringspun.testing.jax import OnDevices

    return certify(OnDevices(stage.ranks, stage.layout), dtype=stage.dtype, properties=properties)


def _on_rank(rank: int, stage: Stage, properties: tuple[str, ...]) -> Report:
    from ringspun.testing.candidates import OnRing
    from ringspun.torch import ContextParallel

    context = ContextParallel(layout=stage.layout, timeout_s=60)
    return certify(OnRing(context), dtype=stage.dtype, properties=properties)


def _opening(stages: Stages) -> str:
    cases = len(suite(stages.dtypes[0], stages.properties))
    what = f"{_some(len(stages.properties), 'property')} in {_some(cases, 'case')}"
    dealt = f"rings of {', '.join(map(str, stages.ranks))}; {_some(len(stages.layouts), 'layout')}"
    return (
        f"{what}, forward and backward, against float64:\n"
        f"{', '.join(stages.dtypes)}; {dealt}; {', then '.join(stages.drivers)}; {_some(cores(), 'core')}\n"
    )


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what.removesuffix('y')}{'ies' if what[-1] == 'y' else 's'}"


def _progress(console: Console, visible: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    quiet = not visible or not console.is_terminal or bool(os.environ.get("TERM") == "dumb")
    return Progress(*columns, console=console, transient=True, disable=quiet)


def _print(console: Console, result: Result) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("property")
    for driver in result.stages.drivers:
        table.add_column(driver, justify="right")
    table.add_column("worst error / its bar", overflow="fold")
    for name, by_driver in result.tallies.items():
        counts = [_counted(t) for t in by_driver.values()]
        failed = any(t.failed for t in by_driver.values())
        mark = "[red]FAIL[/]" if failed else "[green]ok[/]" if any(t.passed for t in by_driver.values()) else "-"
        worst = max((t.worst for t in by_driver.values()), key=lambda w: w["of_bar"])
        table.add_row(mark, name, *counts, _nearest(worst))
    console.print(table, highlight=False)
    for failure in result.failures[:SHOWN_FAILURES]:
        what = ", ".join(filter(None, (failure["property"], failure["case"], failure["stage"])))
        console.print(f"\n{what}", style="red", highlight=False, markup=False)
        for line in failure["found"]:
            console.print(f"  {line}", highlight=False, markup=False)
    if len(result.failures) > SHOWN_FAILURES:
        console.print(f"\nand {len(result.failures) - SHOWN_FAILURES} more; --json has all", highlight=False)
    style = "bold green" if result.ok else "bold red"
    console.print(f"\n{result.sentence()}", style=style, highlight=False, markup=False)
    console.print(f"{result.seconds:.0f} s", highlight=False)


def _counted(tally: Tally) -> str:
    parts = [f"{tally.passed:,}"]
    parts += [f"{n:,} {word}" for n, word in ((tally.refused, "refused"), (tally.failed, "failed")) if n]
    return ", ".join(parts)


def _nearest(worst: dict[str, Any]) -> str:
    if "stage" not in worst:
        return ""
    return f"{worst['of_bar']:.2g}: {worst['tensor']}, {worst['stage'].partition(' ')[2]}"


def framework_version(drivers: tuple[str, ...]) -> dict[str, str]:
    """The framework that runs on these drivers, and its version."""
    name = "jax" if DEVICES in drivers else "torch"
    return {name: str(importlib.import_module(name).__version__)}
