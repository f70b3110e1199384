"""Torch's attentions through `certify`: our kernels, rings, and torch's own function."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import on_ranks_certify
import pytest
import torch

from ringspun import Balanced, Contiguous, Striped, Zigzag
from ringspun.core.wire import END_BYTES, HEADER_BYTES
from ringspun.testing.candidates import LocalKernel, OnRing, Sdpa
from ringspun.testing.comparison import errors
from ringspun.testing.conformance import certify
from ringspun.testing.problem import oracle, problem_of, yardstick
from ringspun.testing.suite import suite
from ringspun.testing.torch import run_dense
from ringspun.testing.yardstick import DTYPES, round_to
from ringspun.torch import ContextParallel, Loopback
from ringspun.torch.drivers.base import Transfer
from ringspun.torch.kernels import Eager
from ringspun.torch.kernels.base import Block, Gradients, Saved, StepTiles

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["aten_cpu", "eager"])
def test_our_kernels_are_right_or_refuse(kernel, dtype):
    report = certify(LocalKernel(kernel), dtype=dtype)
    assert report.ok, str(report)
    refused = {"softcap", "bias"} if kernel == "aten_cpu" else set()
    assert set(report.properties("refused")) == refused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [Contiguous(), Zigzag(), Striped()], ids=str)
def test_a_ring_in_one_thread_is_right(layout, dtype):
    report = certify(OnRing(ContextParallel(Loopback(3), layout=layout)), dtype=dtype)
    assert report.ok and not report.properties("refused"), str(report)


@pytest.mark.processes
def test_every_rank_certifies_the_ring_of_all(pools):
    wanted = ["causal", "sinks", "bias", "short sequences", "cross-attention", "rows of a batch"]
    reports = pools(3).run(on_ranks_certify.certified, Zigzag(), "float64", wanted)
    assert [r.ok for r in reports] == [True] * 3, str(reports[0])
    assert all(set(r.properties("passed")) == set(wanted) for r in reports)


def test_torchs_own_attention():
    """It gives no lse, has no softcap and no sinks, and multiplies hidden values by 0."""
    report = certify(Sdpa(SDPA))
    assert report.missing == ("lse", "dsinks")
    assert set(report.properties("refused")) == {"softcap", "sinks", "together"}
    assert report.properties("not given") == ("lse gradient",)
    assert report.properties("failed") == ("padding is never read",), str(report)


def test_a_function_without_a_scale_refuses_one():
    def plain(q, k, v, attn_mask):
        return SDPA(q, k, v, attn_mask=attn_mask)

    report = certify(Sdpa(plain, takes=()), properties=["causal", "scale", "grouped heads"])
    assert report.ok and report.properties("refused") == ("grouped heads", "scale")
    assert report["scale"].reason == "scale must not be asked for: plain has no such argument."


class OneHeadTooLarge(Eager):
    """A right forward; dk of key/value head 1 is a thousandth too large."""

    def backward(self, block: Block, saved: Saved, tiles: StepTiles) -> Iterator[Gradients]:
        for g in super().backward(block, saved, tiles):
            factor = torch.ones(g.dk.shape[1], 1, 1, dtype=g.dk.dtype)
            factor[1:2] = 1.001
            yield g._replace(dk=g.dk * factor)


def test_a_subtle_fault_of_a_kernel_is_named_by_property_tensor_and_head():
    report = certify(LocalKernel(OneHeadTooLarge()), properties=["causal"])
    (finding,) = report["causal"].trials[0].findings
    assert (finding.tensor, finding.where) == ("dk", "kv head 1 of 3")
    assert finding.looks == "1.001 times the right value"


class OldPayload(Loopback):
    """Delivers header and end mark of each message, but after the first to a rank the payload of the one before."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._last: dict[int, torch.Tensor] = {}

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        super().deliver(sender, receiver, sent, wanted)
        fresh, old = wanted.buffer[HEADER_BYTES:-END_BYTES].clone(), self._last.get(receiver)
        if old is not None and old.shape == fresh.shape:
            wanted.buffer[HEADER_BYTES:-END_BYTES] = old
        self._last[receiver] = fresh


def test_a_stale_payload_under_a_right_header_is_found():
    report = certify(OnRing(ContextParallel(OldPayload(3), layout=Contiguous())), properties=["full attention"])
    assert not report.ok and report["full attention"].trials[0].findings[0].tensor == "out", str(report)


class Loses(Loopback):
    """Zeroes what rank 0 sends to rank 1."""

    def deliver(self, sender: int, receiver: int, sent: Transfer, wanted: Transfer) -> None:
        super().deliver(sender, receiver, sent, wanted)
        if (sender, receiver) == (0, 1):
            wanted.buffer[HEADER_BYTES:-END_BYTES] = 0


def test_a_fault_on_one_rank_is_found_there():
    report = certify(OnRing(ContextParallel(Loses(2), layout=Contiguous())), properties=["full attention"])
    findings = {f.tensor: f for f in report["full attention"].trials[0].findings}
    assert findings["out"].where == "rows 19 to 36 of 37, ring rank 1"


def test_a_layout_that_refuses_a_mask_is_listed_as_refusing():
    report = certify(OnRing(ContextParallel(Loopback(2), layout=Balanced())), properties=["rows of a batch"])
    assert report.ok and report.properties("partly") == ("rows of a batch",)
    assert "batch rows must have the same documents under balanced" in report["rows of a batch"].reason


def test_numpy_rounds_to_bfloat16_as_torch_does():
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(20_000) * 10.0 ** rng.integers(-30, 30, 20_000)).astype(np.float32)
    x[:6] = [0, -0.0, np.inf, -np.inf, 1 + 2**-8, 1 + 3 * 2**-8]  # the last two lie between two
    assert np.array_equal(round_to(x, "bfloat16"), torch.from_numpy(x).bfloat16().float().numpy())
    assert np.isnan(round_to(np.nan, "bfloat16")).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_yardstick_is_about_as_exact_as_torchs_dense_attention(dtype):
    """Too coarse a yardstick lets faults through, too fine a one cries wolf."""
    plain = ("causal", "documents", "grouped heads", "value size", "long sequences", "lse gradient")
    for named in suite(dtype, plain):
        case, ref = named.case, oracle(named.case)
        ours = errors(yardstick(case), ref).square
        torchs = errors(run_dense(case, problem_of(case).given), ref).square
        for tensor in ("out", "dq", "dk", "dv"):
            assert 0.2 <= (ours[tensor] / torchs[tensor]) ** 0.5 <= 2.5, (named.name, tensor)
