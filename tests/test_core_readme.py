"""The tour of the core prints what it says it prints."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import ringspun.core

PAGE = Path(ringspun.core.__file__).with_name("README.md")
BLOCK = re.compile(r"^```pycon\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_tour_prints_what_the_code_prints():
    """A page that drifts away from the code."""
    page = PAGE.read_text(encoding="utf-8")
    names: dict[str, object] = {}
    said: list[str] = []
    runner = doctest.DocTestRunner()
    blocks = list(BLOCK.finditer(page))
    for block in blocks:
        line = page.count("\n", 0, block.start()) + 1
        test = doctest.DocTestParser().get_doctest(block.group(1), {}, PAGE.name, str(PAGE), line)
        test.globs = names  # one namespace from the first block to the last
        runner.run(test, out=said.append, clear_globs=False)
    assert not runner.failures, "".join(said)
    assert runner.tries > 30 and len(blocks) >= 10


def test_every_file_of_the_core_is_on_the_map():
    """A new file that the tour forgets."""
    page = PAGE.read_text(encoding="utf-8")
    files = {p.name for p in PAGE.parent.glob("*.py")} - {"__init__.py", "host.py"}
    assert all(f"`{name}`" in page for name in files), files
