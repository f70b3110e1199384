"""The README's table of what each kernel does is what the conformance suite finds."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringspun.testing.problem import Answer
from ringspun.testing.support import BEGIN, END, SHOWN, certify, kernel_reports, support_table, with_table

README = Path(__file__).parent.parent / "README.md"


def test_the_committed_table_is_what_the_suite_finds():
    """A kernel that learned or lost something. `make support-table` writes it."""
    page = README.read_text(encoding="utf-8")
    assert page == with_table(page, support_table(kernel_reports()))


def test_what_is_wrong_cannot_be_taken_for_supported():
    report = certify(lambda problem: Answer(0 * problem.q), gives=["out"], properties=SHOWN, name="zero")
    lines = support_table([report]).splitlines()
    assert lines[0] == "| property | `zero` | |" and "| causal | WRONG |" in lines[3]
    assert len(lines) == 2 + len(SHOWN)


def test_a_page_without_markers_is_refused():
    for page in ("", BEGIN, END, f"{END} {BEGIN}"):
        with pytest.raises(ValueError, match="page must hold"):
            with_table(page, "")
