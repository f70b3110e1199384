"""The page on JAX prints what it says it prints; the commands that certify and time a ring of devices."""

from __future__ import annotations

import json

import jax
import pytest
from tests import test_pages
from typer.testing import CliRunner

from ringspun.cli import app


def test_the_page():
    with jax.enable_x64(False):  # as most readers have it
        test_pages.test_a_page_prints_what_the_code_prints(test_pages.DOCS / "jax.md", 20)


@pytest.mark.usefixtures("compiled_in_haste")
def test_check_certifies_devices_with_the_cases_of_torch():
    """The same command, the same JSON, without torch."""
    arguments = "check --framework jax --ranks 1,3 --seq-len 7 --mask causal,window(3) --layout zigzag --json"
    ended = CliRunner().invoke(app, arguments.split())
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    assert report["ok"] and report["count"] == 4 and report["driver"] == "devices" and "jax" in report
    refused = CliRunner().invoke(app, ["check", "--framework", "jax", "--driver", "gloo"])
    assert refused.exit_code == 2 and "driver must be left out with --framework jax; got gloo" in refused.output
    refused = CliRunner().invoke(app, ["check", "--framework", "jax", "--ranks", "9"])
    assert refused.exit_code == 2 and "ranks must be at most the 8 devices" in refused.output


def test_check_runs_the_suite_on_devices():
    """Of a property that jax has, and one of which it has a part."""
    arguments = "check --framework jax --suite full --property causal,bias --ranks 3 --layout zigzag --dtype float64"
    ended = CliRunner().invoke(app, [*arguments.split(), "--json"])
    assert ended.exit_code == 0, ended.output
    report = json.loads(ended.stdout)
    assert report["ok"] and report["drivers"] == ["devices"] and "jax" in report["versions"]
    assert report["refused"] > 0 and report["properties"]["causal"]["devices"]["failed"] == 0


@pytest.mark.parametrize(
    ("mask", "alone"), [("causal", "jax.nn.dot_product_attention"), ("window(9)", "ringspun on one device")]
)
def test_bench_times_devices(mask, alone):
    """The same JSON as torch's. Bytes: keys and values in both directions, and their gradients in float32."""
    shape = f"bench ring --framework jax --ranks 2 --seq-len 30 --heads 2 --kv-heads 1 --head-size 8 --mask {mask}"
    ended = CliRunner().invoke(app, [*shape.split(), "--pairs", "9", "--dtype", "bfloat16", "--json"])
    assert ended.exit_code == 0, ended.output
    row = json.loads(ended.stdout)
    assert row["alone"] == alone and row["pairs"] == 9 and row["jax"] == jax.__version__
    assert (
        0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] and row["ring_s"] > 0 and row["utilisation"] is None
    )
    assert row["hops"] == 1 and row["sent_bytes"] == 15 * 1 * (8 + 8) * (2 + 2 + 4)


@pytest.mark.parametrize("option", [("route", "direct"), ("block-size", "4"), ("ulysses", "2"), ("links", "file")])
def test_bench_refuses_what_jax_does_not_know(option):
    name, value = option
    refused = CliRunner().invoke(app, ["bench", "ring", "--framework", "jax", f"--{name}", value])
    assert refused.exit_code == 2
    assert f"{name} must be left out with --framework jax; got {value}." in refused.output


def test_bench_refuses_more_devices_than_there_are():
    refused = CliRunner().invoke(app, ["bench", "ring", "--framework", "jax", "--ranks", "9"])
    assert refused.exit_code == 2 and "ranks must be at most the 8 devices" in refused.output
