"""The examples with other packages print what they say; skipped where these are not installed."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def printed(name, capsys):
    with jax.enable_x64(False):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out.split()


def test_flax_nnx(capsys):
    pytest.importorskip("flax", reason="flax is not installed: pip install flax")
    assert float(printed("flax_nnx.py", capsys)[-1]) < 1e-5


def test_equinox(capsys, monkeypatch):
    """The same losses on 8 devices and on one, and they fall."""
    pytest.importorskip("equinox", reason="equinox is not installed: pip install equinox")
    found = []
    for count in (8, 1):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        monkeypatch.setattr(
            jax, "make_mesh", lambda *a, make=jax.make_mesh, n=count: make(*a, devices=jax.devices()[:n])
        )
        found.append([float(x) for x in printed("equinox_layer.py", capsys)[1::2]])
        monkeypatch.undo()
    assert found[0] == pytest.approx(found[1], abs=2e-6) and found[0][0] > found[0][1] > found[0][2]
