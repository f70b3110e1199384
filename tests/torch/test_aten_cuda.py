"""The kernels of torch's fused attentions on NVIDIA GPUs, where there is none: everything around the ops against the
oracle, on emulated ops (`emulated_cuda`); the ops themselves by fake tensors, which have a device, shapes, strides and
dtypes, and go through the whole ring. What is not held here is arithmetic on a GPU: `make gpu-check` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from emulated_cuda import Cudnn, Efficient, EmulatedCudnn, EmulatedEfficient, EmulatedFlash, Flash, seen
from fake_cuda import fake_cuda
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from ringspun import Buckets, Causal, Contiguous, Documents, Prefix, Striped, Window, Zigzag
from ringspun.core import regions
from ringspun.testing import certify
from ringspun.testing.candidates import LocalKernel, OnRing
from ringspun.testing.cases import Case, Shape, inputs, reference
from ringspun.testing.comparison import errors
from ringspun.testing.torch import rounded, run_ring
from ringspun.torch import ContextParallel, Loopback, RelativeTable
from ringspun.torch.execution import Options
from ringspun.torch.kernels import KERNELS, AtenCudnn, AtenEfficient, AtenFlash, Call, Eager, choose, cuda_operands
from ringspun.torch.kernels.base import Saved, StepTiles, Terms
from ringspun.torch.kernels.windows import calls, pieces
from ringspun.torch.ops import REGISTRY, Grads
from ringspun.torch.scraps import scraps

ON_GPUS = {"aten_flash": AtenFlash(), "aten_efficient": AtenEfficient(), "aten_cudnn": AtenCudnn()}
CALL = Call(8, 2, 64, 64, torch.bfloat16, "cuda")
N = 18
PROPERTIES = [
    "two-sided window", "documents", "block mask", "padding is never read", "short sequences", "long sequences",
    "grouped heads", "head size", "value size", "cross-attention", "rows of a batch", "sinks", "lse gradient",
    "together",
]  # fmt: skip


@st.composite
def bands(draw: st.DrawFn) -> tuple[int, int, int, int, int, int]:
    ends = [sorted(draw(st.lists(st.integers(0, N), min_size=2, max_size=2, unique=True))) for _ in range(2)]
    lo = draw(st.integers(-N, N))
    return *ends[0], *ends[1], lo, lo + draw(st.integers(0, 2 * N))


@given(bands())
def test_a_band_is_windows_of_the_op_whatever_it_does_with_bounds(band):
    """Every pair once, by the rules of the op's own source: bounds beyond the keys, and missing ones, count as none."""
    found = np.zeros((N, N), np.int64)
    for (q0, q1, k0, k1), window in pieces(*band):
        shown = seen(q1 - q0, k1 - k0, *window).numpy()
        assert shown.any(1).all() and shown.any(0).all(), "a row or key of which the op would know nothing"
        found[q0:q1, k0:k1] += shown
    np.testing.assert_array_equal(found, regions.as_array(np.array([band]), N, N))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 2), st.sampled_from(["causal", "window"]))
def test_packed_documents_are_one_call_for_each_window(lengths, gap, kind):
    """Sequences between them have no keys or no rows, and add up to where the next piece begins."""
    starts = [sum(lengths[:n]) + gap * n for n in range(len(lengths))]
    docs = Documents(lengths, starts)
    mask = docs & (Causal() if kind == "causal" else Window(2))
    size = starts[-1] + lengths[-1]
    plan = ContextParallel(Loopback(1), layout=Contiguous()).plan(size, mask)
    found = calls(StepTiles(plan.schedule.forward.tiles_of(0)).bands)
    assert (
        len(found) == len({call.window for call in found}) <= (2 if kind == "causal" else 3)
    )  # single tokens side by side: a diagonal
    pairs = np.zeros((size, size), np.int64)
    for call in found:
        rows, keys = call.cumulative
        assert rows[-1] == call.rows[1] - call.rows[0] and keys[-1] == call.keys[1] - call.keys[0]
        begins = {(call.rows[0] + a, call.keys[0] + b) for a, b in zip(rows, keys, strict=True)}
        for piece in call.pieces:
            assert (piece.q0, piece.k0) in begins
            shown = seen(piece.q1 - piece.q0, piece.k1 - piece.k0, *call.window, max(p.k1 - p.k0 for p in call.pieces))
            pairs[piece.q0 : piece.q1, piece.k0 : piece.k1] += shown.numpy()
        assert all(rows == 0 or keys == 0 or (rows, keys) in {(p.q1 - p.q0, p.k1 - p.k0) for p in call.pieces}
                   for rows, keys in call.sequences())  # fmt: skip
    np.testing.assert_array_equal(pairs, mask.as_array(size))


@pytest.mark.parametrize(
    "kernel", [Flash(), Efficient(), Cudnn(4), Cudnn(3)], ids=["flash", "efficient", "cudnn", "3d"]
)
def test_all_but_the_ops_is_exact(kernel):
    """Lowering, layouts, padding, lse, the gradient of lse, groups: float64, against the oracle, case by case."""
    report = certify(LocalKernel(kernel), properties=PROPERTIES)
    assert report.ok and not report.properties("refused"), report


def test_a_ring_of_it_is_exact():
    context = ContextParallel(Loopback(8), layout=Striped())
    found = certify(OnRing(context, kernel=Flash()), properties=["two-sided window", "documents"])
    assert found.ok, found


@pytest.mark.parametrize("kernel", [Flash(), Efficient(), Cudnn()], ids=["flash", "efficient", "cudnn"])
def test_queries_that_travel_bring_no_out(kernel):
    """All of delta then comes by the second run of the op."""
    case = Case(4, 31, Causal(), Zigzag(), shape=Shape(2, 6, 3, 8, 5))
    of_queries = ContextParallel(Loopback(4), layout=Zigzag(), backward="queries")
    given_ = rounded(case, inputs(case))
    worst = errors(run_ring(case, given_, of_queries, kernel=kernel), reference(case, given_)).worst
    assert max(worst.values()) < 1e-12, worst


def test_packed_calls_take_the_place_of_many():
    kernel, docs = Flash(), Documents([9, 3, 14, 1, 5])
    plan = ContextParallel(Loopback(1)).plan(32, Causal() & docs)
    x = torch.randn(1, 2, 32, 8, dtype=torch.float64, requires_grad=True)
    plan.attention(x, x, x, kernel=kernel).sum().backward()
    assert kernel.emulated.calls == [(True, None, None)]  # causal, all five at once
    two = torch.randn(9, 2, 32, 8, dtype=torch.float64)
    plan.attention(two, two, two, kernel=kernel)
    assert not any(packed for packed, *_ in kernel.emulated.calls[1:]), "nine batch rows: five calls, not nine"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_missing_of_delta_comes_whole_in_a_narrow_dtype(dtype):
    """One rounded column would lose it beside a large delta: two carry 15 bits and more, of any size."""
    missing = torch.tensor([0.0, 1.0, -3.14159, 1e-4, -2e4, 1e5])
    dout, found = (
        x.double() for x in cuda_operands._carriers(missing, torch.ones(6, 8, dtype=dtype), dout_like())[::2]
    )
    np.testing.assert_allclose((dout * found).sum(-1), missing.double(), rtol=2**-15)


def dout_like() -> torch.Tensor:
    return torch.ones(6, 8)


def test_operands_are_copied_only_where_the_ops_could_not_read_them():
    x = torch.randn(2, 3, 10, 16)
    assert cuda_operands.ready(x, 16) is x and cuda_operands.ready(y := x[:, :, 3:7], 16) is y
    wide = torch.randn(2, 3, 10, 21)
    for odd in (
        wide[..., :16],
        wide[..., 1:17],
        torch.randn(2 * 3 * 160 + 1)[1:].view(2, 3, 10, 16),
        x.mT.contiguous().mT,
    ):
        found = cuda_operands.ready(odd, 16)
        assert found.is_contiguous() and found.storage_offset() == 0 and torch.equal(found, odd)
    assert cuda_operands.ready(wide, 24)[..., 21:].eq(0).all()


@pytest.mark.parametrize(
    ("kernel", "change", "words"),
    [
        ("aten_flash", {"device": "cpu"}, "device must be cuda; got cpu"),
        ("aten_flash", {"dtype": torch.float32}, "dtype must be float16 or bfloat16; got torch.float32"),
        ("aten_flash", {"softcap": 2.0}, "softcap must be None; got 2.0"),
        ("aten_flash", {"bias": "alibi"}, "bias must be None; got alibi"),
        ("aten_flash", {"head_size": 257}, "head sizes must be at most 256; got 257"),
        ("aten_flash", {"value_size": 300}, "head sizes must be at most 256; got 300"),
        ("aten_flash", {"across_rings": True}, "deterministic must be None; got across_rings"),
        ("aten_efficient", {"dtype": torch.float64}, "dtype must be float32 or float16 or bfloat16; got torch.float64"),
        (
            "aten_efficient",
            {"softcap": 2.0, "bias": "table"},
            "softcap must be None; got 2.0, bias must be None; got table",
        ),
        ("aten_efficient", {"across_rings": True}, "deterministic must be None; got across_rings"),
        ("aten_cudnn", {"dtype": torch.float32}, "dtype must be float16 or bfloat16; got torch.float32"),
        ("aten_cudnn", {"head_size": 136}, "head sizes must be at most 128; got 136"),
        ("aten_flash", {"scale": -0.125}, "scale must be positive; got -0.125"),
        ("aten_flash", {"scale": 0.0}, "scale must be positive; got 0.0"),
        ("aten_cudnn", {"scale": -0.125}, "scale must be positive; got -0.125"),
    ],
)
def test_refusals(kernel, change, words):
    assert ON_GPUS[kernel].refuses(CALL) is None
    assert ON_GPUS[kernel].refuses(replace(CALL, **change)).startswith(words)


def test_refusals_of_a_gpu_and_of_a_build(monkeypatch):
    monkeypatch.setattr(cuda_operands, "compute_capability", lambda: (7, 5))
    assert ON_GPUS["aten_flash"].refuses(CALL) == "compute capability must be 8.0 or more; got 7.5"
    assert ON_GPUS["aten_efficient"].refuses(CALL) == "compute capability must be 8.0 or more; got 7.5"
    assert ON_GPUS["aten_efficient"].refuses(replace(CALL, dtype=torch.float16)) is None
    monkeypatch.setattr("ringspun.torch.kernels.aten_flash.compute_capability", lambda: (8, 9))
    monkeypatch.setattr(cuda_operands, "compute_capability", lambda: (8, 9))
    assert (
        ON_GPUS["aten_flash"].refuses(replace(CALL, head_size=200)).startswith("head sizes must be outside of 193 to")
    )
    assert ON_GPUS["aten_flash"].refuses(replace(CALL, head_size=256)) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert ON_GPUS["aten_cudnn"].refuses(CALL) == "device must be a GPU of NVIDIA; got ROCm 6.4"


def test_who_gets_what_on_a_gpu():
    """Flash where it can, else the efficient, else plain torch; cuDNN only by name."""
    for change, name in (
        ({}, "aten_flash"),
        ({"head_size": 320, "value_size": 64}, "aten_efficient"),
        ({"dtype": torch.float32}, "aten_efficient"),
        ({"scale": -0.125}, "aten_efficient"),  # it scales before it hides
        ({"dtype": torch.float64}, "eager"),
        ({"softcap": 30.0}, "eager"),
        ({"across_rings": True}, "eager"),
        ({"device": "cpu"}, "aten_cpu"),
    ):
        assert choose(replace(CALL, **change)).name == name
        assert choose(replace(CALL, **change), "auto").name == name
    assert choose(CALL, "aten_cudnn").name == "aten_cudnn"
    assert [k.name for k in KERNELS if k.by_name_only] == [
        "aten_cudnn",
        "triton",
    ]


class Waited(TorchFunctionMode):
    """Notes what copies to a device and has the host wait for it: whatever is not queued."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        moves = func is torch.Tensor.to and isinstance(args[1], torch.device) and not kwargs.get("non_blocking")
        if moves or (func is torch.tensor and kwargs.get("device") is not None):
            self.found.append(func)
        return func(*args, **kwargs)


def test_nobody_waits_for_masks_tables_and_lengths():
    """On a device a copy from pageable memory is waited for, behind all that is queued."""
    plan = ContextParallel(Loopback(2), layout=Contiguous()).plan(32, Causal() & Documents([9, 3, 14, 6]))
    x, kept = torch.randn(1, 2, 32, 8, dtype=torch.float64), torch.empty(0, dtype=torch.uint8)
    table = RelativeTable(torch.zeros(8, 2), Buckets.t5(8, 32, bidirectional=False)).rule
    for kernel in (Eager(), Flash()):
        execution = REGISTRY.get(plan._handle(Options(kernel, None)))
        with Waited() as waited:  # below the op, which modes do not enter
            execution.run_forward(x, x, x, Terms(0.125), kept)
        assert not waited.found, kernel.name
    with Waited() as waited:
        table.scores(torch.zeros(8, 2), torch.arange(4)[:, None], torch.arange(4))
    assert not waited.found


# Fake tensors


@pytest.fixture
def fake(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr("ringspun.torch.plan.COMPANIONS", {})  # an integration's reads positions, which are fake here
    with fake_cuda():
        yield


def run_fake(plan, kernel: str, shape: Shape, dtype: torch.dtype, *, dlse: bool, strided: bool = False):
    """Forward and backward of the executor, below the op pair, which fake tensors would not enter."""
    tokens = plan.queries.local_tokens

    def tensor(heads: int, size: int) -> torch.Tensor:
        if strided:  # as a projection gives it
            return torch.empty(shape.batch, tokens, heads, size, dtype=dtype, device="cuda").transpose(1, 2)
        return torch.empty(shape.batch, heads, tokens, size, dtype=dtype, device="cuda")

    q, k, v = (
        tensor(shape.heads, shape.head_size),
        tensor(shape.kv_heads, shape.head_size),
        tensor(shape.kv_heads, shape.value_size),
    )
    execution = REGISTRY.get(plan._handle(Options(kernel, None)))
    terms, kept = Terms(0.125), q.new_empty(0, dtype=torch.uint8)
    out, lse, call = execution.run_forward(q, k, v, terms, kept)
    grads = Grads(torch.empty_like(out), torch.empty_like(lse) if dlse else None, (True, True, True, False, False))
    return (q, k, v), out, lse, execution.run_backward(grads, q, k, v, terms, out, lse, call, kept)[:3]


def agrees(given_, out, lse, grads, shape: Shape, tokens: int, dtype: torch.dtype) -> None:
    assert out.shape == (shape.batch, shape.heads, tokens, shape.value_size)
    assert lse.shape == (shape.batch, shape.heads, tokens) and lse.dtype == torch.float32
    assert out.dtype == dtype and out.is_contiguous() and out.device.type == lse.device.type == "cuda"
    for x, dx in zip(given_, grads, strict=True):
        assert dx.shape == x.shape and dx.device.type == "cuda" and dx.is_contiguous()


OF_RINGS = [("aten_flash", ranks) for ranks in range(1, 9)] + [("aten_efficient", 2), ("aten_cudnn", 3)]


@pytest.mark.parametrize(("kernel", "ranks"), OF_RINGS)
def test_fake_tensors_go_round_the_ring(fake, kernel, ranks):
    """Through the real ops' own shape functions, which raise for operands that do not fit."""
    tokens, shape, dtype = 48, Shape(2, 8, 2, 64, 64), (torch.bfloat16, torch.float16)[ranks % 2]
    mask, layout = ((Causal(), Zigzag()), (Causal() & Documents([20, 3, 19]), Contiguous()), (Window(6), Contiguous()))[
        0 if ranks < 4 else 1 + ranks % 2
    ]
    plan = ContextParallel(Loopback(ranks), layout=layout).plan(tokens, mask)
    agrees(*run_fake(plan, kernel, shape, dtype, dlse=ranks < 3, strided=ranks == 3), shape, tokens, dtype)


@pytest.mark.parametrize(
    ("kernel", "shape", "dtype"),
    [
        ("aten_flash", Shape(1, 8, 1, 256, 256), torch.bfloat16),
        ("aten_flash", Shape(1, 4, 4, 192, 128), torch.bfloat16),
        ("aten_flash", Shape(2, 6, 3, 13, 5), torch.float16),
        ("aten_efficient", Shape(1, 8, 2, 128, 64), torch.float32),
        ("aten_efficient", Shape(1, 2, 2, 320, 512), torch.bfloat16),
        ("aten_cudnn", Shape(1, 8, 1, 128, 64), torch.bfloat16),
    ],
)
def test_fake_tensors_of_other_head_sizes(fake, kernel, shape, dtype):
    turned = ContextParallel(Loopback(2), layout=Zigzag(), backward="queries").plan(41, Causal() | Prefix(3))
    agrees(*run_fake(turned, kernel, shape, dtype, dlse=False), shape, 41, dtype)


def test_the_emulated_ops_have_the_shapes_of_the_real_ones():
    """Else what is exact on them says little of the others. Shape, strides and dtype of every result that is used."""
    b, h, k, t, d = 2, 4, 2, 40, 16
    with fake_cuda():
        fakes = operands(b, h, k, t, d, "cuda")
        flash = flash_results(ON_GPUS["aten_flash"]._ops, *fakes)
        efficient = efficient_results(ON_GPUS["aten_efficient"]._ops, *fakes[:1], *fakes[:1], *fakes[:1])
        cudnn = ON_GPUS["aten_cudnn"]._ops.forward(*fakes, None, True, 0.0, True, False, scale=1.0)[:2]
    real = operands(b, h, k, t, d, "cpu")
    same(flash, flash_results(EmulatedFlash(), *real))
    same(efficient, efficient_results(EmulatedEfficient(), *real[:1], *real[:1], *real[:1]))
    same(cudnn, EmulatedCudnn().forward(*real, None, True, 0.0, True, False, scale=1.0)[:2])


def operands(b: int, h: int, k: int, t: int, d: int, device: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(b, heads, t, d, dtype=torch.bfloat16, device=device) for heads in (h, k, k))


def flash_results(ops, *qkv: torch.Tensor) -> list[torch.Tensor]:
    none = {"scale": 1.0, "window_size_left": 4, "window_size_right": None}
    q, k, v = (x.transpose(1, 2) for x in qkv)
    seeds = [torch.empty(2, dtype=torch.uint64, device=q.device)] * 2
    out, lse, *_ = ops.forward(q, k, v, None, None, 40, 40, 0.0, False, False, **none)
    found = [out, lse, *ops.backward(out, q, k, v, out, lse, None, None, 40, 40, 0.0, False, *seeds, **none)]
    q, k, v = (x[0] for x in (q, k, v))
    ends = torch.tensor([0, 15, 40], dtype=torch.int32, device=q.device)
    out, lse, *_ = ops.forward(q, k, v, ends, ends, 25, 25, 0.0, False, False, **none)
    return [*found, out, lse, *ops.backward(out, q, k, v, out, lse, ends, ends, 25, 25, 0.0, False, *seeds, **none)]


def efficient_results(ops, *qkv: torch.Tensor) -> list[torch.Tensor]:
    out, lse, *_ = ops.forward(*qkv, None, True, 0.0, True, scale=1.0)
    seed = torch.zeros((), dtype=torch.int64, device=out.device)
    needs = [True, True, True, False]
    return [out, lse, *ops.backward(out, *qkv, None, out, lse, seed, seed, 0.0, needs, True, scale=1.0)[:3]]


def same(theirs, ours) -> None:
    for n, (a, b) in enumerate(zip(theirs, ours, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), n


def test_an_lse_gradient_costs_a_second_run_and_nothing_else_does():
    runs = []

    def run(dout, v, out):
        runs.append(float((dout * out).sum()))
        return dout, dout, v

    dout, v, out = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.full((1, 1, 2, 8), 0.5)
    delta = torch.tensor([[[2.0, 3.0]]])
    saved = Saved(out, delta, dout, None, delta)
    cuda_operands.gradients(saved, dout, v, out, run)
    cuda_operands.gradients(saved._replace(dlse=torch.ones(1, 1, 2)), dout, v, out, run)
    cuda_operands.gradients(saved._replace(out=None), dout, v, None, run)
    assert runs == [8.0, 8.0, -2.0, 0.0, 5.0]


def test_a_gpu_is_not_fed_scraps_of_a_cores_cache():
    """Every one costs it a few calls: 33 million elements are two, not 512."""
    on_cpu, elsewhere = (torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device=d) for d in ("cpu", "meta"))
    assert (sum(1 for _ in scraps(on_cpu)), sum(1 for _ in scraps(elsewhere))) == (512, 2)


def test_eager_still_takes_what_no_op_does():
    assert isinstance(choose(replace(CALL, softcap=1.0, bias="alibi")), Eager)
