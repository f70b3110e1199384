"""Faults by the thousand: what each kind does to attention, and whether it is found. `make faults`

python benchmarks/faults.py                                  # 10,000 in one thread, 200 between processes; a table
python benchmarks/faults.py --loopback 500 --gloo 20         # fewer

Three laws are checked; the script fails where one does not hold. With checksums no wrong number is returned; no process
stays in a call longer than its timeout and 2 seconds; what is only late is bit for bit right. The same damage to bytes
is tried with headers alone, to see that it bites.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from ringspun import Causal, Contiguous, Full, Window
from ringspun.testing.campaign import GRACE_S, HUNG, RIGHT, WRONG, Outcome, Trial, on_gloo, on_loopback, trials
from ringspun.testing.faults import KINDS, Delay, Flip, Stale, Swap, Truncate
from ringspun.testing.orders import every_order
from ringspun.torch import ContextParallel

WORDS = """Each trial is one call, forward and backward, of random mask, layout, length and ring,
with `checks="checksum"`, in which one message suffers one fault. Found: a process raised (or, "died", was ended: by the
fault, or by gloo, which ends a process that gets a longer message than it waits for). Harmless: all results are bit for
bit right, as when a message is only late, or comes once more where nobody waits for it. The same damage to bytes is
also tried with headers alone."""
SIZES = (2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8)
"""Of rings in one thread, in turn; a trial's time grows with the square."""
DAMAGE = (Truncate, Flip, Swap, Stale)
SMALL = ((2, Full(), False), (2, Causal(), True), (3, Window(2), False), (3, Causal(), False), (4, Window(2), False))
"""Rings of which all orders are tried: ranks, mask, whether backward too."""
Found = dict[str, list[tuple[Trial, Outcome]]]


def by_kind(many: Iterable[tuple[Trial, Outcome]], total: int) -> Found:
    """Outcomes of faults that struck, by kind."""
    found: Found = defaultdict(list)
    start = time.monotonic()
    for number, (trial, outcome) in enumerate(many, 1):
        if outcome.struck:
            found[type(trial.fault).__name__].append((trial, outcome))
        if number % max(1, total // 20) == 0:
            print(f"{number} of {total} in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return found


def broken_laws(found: Found) -> list[str]:
    """What must not happen and did."""
    laws = []
    for kind, told in found.items():
        for trial, outcome in told:
            late = outcome.longest_s > trial.timeout_s + GRACE_S
            if outcome.result in (WRONG, HUNG) or late or (kind == Delay.__name__ and outcome.result != RIGHT):
                laws.append(f"{outcome} of {trial}")
    return laws


def loopback_table(headers: Found, sums: Found) -> list[str]:
    """Per kind: with headers alone, and with checksums."""
    lines = [
        "| kind | injected | found | harmless | wrong number | with headers alone: found | harmless | wrong number |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind in [k.__name__ for k in KINDS] + ["all"]:
        told = _of(sums, kind)
        cells = [len(told), *_counts(told), *(_counts(_of(headers, kind)) if _of(headers, kind) else [""] * 3)]
        lines.append(_row(kind.lower(), *cells))
    return lines


def gloo_table(sums: Found) -> list[str]:
    """Per kind: what was found, by which error, and when."""
    lines = [
        "| kind | injected | found | harmless | wrong number | first error after (median, longest; s) | "
        "last rank's error after (longest; s) | errors |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for kind in [k.__name__ for k in KINDS] + ["all"]:
        told = _of(sums, kind)
        errors = [o for o in told if o.detected]
        names = sorted({r for o in errors for r in o.results} - {RIGHT})
        first = [o.first_s for o in errors] or [0.0]
        last = max([o.last_s for o in errors] or [0.0])
        times = f"{median(first):.2f}, {max(first):.2f}", f"{last:.2f}"
        lines.append(_row(kind.lower(), len(told), *_counts(told), *times, ", ".join(names)))
    return lines


def _of(found: Found, kind: str) -> list[Outcome]:
    return [o for name, told in found.items() for _, o in told if kind in (name, "all")]


def _counts(told: list[Outcome]) -> tuple[int, int, int]:
    """Found, harmless, wrong."""
    return sum(o.detected for o in told), sum(o.result == RIGHT for o in told), sum(o.result == WRONG for o in told)


def _row(*cells: object) -> str:
    return "| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |"


def orders() -> list[str]:
    """How many orders of events there are, and that all give the same bits."""

    from ringspun import Causal, Full, Window

    lines = ["| ring | mask | calls | orders |", "|--:|---|---|--:|"]
    small = (
        (2, Full(), False),
        (2, Causal(), True),
        (3, Window(2), False),
        (3, Causal(), False),
        (4, Window(2), False),
    )
    for ranks, mask, backward in small:
        x = [t.requires_grad_() for t in torch.randn(3, 1, 1, 2 * ranks, 2).unbind()]
        first, count = None, 0
        for ring in every_order(ranks):
            out = ContextParallel(ring, layout=Contiguous()).plan(2 * ranks, mask).attention(*x)
            found = [out, *torch.autograd.grad(out.square().sum(), x)] if backward else [out]
            first = found if first is None else first
            assert all(map(torch.equal, found, first)), (ranks, mask, count)
            count += 1
        lines.append(_row(ranks, mask, "forward and backward" if backward else "forward", count))
    return lines


def main() -> None:
    """Run, print a markdown table, fail where a law is broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loopback", type=int, default=10_000, help="trials in one thread, of each level of checks")
    parser.add_argument("--gloo", type=int, default=207, help="trials between processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the tables; they are printed in any case")
    asked = parser.parse_args()
    many = list(trials(asked.loopback, seed=asked.seed, ranks=SIZES))
    sums = by_kind(on_loopback(many), len(many))
    damage = [replace(t, checks="header") for t in many if isinstance(t.fault, DAMAGE)]
    headers = by_kind(on_loopback(damage), len(damage))
    some = sorted(trials(asked.gloo, seed=asked.seed + 1, ranks=range(2, 9)), key=lambda t: t.case.ranks)
    between = by_kind(on_gloo(some), len(some))
    laws = broken_laws(sums) + broken_laws(between)
    text = "\n".join(
        [
            "# What faults do to attention, and whether they are found\n\n    python benchmarks/faults.py\n",
            f"{os.cpu_count()} cores, torch {torch.__version__}. {WORDS}\n",
            "## In one thread, random orders of events, rings of 2 to 8\n",
            *loopback_table(headers, sums),
            "\n## Between processes over gloo, rings of 2 to 8, timeout 2 s\n",
            *gloo_table(between),
            "\n## All orders of events of small rings, without faults: the same bits in each\n",
            *orders(),
            f"\nLaws broken: {len(laws)}.",
            *laws,
        ]
    )
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(bool(laws))


if __name__ == "__main__":
    main()
