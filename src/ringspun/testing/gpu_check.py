"""Certify the kernels of a GPU, and measure them: `make gpu-check`, or

python -m ringspun.testing.gpu_check [--out benchmarks/results] [--device cpu --quick]

PyTorch 2.11 or newer, NumPy and jaxtyping are all it needs; it takes less than 5 minutes. Without a GPU it says so and
ends well. It ends with 1 where a kernel is wrong; speed and memory below their bars are told, no failure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import ringspun
from ringspun.testing.gpu.certifying import FAILED, Outcome, cases, certified
from ringspun.testing.gpu.results import Results
from ringspun.testing.gpu.timing import REPEATS, Device, Measure, Row, timed, works
from ringspun.torch.kernels import Kernel, kernels_on

BUDGET_S = 280.0
CERTIFYING = 0.4
"""Of the budget at most; the rest is for timing."""
SLOW = ("eager",)
"""Kernels that are certified, not timed."""


def main(argv: Sequence[str] | None = None, *, measure: Measure | None = None) -> int:
    """Check the device; the exit status.

    Args:
        argv: default the command line's. measure: default `Device`; another for tests.
    """
    asked = _parser().parse_args(argv)
    name = asked.device or ("cuda" if torch.cuda.is_available() else "")
    if not name:
        print("gpu-check: there is no GPU that PyTorch can use here; nothing was certified or measured.")
        return 0
    device, start = torch.device(name), time.monotonic()
    here = kernels_on(device.type)
    machine = describe(device)
    print("gpu-check: " + ", ".join(machine.values()))
    outcomes, left_out = _certify(here, device, asked.quick, start + CERTIFYING * asked.budget_s)
    others = [] if asked.quick else [k.name for k in here[1:] if k.name not in SLOW]
    left = asked.budget_s - (time.monotonic() - start)
    measure = measure or Device(device, 1 if asked.quick else REPEATS)
    rows = timed(works(others, quick=asked.quick), measure, budget_s=left, told=_tell)
    command = "python -m ringspun.testing.gpu_check " + " ".join(sys.argv[1:] if argv is None else argv)
    results = Results(machine, command.strip(), tuple(outcomes), tuple(rows), left_out)
    print("\n" + results.page())
    if asked.out is not None:
        print("written: " + ", ".join(map(str, write(results, asked.out, datetime.date.today()))))
    return 0 if results.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Certify the kernels of a GPU, and measure them.")
    parser.add_argument("--device", help="what to check (default: cuda, if there is one)")
    parser.add_argument("--quick", action="store_true", help="few and tiny cases, for a look at the command itself")
    parser.add_argument("--out", type=Path, help="folder for the page and the data (default: they are printed alone)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds it may take (default: %(default)s)")
    return parser


def describe(device: torch.device) -> dict[str, str]:
    """Device and versions, in words."""
    found = {"ringspun": ringspun.__version__, "torch": torch.__version__, "numpy": np.__version__}
    if device.type != "cuda":
        return {"device": device.type, **found}
    memory_gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    major, minor = torch.cuda.get_device_capability(device)
    what = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}, {memory_gib:.0f} GiB"
    cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    try:
        from torch.nn.attention import current_flash_attention_impl  # not in every release

        flash = current_flash_attention_impl() or "FA2"
    except ImportError:
        flash = "FA2"
    return {"device": what, **found, "CUDA": str(torch.version.cuda), "cuDNN": str(cudnn), "flash": flash}


def _certify(kernels: Sequence[Kernel], device: torch.device, quick: bool, end: float) -> tuple[list[Outcome], int]:
    """All cases of all kernels, as far as time goes; and how many it did not reach."""
    found: list[Outcome] = []
    waiting = [case for k in kernels for case in cases(k.name, quick=quick, few=k.by_name_only)]
    for case in waiting:
        if time.monotonic() >= end:
            print(f"  {len(waiting) - len(found)} cases left out: no time")
            break
        found.append(certified(case, device))
        if found[-1].status == FAILED:
            print(f"  FAILED {found[-1].case}: {found[-1].reason}")
    print(f"  {len(found)} cases, {sum(o.status == FAILED for o in found)} wrong")
    return found, len(waiting) - len(found)


def _tell(row: Row) -> None:
    words = row.reason if row.measured is None else f"ratio {row.measured.ratio:.3f}"
    print(f"  {row.kernel} R={row.work.ranks} {row.work.seq_len // row.work.ranks:,} tokens per rank: {words}")


def write(results: Results, folder: Path, date: datetime.date) -> tuple[Path, Path]:
    """The page and the data, named by day and device."""
    device = re.sub(r"[^a-z0-9]+", "-", results.machine["device"].split(",")[0].lower()).strip("-")
    folder.mkdir(parents=True, exist_ok=True)
    page, data = (folder / f"{date}-gpu_check-{device}.{kind}" for kind in ("md", "json"))
    page.write_text(results.page(), encoding="utf-8")
    data.write_text(json.dumps(results.to_dict(), indent=1) + "\n", encoding="utf-8")
    return page, data


if __name__ == "__main__":
    sys.exit(main())
