"""`python -m ringspun.testing.gpu_check`: what it plans, judges and reports, by a made-up measure; and the whole of it
on this CPU, in a process that finds PyTorch, NumPy, jaxtyping and what these need, and nothing else."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ringspun import Causal, Zigzag
from ringspun.errors import KernelRefused
from ringspun.testing import gpu_check
from ringspun.testing.cases import Shape
from ringspun.testing.gpu import certifying
from ringspun.testing.gpu.certifying import FAILED, PASSED, REFUSED, GpuCase, Outcome, cases, certified
from ringspun.testing.gpu.memory import expected_peak
from ringspun.testing.gpu.results import Results
from ringspun.testing.gpu.timing import ADDED, GIVEN, Device, Marked, Measured, Row, flops_of, timed, works
from ringspun.testing.work import Work
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.execution import wire_of
from ringspun.torch.kernels import AtenCpu, AtenFlash
from ringspun.torch.kernels.aten_flash import FlashOps

CPU = torch.device("cpu")
SMALL = GpuCase("aten_cpu", 2, Causal(), shape=Shape(1, 4, 2, 16, 16), seq_len=41)
WORK = Work(4, 64, 2, 2, 16, "bfloat16", Causal(), Zigzag())
ALONE = """
import sys
allowed = set(sys.argv.pop(1).split(",")) | sys.stdlib_module_names
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *rest):
        own = name.split(".")[0] in allowed or name.startswith("_sysconfigdata")
        return self.finder.find_spec(name, *rest) if own else None
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
from ringspun.testing.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""
NEEDED = ("torch", "functorch", "torchgen", "numpy", "jaxtyping", "ringspun")
THEIRS = (
    "filelock",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "wadler_lindig",
)
"""What PyTorch, NumPy and jaxtyping are installed with."""


def measured(work: Work, ratio: float = 0.95, memory: float = 1.0) -> Measured:
    return Measured(
        "aten_flash",
        "flash",
        (1.0, 2.0, 1.5),
        (ratio, 2 * ratio, 1.5 * ratio),
        int(memory * 1000),
        1000,
        10**12,
        0.8,
        0.1,
    )


@pytest.mark.timeout(120)
def test_the_whole_of_it_with_no_more_than_it_needs(tmp_path):
    args = [
        sys.executable,
        "-c",
        ALONE,
        ",".join(NEEDED + THEIRS),
        "--device",
        "cpu",
        "--quick",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(args, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    page, data = sorted(tmp_path.iterdir(), reverse=True)
    assert page.suffix == ".md" and "verdict: ok" in page.read_text() and str(page) in done.stdout
    found = json.loads(data.read_text())
    assert found["ok"] and {c["status"] for c in found["certified"]} == {PASSED}
    assert {c["kernel"] for c in found["certified"]} == {"aten_cpu", "eager"}
    assert [(r["kernel"], r["ranks"]) for r in found["timed"]] == [("aten_cpu", 4), ("aten_cpu", 1)]
    assert all(min(r["ring_s"] + r["alone_s"]) > 0 and r["peak_bytes"] > 0 for r in found["timed"])
    assert all(0 < r["kernel_share"] + r["merge_share"] <= 1 for r in found["timed"])


def test_without_a_gpu_it_says_so_and_ends_well(capsys):
    assert gpu_check.main([]) == 0
    assert "there is no GPU that PyTorch can use here; nothing was certified" in capsys.readouterr().out


def test_what_is_certified_is_what_the_page_promises():
    found = list(cases("aten_flash"))
    assert {c.ranks for c in found} == {1, 2, 4, 8} and {c.dtype for c in found} == {"bfloat16", "float16", "float32"}
    assert {c.shape.head_size for c in found} >= {64, 128, 256}
    assert any(c.shape.value_size != c.shape.head_size for c in found)
    assert any(c.shape.kv_heads == 1 < c.shape.heads for c in found)
    assert len({str(c.mask) for c in found}) >= 10 and len({str(c.layout) for c in found}) >= 3
    assert {c.backward for c in found} == {"keys", "queries"} and {c.lse_gradient for c in found} == {True, False}
    assert all(c.mask.as_array(c.seq_len).any(1).all() for c in found), "PyTorch's own gives NaN where no key is seen"
    assert len({str(c) for c in found}) == len(found)


class Wrong(AtenCpu):
    """Off by a little, in one tensor."""

    def __init__(self, which: str, by: float) -> None:
        self.which, self.by = which, by

    def forward(self, block, tiles):
        for rows, out, lse in super().forward(block, tiles):
            yield rows, out * (1 + self.by * (self.which == "out")), lse + self.by * (self.which == "lse")

    def backward(self, block, saved, tiles):
        for g in super().backward(block, saved, tiles):
            yield g._replace(dk=g.dk * (1 + self.by * (self.which == "dk")))


@pytest.mark.parametrize("which", ["out", "lse", "dk"])
def test_a_kernel_that_is_a_little_wrong_fails_there(which):
    assert certified(SMALL, CPU).status == PASSED
    found = certified(replace(SMALL, kernel=Wrong(which, 1e-3 if which == "lse" else 0.02)), CPU)
    assert found.status == FAILED and which in found.reason and found.error > found.bar


class Deaf(AtenCpu):
    """Knows no gradient of lse."""

    def backward(self, block, saved, tiles):
        known = saved if saved.dlse is None else saved._replace(delta=saved.delta + saved.dlse, dlse=None)
        return super().backward(block, known, tiles)


def test_a_kernel_that_forgets_the_gradient_of_lse_fails():
    """The one call, which has none, is judged without it: else its error would be the whole of what is forgotten."""
    case = replace(SMALL, lse_gradient=True)
    assert certified(case, CPU).status == PASSED
    found = certified(replace(case, kernel=Deaf()), CPU)
    assert found.status == FAILED and found.reason == "dq, dk beyond the bar"


def test_a_device_that_fails_from_there_on_is_no_end_of_it(monkeypatch):
    """After an illegal access every call to CUDA raises, those of the check's own too."""

    def fails(*_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(certifying, "_tensors", fails)
    assert certified(SMALL, CPU).status == FAILED

    def measure(work: Work, kernel: str) -> Measured:
        return fails()

    (row,) = timed([(WORK, "auto")], measure, budget_s=45.0, clock=lambda: 0.0)
    assert row.reason == "raised RuntimeError: CUDA error: an illegal memory access was encountered"
    assert not bars_of(row).ok and bars_of(replace(row, reason="out of memory")).ok


def test_a_kernel_that_raises_fails_and_one_that_refuses_is_said_to():
    class Broken(AtenCpu):
        def forward(self, block, tiles):
            raise RuntimeError("no such plan")

    found = certified(replace(SMALL, kernel=Broken()), CPU)
    assert (found.status, found.reason) == (FAILED, "raised RuntimeError: no such plan")
    assert certified(replace(SMALL, kernel="aten_flash"), CPU).status == REFUSED


def test_time_goes_to_what_fits_and_the_rest_is_said_to_be_left_out():
    """A device is taken for slow until its first work tells how fast it is."""
    now, told = [0.0], []

    def measure(work: Work, kernel: str) -> Measured:
        now[0] += 10.0
        if kernel == "small":
            raise torch.cuda.OutOfMemoryError("full")
        if kernel == "refused":
            raise KernelRefused("no")
        return replace(measured(work), ring_s=(0.5,), alone_s=(0.5,), flops=flops_of(work))

    what = [(WORK, "auto"), (WORK, "small"), (WORK, "refused"), (replace(WORK, seq_len=6400), "auto"), (WORK, "auto")]
    rows = timed(what, measure, budget_s=45.0, clock=lambda: now[0], told=told.append)
    assert rows == told and [row.measured is not None for row in rows] == [True, False, False, False, True]
    assert rows[1].reason == "out of memory" and rows[2].reason == "no"
    assert rows[3].reason.startswith("skipped: about 4") and rows[3].reason.endswith(" s, and 15 were left")


def test_the_first_work_is_that_of_the_bar_and_every_kernel_has_it():
    first, *rest = works(["aten_efficient", "aten_cudnn"])
    assert first[1] == "auto" and (first[0].ranks, first[0].seq_len, first[0].head_size) == (4, 65536, 128)
    assert rest[:2] == [(first[0], "aten_efficient"), (first[0], "aten_cudnn")]
    assert {(w.ranks, w.seq_len // w.ranks) for w, _ in rest} == {
        (4, 2**14),
        (4, 2**13),
        (4, 2**16),
        *((r, 2**14) for r in (1, 2, 8)),
    }


def test_flops_are_those_of_the_mask():
    """Causal: n (n + 1) / 2 pairs, 7 products of 2 D per pair and head, whatever the ring."""
    for ranks in (1, 4):
        assert flops_of(replace(WORK, ranks=ranks)) == 7 * 2 * 16 * 2 * (64 * 65 // 2)


def bars_of(*rows: Row, outcomes: tuple[Outcome, ...] = (Outcome(SMALL, PASSED, "dq", 0.1, 0.2),)) -> Results:
    return Results({"device": "NVIDIA Made-Up, and more"}, "command", outcomes, rows)


def test_bars_are_said_to_be_met_or_missed():
    wide = replace(WORK, seq_len=4 * 16384)
    good, bad = (bars_of(Row(wide, "auto", measured(wide, r, m))) for r, m in ((0.91, 1.04), (0.89, 0.94)))
    assert [bar.rsplit(" ", 1)[-1] for bar in good.bars()] == ["met", "met"]
    assert [bar.rsplit(" ", 1)[-1] for bar in bad.bars()] == ["MISSED", "MISSED"]
    assert "speed at R=4, 16,384 tokens per rank: 0.890, bar >= 0.9: MISSED" in bad.page()
    assert bars_of(Row(WORK, "auto", measured(WORK))).bars() == [
        "memory at R=4, 16 tokens per rank: +0.0%, bar within 5%: met"
    ]
    assert bars_of(Row(wide, "aten_cudnn", measured(wide)), Row(wide, "auto", reason="out of memory")).bars() == []


def test_a_page_and_data_of_everything(tmp_path):
    failed = Outcome(replace(SMALL, kernel="eager"), FAILED, "dv", float("nan"), 0.2, "dv beyond the bar")
    results = bars_of(Row(WORK, "auto", measured(WORK)), Row(WORK, "aten_cudnn", reason="no"),
                      outcomes=(Outcome(SMALL, PASSED, "dq", 0.1, 0.2), failed))  # fmt: skip
    assert not results.ok and not bars_of(outcomes=()).ok, "nothing certified is no success"
    page, data = gpu_check.write(results, tmp_path / "new", datetime.date(2026, 11, 30))
    assert page.name == "2026-11-30-gpu_check-nvidia-made-up.md"
    text = page.read_text()
    assert "| `aten_cpu` | 1 | 0 | 0 | 0.50 of the bar: dq, aten_cpu R=2 causal" in text and "FAILED eager R=2" in text
    assert "| `aten_flash` | 4 | 16 | 1.5000 | 1.4250 | flash | 0.7 | 0.7 | 0.950 | 0.0 | 0.0 | 80.0% | 10.0% |" in text
    assert "| `aten_cudnn` | 4 | 16 | no |" in text
    found = json.loads(data.read_text())
    assert found["certified"][1]["error"] is None and found["timed"][0]["ratio"] == pytest.approx(0.95)


def test_a_wrong_kernel_ends_it_with_1(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "cases", lambda kernel, quick, few: iter([SMALL]))
    monkeypatch.setattr(gpu_check, "certified", lambda case, device: Outcome(case, FAILED, "dq", 1.0, 0.1, "dq beyond"))
    assert gpu_check.main(["--device", "cpu", "--quick"], measure=lambda work, kernel: measured(work)) == 1
    assert "FAILED aten_cpu R=2 causal" in capsys.readouterr().out
    monkeypatch.setattr(gpu_check, "certified", lambda case, device: Outcome(case, PASSED, "dq", 0.01, 0.1))
    assert gpu_check.main(["--device", "cpu", "--quick"], measure=lambda work, kernel: measured(work)) == 0
    assert gpu_check.main(["--device", "cpu", "--quick", "--budget-s", "0"], measure=lambda *_: 1 / 0) == 1
    said = capsys.readouterr().out
    assert "2 cases left out: no time" in said and "Left out, for want of time: 2 cases." in said


class NoWork(AtenFlash):
    """Results of the right sizes, and nothing beside them in memory."""

    devices = None

    def __init__(self) -> None:
        super().__init__(FlashOps(self._forward, self._backward))

    def refuses(self, call):
        return None

    @staticmethod
    def _forward(q: Tensor, k: Tensor, v: Tensor, *_, **__):
        return torch.empty_like(q), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)

    @staticmethod
    def _backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_, **__):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(1, 2), (4, 2), (4, 1)])
def test_the_expected_peak_is_what_a_loopback_takes(ranks, kv_heads):
    """Within 1 %, but for what a kernel works in, which this one does not."""
    work = Work(ranks, ranks * 512, 2, kv_heads, 64, "bfloat16", Causal(), Zigzag())
    plan = ContextParallel(Loopback(ranks), layout=Zigzag()).plan(work.seq_len, work.mask)
    device = Device(CPU)
    q, k, v, dout = device._tensors(work)
    kernel = NoWork()
    peak = device._peak(
        lambda: torch.autograd.grad(plan.attention(q, k, v, kernel=kernel), (q, k, v), dout), (q, k, v, dout), 0
    )
    wire = wire_of(q, k, v)
    assert peak == pytest.approx(expected_peak(plan._everybody, wire, "no work"), rel=0.01)
    assert expected_peak(plan._everybody, wire, "aten_flash") >= expected_peak(plan._everybody, wire, "no work")


def test_marks_tell_the_kernel_from_what_is_done_with_its_results():
    now = [0.0]

    def mark() -> float:
        now[0] += 1.0  # every mark a second after the one before it
        return now[0]

    marked = Marked(AtenCpu(), mark)
    plan = ContextParallel(Loopback(3), layout=Zigzag()).plan(48, Causal())
    x = torch.randn(1, 1, 48, 8, requires_grad=True)
    plan.attention(x, x, x, kernel=marked).sum().backward()
    asked, given, added = (sum(kind == what for kind, _ in marked.marks) for what in ("asked", GIVEN, ADDED))
    elapsed = lambda first, last: last - first  # noqa: E731
    assert asked >= 2 * 9 and given == added > 0
    assert marked.seconds(GIVEN, elapsed) == given and marked.seconds(ADDED, elapsed) == added
