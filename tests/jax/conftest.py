"""Eight devices of the CPU, and float64. Without jax these tests are not there, but for one that says so."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = []
if find_spec("jax") is None:
    collect_ignore_glob = ["test_on_devices*.py"]
else:
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # before anything asks for a device
    jax.config.update("jax_enable_x64", True)
