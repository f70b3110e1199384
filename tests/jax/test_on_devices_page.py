"""The page on JAX prints what it says it prints; the command that certifies a ring of devices."""

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
