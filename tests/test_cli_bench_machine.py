"""`ringspun bench links`, `kernels`, and the sweep and utilisation of `ring`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ringspun.cli import bench
from ringspun.cli.bench import app
from ringspun.cli.measured import described
from ringspun.core.links import Link, Links


def told(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_links_are_measured_and_can_be_read_again(tmp_path):
    path = tmp_path / "links.json"
    printed = told("links", "--largest", "70000", "--repeats", "3", "--output", str(path), "--json")
    links = Links.load(path)
    assert links.near.message_bytes == (1024, 4096, 16384, 65536)
    assert json.loads(printed)["near"]["alone_s"] == list(links.near.alone_s)
    assert all(t >= a for a, t in zip(links.near.alone_s, links.near.together_s, strict=True))
    assert links.ranks == 2 and links.near.peak > 0


def test_kernels_are_measured_beside_a_product_and_refusals_are_told(monkeypatch):
    rows = json.loads(
        told("kernels", "--tokens", "4,8", "--heads", "2", "--dtype", "float32", "--threads", "1", "--json")
    )
    found = {(r["kernel"], r["tokens"], r["causal"]) for r in rows["rows"]}
    assert found == {(k, n, c) for k in ("aten_cpu", "eager") for n in (4, 8) for c in (False, True)}
    assert all(r["forward"] > 0 and r["backward"] > 0 and r["gemm"] > 0 for r in rows["rows"])
    monkeypatch.setattr("ringspun.torch.kernels.AtenCpu.refuses", lambda self, call: "no such machine")
    assert "aten_cpu float32 full 4: refused, no such machine" in told("kernels", "--tokens", "4", "--dtype", "float32")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["links", "--ranks", "1"], "ranks must be at least 2; got 1."),
        (["links", "--largest", "5"], "largest must be at least 1024; got 5."),
        (["links", "--repeats", "2"], "repeats must be at least 3; got 2."),
        (["kernels", "--tokens", "0"], "tokens must be at least 1; got 0."),
        (["kernels", "--dtype", "int8"], "dtype must be one of"),
        (["kernels", "--threads", "0"], "threads must be at least 1; got 0."),
        (["ring", "--links", "/nowhere"], "links must be a file that `ringspun bench links` wrote; got /nowhere"),
        (["ring", "--batch", "0"], "batch must be at least 1; got 0."),
        (["memory", "--seq-len", "0"], "seq-len must be at least 1; got 0."),
    ],
)
def test_what_cannot_be_measured_is_told_in_one_line(options, words):
    line = told(*options, code=2)
    assert line.startswith("ringspun bench: ") and words in line and line.count("\n") == 1


def test_a_sweep_ends_at_the_first_length_from_which_a_ring_pays(monkeypatch):
    """And runs the lengths in ascending order, however they are given."""
    ratios = {512: 1.7, 1024: 1.2, 2048: 1.04, 4096: 1.0}
    asked = []

    def measure(work, pairs):
        asked.append((work.batch, work.ranks, work.seq_len))
        ratio = ratios[work.seq_len] / work.batch
        return {**described(work), "ratio": ratio, "ratio_low": ratio, "ratio_high": ratio} | {
            "ring_s": 1.0, "alone_s": 1.0
        }  # fmt: skip

    monkeypatch.setattr(bench, "_on_ranks", measure)
    options = ["ring", "--ranks", "2,4", "--seq-len", "4096,512,2048,1024", "--batch", "1,2", "--sweep"]
    lines = told(*options).splitlines()
    assert asked == [
        *((1, r, s) for r in (2, 4) for s in (512, 1024, 2048)),
        *((2, r, 512) for r in (2, 4)),
    ]
    assert [x for x in lines if "pays" in x] == [
        f"R={r} B={b}: pays from {s} tokens" for b, r, s in [(1, 2, 2048), (1, 4, 2048), (2, 2, 512), (2, 4, 512)]
    ]


def test_a_route_by_name_is_measured_and_one_that_does_not_fit_is_told(monkeypatch):
    row = json.loads(
        told(
            "memory",
            "--ranks",
            "2",
            "--tokens-per-rank",
            "8",
            "--kv-heads",
            "4",
            "--dtype",
            "float32",
            "--route",
            "direct",
            "--json",
        )
    )
    assert row["rows"][0]["route"] == "direct" and row["rows"][0]["peak_bytes"] > 0
    assert "did you mean 'direct'" in told("ring", "--route", "dirct", code=2)
    beside = told("ring", "--route", "direct", "--block-size", "8", code=2)
    assert "block-size must come with --route ring; got direct" in beside
    assert "block-size must be at least 1; got 0" in told("ring", "--block-size", "0", code=2)
    monkeypatch.setattr(bench, "_on_ranks", lambda work, pairs: {"route": str(work.route), "ring_s": 1.0})
    assert json.loads(told("ring", "--block-size", "64", "--ranks", "2", "--json"))["route"] == "ring(block_size=64)"


def test_utilisation_is_what_the_busiest_rank_sends_over_the_links_peak(monkeypatch, tmp_path):
    """Two ranks of 4 tokens, one head of 2, float32: K and V of 64 bytes each, forward and backward, and dK, dV."""
    message = 64 + 64 + 64 + 64  # header, K, V, end mark
    Links(2, Link((1000,), (1e-3,), (1e-3,))).save(tmp_path / "links.json")  # a megabyte a second
    monkeypatch.setattr(
        bench,
        "_on_ranks",
        lambda work, pairs: (
            {**described(work), "ratio": 1, "ratio_low": 1, "ratio_high": 1, "alone_s": 1} | {"ring_s": 1e-3}
        ),
    )
    options = ["ring", "--ranks", "2", "--seq-len", "8", "--heads", "1", "--head-size", "2", "--mask", "full"]
    row = json.loads(told(*options, "--links", str(tmp_path / "links.json"), "--json"))
    assert row["sent_bytes"] == 3 * message
    assert row["utilisation"] == pytest.approx(3 * message / 1e3)
