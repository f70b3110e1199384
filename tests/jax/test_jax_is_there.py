"""Whether the tests of `ringspun.jax` run at all."""

import pytest


def test_eight_devices():
    jax = pytest.importorskip("jax", reason="jax is not installed: pip install 'ringspun[jax]'; tests/jax did not run")
    assert len(jax.devices("cpu")) >= 8
