"""Which kernel does what, as the conformance suite finds it: a table for the README, between two markers.

python -m ringspun.testing.support README.md
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ringspun.testing.conformance import certify
from ringspun.testing.report import FAILED, NOT_GIVEN, PARTLY, PASSED, REFUSED, Report
from ringspun.testing.suite import PROPERTIES

BEGIN, END = "<!-- support table: begin -->", "<!-- support table: end -->"
WORDS = {PASSED: "yes", REFUSED: "refused", PARTLY: "partly", NOT_GIVEN: "not given", FAILED: "WRONG"}
SHOWN = tuple(name for name in PROPERTIES if name != "together")
"""A mixture of the others says nothing that a reader could want or not."""


def support_table(reports: Sequence[Report]) -> str:
    """A Markdown table: a row per property, a column per report."""
    head = ["property", *(f"`{r.name}`" for r in reports), ""]
    rows = [[name, *(WORDS[r[name].status] for r in reports), PROPERTIES[name]] for name in SHOWN]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in [head, ["---"] * len(head), *rows])


def with_table(page: str, table: str) -> str:
    """`page` with what stands between the markers replaced.

    Raises:
        ValueError: a page without both markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"page must hold {BEGIN} and, after it, {END}.")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def kernel_reports() -> list[Report]:
    """Of every kernel of this package that computes on CPUs, in float64."""
    from ringspun.testing.candidates import LocalKernel
    from ringspun.torch.kernels import kernels_on

    return [certify(LocalKernel(kernel), properties=SHOWN) for kernel in kernels_on("cpu")]


def main(page: str) -> None:
    """Write the table into a page."""
    path = Path(page)
    path.write_text(with_table(path.read_text(encoding="utf-8"), support_table(kernel_reports())), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
