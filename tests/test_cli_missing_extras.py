"""The command without its extras: one line that says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys
sys.modules["torch"] = None  # importing it raises ModuleNotFoundError, as on an installation without the extra
sys.argv = ["ringspun", *sys.argv[1:]]
from ringspun.cli import main
main()
"""


@pytest.mark.parametrize("arguments", [["check", "--ranks", "1"], ["bench", "ring"]], ids=" ".join)
def test_a_missing_torch_is_one_line(arguments):
    ended = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stderr.strip() == "ringspun must find torch; install it: pip install 'ringspun[torch]'."


def test_help_needs_no_framework():
    ended = subprocess.run([sys.executable, "-c", SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and "check" in ended.stdout
