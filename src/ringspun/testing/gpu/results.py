"""What came of a check of a GPU: as a page of Markdown and as plain data."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ringspun.testing.gpu.certifying import FAILED, PASSED, REFUSED, Outcome
from ringspun.testing.gpu.memory import ACCOUNTED
from ringspun.testing.gpu.timing import RAISED, Measured, Row
from ringspun.testing.report import plain

SPEED_BAR = 0.90
"""Of one call's speed, that a ring of 4 has at 16K tokens per rank, bfloat16, D=128, causal."""
MEMORY_BAR = 0.05
"""How far a measured peak may be from the accounting."""
COLUMNS = (
    *("kernel", "ranks", "tokens per rank", "ring s", "one call s", "of", "ring TFLOP/s", "one call TFLOP/s", "ratio"),
    *("peak MiB", "expected MiB", "in the kernel", "merging"),
)


@dataclass(frozen=True)
class Results:
    """Everything.

    Args:
        machine: device and versions, in words. command: that made them. outcomes: of the certified cases. rows: timed.
        left_out: cases that there was no time for.
    """

    machine: dict[str, str]
    command: str
    outcomes: tuple[Outcome, ...]
    rows: tuple[Row, ...]
    left_out: int = 0

    @property
    def ok(self) -> bool:
        """Whether something was certified and nothing was wrong, nor raised while it was timed."""
        found = Counter(o.status for o in self.outcomes)
        return found[PASSED] > 0 and found[FAILED] == 0 and not any(r.reason.startswith(RAISED) for r in self.rows)

    def bars(self) -> list[str]:
        """The bars of speed and memory, and whether they were met, in words; of the works that were measured."""
        said = []
        for row in self.rows:
            found, work = row.measured, row.work
            if found is None or row.kernel != "auto":
                continue
            where = f"R={work.ranks}, {work.seq_len // work.ranks:,} tokens per rank"
            if work.ranks == 4 and work.seq_len == 4 * 16384:
                said.append(
                    _bar(f"speed at {where}", found.ratio >= SPEED_BAR, f"{found.ratio:.3f}", f">= {SPEED_BAR}")
                )
            off = found.memory_ratio - 1
            if found.kernel == ACCOUNTED and work.ranks != 2:  # of 2 ranks the accounting is coarse
                said.append(
                    _bar(f"memory at {where}", abs(off) <= MEMORY_BAR, f"{off:+.1%}", f"within {MEMORY_BAR:.0%}")
                )
        return said

    def to_dict(self) -> dict[str, Any]:
        """As plain data that `json` writes."""
        rows = [_plain_row(row) for row in self.rows]
        data = {
            "machine": self.machine,
            "command": self.command,
            "ok": self.ok,
            "bars": self.bars(),
            "left_out": self.left_out,
        }
        return dict(plain({**data, "certified": [_plain_outcome(o) for o in self.outcomes], "timed": rows}))

    def page(self) -> str:
        """As a page."""
        head = ["# GPU check", "", *(f"- {name}: {value}" for name, value in self.machine.items())]
        head += [f"- command: `{self.command}`", f"- verdict: {'ok' if self.ok else 'FAILED'}", ""]
        return "\n".join([*head, *self._certified(), "", *self._timed(), ""])

    def _certified(self) -> list[str]:
        lines = ["## Correctness", ""]
        lines += [
            "Rings of virtual ranks against dense float64; a bar is twice the error of one call in the same dtype.",
            "",
        ]
        lines += ["| kernel | passed | failed | refused | nearest to its bar |", "| --- | --- | --- | --- | --- |"]
        for kernel in dict.fromkeys(o.case.kernel for o in self.outcomes):
            mine = [o for o in self.outcomes if o.case.kernel == kernel]
            count = Counter(o.status for o in mine)
            judged = [o for o in mine if o.bar]
            near = max(judged, key=lambda o: o.error / o.bar, default=None)
            words = "" if near is None else f"{near.error / near.bar:.2f} of the bar: {near.tensor}, {near.case}"
            lines.append(f"| `{kernel}` | {count[PASSED]} | {count[FAILED]} | {count[REFUSED]} | {words} |")
        failures = [o for o in self.outcomes if o.status == FAILED]
        lines += ["", f"Left out, for want of time: {self.left_out} cases."] * bool(self.left_out)
        lines += [""] * bool(failures)
        lines += [f"- FAILED {o.case}: {o.reason} ({o.tensor} {o.error:.2e}, bar {o.bar:.2e})" for o in failures]
        return lines

    def _timed(self) -> list[str]:
        lines = ["## Speed and memory", ""]
        lines += [
            "Forward + backward of all virtual ranks, beside one `scaled_dot_product_attention` of as many tokens;"
        ]
        lines += ["medians of pairs in turns. Ratio: of its time to the ring's.", ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|" + " --- |" * len(COLUMNS)]
        for row in self.rows:
            where = f"{row.work.ranks} | {row.work.seq_len // row.work.ranks:,}"
            name = row.kernel if row.measured is None else row.measured.kernel
            what = row.reason if row.measured is None else _cells(row.measured)
            lines.append(f"| `{name}` | {where} | {what} |")
        return [*lines, "", *(f"- {bar}" for bar in self.bars())]


def _cells(found: Measured) -> str:
    ring, alone = (sorted(x)[len(x) // 2] for x in (found.ring_s, found.alone_s))
    mib = [f"{n / 2**20:,.1f}" for n in (found.peak_bytes, found.expected_bytes)]
    shares = [f"{x:.1%}" for x in (found.kernel_share, found.merge_share)]
    speeds = [f"{x:.1f}" for x in (found.ring_tflops, found.alone_tflops)]
    return " | ".join([f"{ring:.4f}", f"{alone:.4f}", found.alone, *speeds, f"{found.ratio:.3f}", *mib, *shares])


def _bar(what: str, met: bool, found: str, bar: str) -> str:
    return f"{what}: {found}, bar {bar}: {'met' if met else 'MISSED'}"


def _plain_outcome(outcome: Outcome) -> dict[str, Any]:
    case = outcome.case
    of_case = asdict(case) | {"mask": str(case.mask), "layout": str(case.layout)}
    return of_case | {name: x for name, x in outcome._asdict().items() if name != "case"}


def _plain_row(row: Row) -> dict[str, Any]:
    work = row.work
    what: dict[str, Any] = {"kernel": row.kernel, "ranks": work.ranks, "tokens_per_rank": work.seq_len // work.ranks}
    what |= {"heads": work.heads, "kv_heads": work.kv_heads, "head_size": work.head_size, "dtype": work.dtype}
    what |= {"mask": str(work.mask), "layout": str(work.layout), "reason": row.reason}
    found = row.measured
    if found is not None:
        derived = ("ratio", "memory_ratio", "ring_tflops", "alone_tflops")
        what |= asdict(found) | {name: getattr(found, name) for name in derived}
    return what
