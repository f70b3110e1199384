"""The page on JAX prints what it says it prints."""

from __future__ import annotations

import jax
from tests import test_pages


def test_the_page():
    with jax.enable_x64(False):  # as most readers have it
        test_pages.test_a_page_prints_what_the_code_prints(test_pages.DOCS / "jax.md", 20)
