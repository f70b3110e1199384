"""A mutation run over the core: one small fault at a time, each of which the tests must notice.

    python benchmarks/mutation.py                     # 300 mutants: a table by file and by operator, and the survivors
    python benchmarks/mutation.py --only tiles.py:91  # every mutant of a file or of one of its lines

Masks, regions, cut, needs, tiles, schedules and both softmax monoids. Every mutant runs in a child, forked from a
process that has imported NumPy, torch, pytest and Hypothesis but nothing of ours: a child pays for our own imports and
the tests alone. It draws few Hypothesis examples and stops at the first failure. Nothing is written to the tree.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis.extra.numpy  # noqa: F401 (so that no child need import it)
import pytest
import torch  # noqa: F401
from hypothesis import Phase, settings

from mutants import SOURCE, Mutant, Planted, each, mutated

ROOT = SOURCE.parent
MASKS = sorted((SOURCE / "ringspun/core/mask").glob("*.py"))
PLAN = "tiles", "lower", "sides", "schedule"
SUITES = {
    **dict.fromkeys(MASKS, ("documents", "blocks", "row_masks", "masks", "sides")),
    SOURCE / "ringspun/core/regions.py": ("regions", "masks", "lower", "tiles"),
    **{SOURCE / f"ringspun/core/{name}.py": PLAN for name in ("cut", "needs", "schedule", "tiles")},
    SOURCE / "ringspun/core/softmax.py": ("softmax",),
    SOURCE / "ringspun/torch/softmax.py": ("merge_and_one_off_calls",),
}
"""The files to change, each with the tests that it must not pass."""
SLOW = (
    "parent or 8192 or M19 or 16_million or block_stripes or lowered_plans or nothing_at_most_steps or another_process"
)
EXAMPLES = 25
CPU_SECONDS = 10
"""An endless loop is ended after so many."""
MEMORY = 8 << 30
BROKEN = 99
OPTIONS = "-x -o addopts= -p no:cacheprovider -p no:unraisableexception --assert=plain --hypothesis-profile=mutation"


def run(mutant: Mutant | None, path: Path) -> int:
    """The exit status of the tests of `path`, in this process; without a mutant those of the code as it is."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    if mutant is not None:
        sys.meta_path.insert(0, Planted(path, mutated(mutant)))
    folder = "torch" if "torch" in path.parts else "core"
    tests = [f"tests/{folder}/test_{name}.py" for name in sorted(SUITES[path], key=lambda name: name != path.stem)]
    return int(pytest.main([*OPTIONS.split(), "-k", f"not ({SLOW})", *tests]))


def in_a_child(mutant: Mutant | None, path: Path) -> int:
    """The process that runs the tests of `path`; it ends with their status, or with `BROKEN`."""
    pid = os.fork()
    if pid == 0:
        status = BROKEN
        try:
            status = run(mutant, path)
        finally:
            os._exit(status)
    return pid


def ended() -> tuple[int, int, float]:
    """The next child to end, its exit status (negative: the signal that ended it) and its CPU seconds."""
    pid, status, used = os.wait4(-1, 0)
    return pid, os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime


def check_suites() -> None:
    """Raise unless all tests pass without a mutant; print what they cost."""
    for path in {SUITES[path]: path for path in SUITES}.values():
        in_a_child(None, path)
        _, status, seconds = ended()
        print(f"{', '.join(SUITES[path])}: {seconds:.1f} s of CPU", file=sys.stderr)
        if status != 0:
            raise SystemExit(f"The tests of {path.name} must pass without a mutant; they ended with {status}.")


def run_all(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, int, float]]:
    """Each mutant with its exit status and CPU seconds, as they end."""
    waiting, running = mutants[::-1], dict[int, Mutant]()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[in_a_child(mutant, mutant.path)] = mutant
        pid, status, seconds = ended()
        if status == BROKEN:
            raise SystemExit(f"A mutant could not be planted: {running[pid]}.")
        yield running.pop(pid), status, seconds


def table(title: str, results: list[tuple[str, bool]]) -> Iterator[str]:
    yield from ("", f"| {title} | mutants | killed | |", "|---|---|---|---|")
    tried, killed = Counter(key for key, _ in results), Counter(key for key, dead in results if dead)
    for key in sorted(tried):
        yield f"| {key} | {tried[key]} | {killed[key]} | {killed[key] / tried[key]:.0%} |"
    yield f"| all | {tried.total()} | {killed.total()} | {killed.total() / tried.total():.1%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="how many mutants are drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="at a time")
    parser.add_argument("--only", default="", help="FILE or FILE:LINE: every mutant of it")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(SOURCE), str(ROOT)]
    sys.dont_write_bytecode = True
    phases = (Phase.explicit, Phase.generate)  # nobody reads a smaller example
    settings.register_profile(
        "mutation", derandomize=True, database=None, deadline=None, max_examples=EXAMPLES, phases=phases
    )
    gc.freeze()  # or every child copies all of it
    check_suites()
    mutants = [found[0] for path in SUITES for found in each(path)]
    chosen = [m for m in mutants if f"{m.path.name}:{m.line}:".startswith(f"{options.only}:")]
    if not options.only:
        chosen = random.Random(options.seed).sample(mutants, options.count)
    results = []
    for mutant, status, seconds in run_all(chosen, options.jobs):
        place = f"{mutant.path.relative_to(SOURCE / 'ringspun')}"
        results.append((mutant, place, status, seconds))
        word = {0: "survived", 1: "killed"}.get(status, f"killed ({status})")
        print(
            f"{len(results)}/{len(chosen)} {word} {place}:{mutant.line} {mutant.operator}: {mutant.change}",
            file=sys.stderr,
        )
    print(f"{len(mutants):,} mutants in all; {len(chosen)} drawn with seed {options.seed}.")
    for title, key in (("file", lambda m, place: place), ("operator", lambda m, place: m.operator)):
        print(*table(title, [(key(m, place), status != 0) for m, place, status, _ in results]), sep="\n")
    by_status = Counter(status for _, _, status, _ in results)
    loops, late = by_status[-signal.SIGXCPU] + by_status[-signal.SIGKILL], by_status[2] + by_status[3] + by_status[4]
    whole = sorted(seconds for _, _, status, seconds in results if status == 0)
    print(f"\nOf the killed {loops} looped for {CPU_SECONDS} s, {late} failed to import.", end=" ")
    print(f"A suite that passes: {whole[len(whole) // 2]:.1f} s of CPU, at most {whole[-1]:.1f}." if whole else "")
    print("\nSurvivors:\n")
    for mutant, place, status, _ in sorted(results, key=lambda r: (r[1], r[0].line)):
        if status == 0:
            print(f"- `{place}:{mutant.line}` {mutant.operator}: `{mutant.change}`")


if __name__ == "__main__":
    main()
