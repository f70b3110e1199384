"""`ringspun check`: errors of a ring against the float64 oracle, judged by calibrated bars, as one JSON object."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Any

import typer

from ringspun.cli.options import FRAMEWORKS, integers, one_of, refuse_with_jax, split_list
from ringspun.cli.suite import DEVICES, DRIVERS, Stages, framework_version, run_suite
from ringspun.core.layout import Layout
from ringspun.core.mask import Mask
from ringspun.core.text import parse_layout, parse_mask
from ringspun.errors import RingspunError
from ringspun.testing import cases as tc
from ringspun.testing import yardstick
from ringspun.testing.comparison import MANY_RANKS, TENSORS, Errors, errors, judge, rms
from ringspun.testing.suite import PROPERTIES
from ringspun.testing.yardstick import DTYPES, rounded

app = typer.Typer(add_completion=False, rich_markup_mode=None)
SUITES = ("full",)
BF16_SEEDS = 4
MOST_RANKS = {"loopback": 4096, "gloo": 64, DEVICES: 64}
LONGEST_DENSE = 16_384
"""Longest sequence of the float64 oracle, which holds a score for every pair of tokens."""


@app.command()
def check(
    ranks: Annotated[str, typer.Option(help="Ring sizes, comma list.")] = "1,2,4",
    seq_len: Annotated[str | None, typer.Option(help="Global lengths (tokens), comma list; default 7,77,128.")] = None,
    mask: Annotated[str | None, typer.Option(help="Masks, comma list; default all.")] = None,
    layout: Annotated[str, typer.Option(help="Layouts, comma list, or 'all'.")] = "all",
    dtype: Annotated[
        str | None,
        typer.Option(help="float64, float32, bfloat16; comma list. Default float64, of a suite all three."),
    ] = None,
    driver: Annotated[
        str | None,
        typer.Option(
            help="'loopback' (one thread), the default, or 'gloo' (processes); of a suite the default is both."
        ),
    ] = None,
    framework: Annotated[
        str,
        typer.Option(help="'torch', or 'jax': a ring of this process's devices; a CPU is as many as needed."),
    ] = "torch",
    suite: Annotated[
        str | None, typer.Option(help="'full': the conformance suite, every property, instead of masks and lengths.")
    ] = None,
    properties: Annotated[
        str | None, typer.Option("--property", help="With --suite: only these properties, comma list.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON object.")] = False,
    failures_only: Annotated[
        bool, typer.Option(help="With --json, without --suite: list only cases that fail.")
    ] = False,
) -> None:
    """Run a ring against dense float64 attention, forward and backward; exit 1 if any case misses its bar."""
    try:
        one_case_each = {"mask": mask, "seq-len": seq_len, "failures-only": failures_only or None}
        _refuse(one_case_each if suite else {"property": properties}, "without" if suite else "with")
        if one_of("framework", framework, FRAMEWORKS) == "jax":
            refuse_with_jax({"driver": driver})
            drivers: tuple[str, ...] = (DEVICES,)
        elif driver is None and suite:
            drivers = DRIVERS
        else:
            drivers = (one_of("driver", driver or "loopback", DRIVERS),)
        sizes = integers("ranks", ranks, least=1, most=min(MOST_RANKS[d] for d in drivers))
        if suite:
            one_of("suite", suite, SUITES)
            wanted_properties = tuple(PROPERTIES) if properties is None else tuple(split_list(properties))
            dtypes = tuple(_dtypes(dtype or "all"))
            stages = Stages(drivers, tuple(sizes), tuple(_layouts(layout)), dtypes, wanted_properties)
        else:
            wanted = list(_cases(sizes, seq_len or "7,77,128", mask or "all", layout, dtype or "float64"))
    except (ValueError, TypeError) as problem:
        typer.echo(f"ringspun check: {problem}", err=True)
        raise typer.Exit(2) from None
    if drivers == (DEVICES,):
        _make_devices(max(sizes))
    ok = run_suite(stages, as_json=as_json) if suite else _run_cases(drivers[0], wanted, as_json, failures_only)
    if not ok:
        raise typer.Exit(1)


def _refuse(options: Mapping[str, object], word: str) -> None:
    """Refuse options that would have no effect `word` --suite."""
    for name, value in options.items():
        if value is not None:
            other = "with" if word == "without" else "without"
            raise ValueError(f"{name} must be used {word} --suite; got it {other} it.")


def _make_devices(count: int) -> None:
    from ringspun.testing import jax as tj

    try:
        tj.make_devices(count)
    except RingspunError as problem:
        typer.echo(f"ringspun check: {problem}", err=True)
        raise typer.Exit(2) from None


def _run_cases(driver: str, wanted: list[tc.Case], as_json: bool, failures_only: bool) -> bool:
    """Whether all cases are within their bars; prints them."""
    results = []
    with ExitStack() as stack:
        runner = _Runner(driver, stack)
        for case in wanted:
            try:
                results.append(runner.run(case))
            except RingspunError as problem:
                typer.echo(f"ringspun check: {_name(case)}: {problem}", err=True)
                raise typer.Exit(2 if isinstance(problem, ValueError) else 1) from None
            if not as_json:
                _progress(results[-1])
    report = _report(driver, results)
    if failures_only:
        report["cases"] = [r for r in report["cases"] if not r["ok"]]
    if as_json:
        typer.echo(json.dumps(report, indent=1))
    else:
        typer.echo(f"{report['passed']} of {report['count']} cases within their bars")
    return bool(report["ok"])


def _name(case: tc.Case) -> str:
    return f"R={case.ranks} S={case.seq_len} {case.dtype} {case.layout} {str(case.mask)[:60]}"


def _cases(sizes: list[int], seq_len: str, mask: str, layout: str, dtype: str) -> Iterator[tc.Case]:
    layouts, dtypes = _layouts(layout), _dtypes(dtype)
    for s in integers("seq-len", seq_len, least=1, most=LONGEST_DENSE):
        masks: list[Mask] = list(tc.all_masks(s)) if mask == "all" else [parse_mask(t) for t in split_list(mask)]
        for m in masks:
            m.regions(s, s)  # a mask that does not fit its length is refused before anything runs
        for m, name, lay, r in itertools.product(masks, dtypes, layouts, sizes):
            yield tc.Case(r, s, m, lay, name)


def _layouts(text: str) -> list[Layout]:
    return list(tc.LAYOUTS) if text == "all" else [parse_layout(t) for t in split_list(text)]


def _dtypes(text: str) -> list[str]:
    return list(DTYPES) if text == "all" else [one_of("dtype", name, DTYPES) for name in split_list(text)]


class _Runner:
    """Runs cases on a loopback or on pools of processes, one per ring size."""

    def __init__(self, driver: str, stack: ExitStack) -> None:
        self._driver, self._stack = driver, stack
        self._pools: dict[int, Any] = {}

    def run(self, case: tc.Case) -> dict[str, Any]:
        """One case as a row of the report."""
        seeds = range(BF16_SEEDS) if case.dtype == "bfloat16" else range(1)
        seeded = [replace(case, seed=seed) for seed in seeds]
        found = [self._errors(c) for c in seeded]
        of_dense = _yardstick_errors if self._driver == DEVICES else _dense_errors
        of_one = _device_errors if self._driver == DEVICES else _loopback_errors
        dense = [of_dense(replace(c, ranks=1, layout=tc.LAYOUTS[0])) for c in seeded]
        alone = None
        if case.dtype == "bfloat16" and case.ranks >= MANY_RANKS:
            alone = [of_one(replace(c, ranks=1, layout=tc.LAYOUTS[0])) for c in seeded]
        ok, bars = judge(case.dtype, found, dense, alone)
        shown = rms(found) if case.dtype == "bfloat16" else {n: max(e.worst[n] for e in found) for n in TENSORS}
        return {
            "ok": ok,
            "ranks": case.ranks,
            "seq_len": case.seq_len,
            "mask": str(case.mask),
            "layout": str(case.layout),
            "dtype": case.dtype,
            "error": shown,
            "bar": bars,
        }

    def _errors(self, case: tc.Case) -> Errors:
        if self._driver in ("loopback", DEVICES):
            return (_device_errors if self._driver == DEVICES else _loopback_errors)(case)
        if case.ranks not in self._pools:
            from ringspun.testing.pool import RankPool

            self._pools[case.ranks] = self._stack.enter_context(RankPool(case.ranks))
        return self._pools[case.ranks].run(_errors_on_rank, case)[0]  # type: ignore[no-any-return]


@lru_cache(maxsize=8)
def _oracle(case: tc.Case) -> Any:
    """Rounded inputs and the oracle's answer; the same for every layout and ring size."""
    given = rounded(case, tc.inputs(case))
    return given, tc.reference(case, given)


def _key(case: tc.Case) -> tc.Case:
    return replace(case, ranks=1, layout=tc.LAYOUTS[0])


@lru_cache(maxsize=64)
def _dense_errors(case: tc.Case) -> Errors:
    from ringspun.testing import torch as tt

    given, ref = _oracle(_key(case))
    return errors(tt.run_dense(case, given), ref)


@lru_cache(maxsize=64)
def _loopback_errors(case: tc.Case) -> Errors:
    from ringspun.testing import torch as tt

    given, ref = _oracle(_key(case))
    return errors(tt.run_ring(case, given), ref)


@lru_cache(maxsize=64)
def _yardstick_errors(case: tc.Case) -> Errors:
    given, ref = _oracle(_key(case))
    return errors(yardstick.dense(case, given), ref)


@lru_cache(maxsize=64)
def _device_errors(case: tc.Case) -> Errors:
    from ringspun.testing import jax as tj

    given, ref = _oracle(_key(case))
    return errors(tj.run_ring(case, given), ref)


def _errors_on_rank(rank: int, case: tc.Case) -> Errors:
    """On a rank of a pool of processes; every rank gathers the whole result, rank 0's is reported."""
    from ringspun.testing import torch as tt
    from ringspun.torch import ContextParallel

    given, ref = _oracle(_key(case))
    return errors(tt.run_ring(case, given, ContextParallel(layout=case.layout, timeout_s=60)), ref)


def _progress(row: dict[str, Any]) -> None:
    worst = max(row["error"].values())
    state = "ok  " if row["ok"] else "FAIL"
    what = f"R={row['ranks']} S={row['seq_len']} {row['dtype']} {row['layout']} {row['mask'][:60]}"
    typer.echo(f"{state} {worst:.1e} {what}")


def _report(driver: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    worst: dict[str, dict[str, float]] = {}
    for row in results:
        mine = worst.setdefault(row["dtype"], dict.fromkeys(TENSORS, 0.0))
        for name in TENSORS:
            mine[name] = max(mine[name], row["error"][name])
    passed = sum(r["ok"] for r in results)
    return {
        "ok": passed == len(results) and bool(results),
        "count": len(results),
        "passed": passed,
        "driver": driver,
        "python": sys.version.split()[0],
        **framework_version((driver,)),
        "worst_error": worst,
        "cases": results,
    }
