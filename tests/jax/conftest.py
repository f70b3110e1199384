"""Eight devices of the CPU, and float64. Without jax these tests are not there, but for one that says so."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

collect_ignore_glob = []
if find_spec("jax") is None:
    collect_ignore_glob = ["test_on_devices*.py"]
else:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for a device
    jax.config.update("jax_enable_x64", True)


@pytest.fixture
def compiled_in_haste(request):
    """XLA and LLVM optimise little: half the time of a test that compiles much and runs short. Rings of 4 and of 8, and
    dtypes whose rounding may depend on it, are compiled as users have them."""
    asked = getattr(request.node, "callspec", None)
    asked = {} if asked is None else asked.params
    haste = asked.get("ranks") not in (4, 8) and "dtype" not in asked
    jax.config.update("jax_disable_most_optimizations", haste)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
