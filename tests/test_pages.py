"""Pages with examples print what they say they print."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

import ringspun.core

TOUR = Path(ringspun.core.__file__).with_name("README.md")
DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    (TOUR, 30),
    (DOCS / "attention.md", 20),
    (DOCS / "data.md", 20),
    (DOCS / "huggingface.md", 24),
    (DOCS / "testing.md", 20),
    (DOCS / "trust.md", 26),
    (DOCS / "routes.md", 5),
    (DOCS / "positions.md", 30),
    (DOCS / "context-schedule.md", 12),
    (DOCS / "loss.md", 35),
    (DOCS / "halo.md", 23),
    (DOCS / "hybrid.md", 14),
    (DOCS / "planner.md", 34),
    (DOCS / "training-memory.md", 43),
    (DOCS / "pictures.md", 6),
    (DOCS / "trainer.md", 28),
    (DOCS / "evaluation.md", 14),
    (DOCS / "gpu.md", 6),
]  # and how many examples at least
BLOCK = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the page on testing shows an overflow
@pytest.mark.parametrize(
    ("page", "examples"),
    PAGES,
    ids=lambda x: str(x)[-20:],
)
def test_a_page_prints_what_the_code_prints(page, examples):
    """A page that drifts away from the code."""
    text = page.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    said: list[str] = []
    runner = doctest.DocTestRunner()
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start()) + 1
        test = doctest.DocTestParser().get_doctest(block.group(1), {}, page.name, str(page), line)
        test.globs = names  # one namespace from the first block to the last
        runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    assert runner.tries >= examples


def test_every_file_of_the_core_is_on_the_map():
    """A new file that the tour forgets."""
    page = TOUR.read_text(encoding="utf-8")
    files = {p.name for p in TOUR.parent.glob("*.py")} - {"__init__.py", "host.py"}
    assert all(f"`{name}`" in page for name in files), files
