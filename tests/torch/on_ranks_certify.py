"""What the ranks of a pool are asked to do to certify themselves; they import this file."""

from __future__ import annotations

from on_ranks import PATIENCE_S

from ringspun import Layout
from ringspun.testing.candidates import OnRing
from ringspun.testing.conformance import certify
from ringspun.testing.report import Report
from ringspun.torch import ContextParallel


def certified(rank: int, layout: Layout, dtype: str, properties: list[str]) -> Report:
    """This rank's report of the ring that all ranks form."""
    return certify(OnRing(ContextParallel(layout=layout, timeout_s=PATIENCE_S)), dtype=dtype, properties=properties)
