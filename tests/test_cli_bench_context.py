"""`ringspun bench context`: lengths found by trying, and the table of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspun.errors import ConfigError
from ringspun.testing.context_length import CLOSE, longest
from tests.test_cli_bench_machine import told


@settings(max_examples=200)
@given(
    fixed=st.integers(0, 1000),
    per_token=st.floats(0.5, 300),
    per_pair=st.sampled_from([0.0, 0.01, 2.0]),
    noise=st.floats(0, 0.01),
    start=st.integers(16, 5000),
    budget=st.integers(40_000, 10_000_000),
)
def test_the_longest_length_is_found_in_few_steps(
    fixed: int, per_token: float, per_pair: float, noise: float, start: int, budget: int
) -> None:
    """Whatever a token and a pair of tokens cost, and where blocks do not come out even."""

    def bytes_of(n: int) -> int:
        return round(fixed + per_token * (n + noise * n * (n % 7) / 7) + per_pair * n * n)

    found, held, steps = longest(bytes_of, budget, start=start)
    assert held == bytes_of(found) <= budget
    assert bytes_of(found + max(1, round(CLOSE * found) + 1)) > budget * (1 - noise)
    assert steps <= 14  # 11 in 30,000 seeded ones


def test_a_budget_that_holds_nothing_is_said_to() -> None:
    with pytest.raises(ConfigError, match=r"budget must hold a sequence of 16 tokens; it needs 1\.0 MiB"):
        longest(lambda n: 2**20, 100, start=64)


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_every_way_trains_longer_than_the_one_before(tmp_path) -> None:
    shape = ["--layers", "2", "--hidden-size", "16", "--vocab-size", "256", "--block-size", "16", "--kv-heads", "4"]
    picture = tmp_path / "context.png"
    out = json.loads(told("context", "--ranks", "2", *shape, "--budget-mib", "1", "--plot", str(picture), "--json"))
    (model,) = out["models"]
    rows = {(row["way"], row["ranks"]): row["seq_len"] for row in model["rows"]}
    assert list(rows) == [("plain", 1), ("efficient", 1), ("blockwise", 1), ("blockwise", 2)]
    lengths = list(rows.values())
    assert lengths == sorted(set(lengths))
    assert all(0.9 * 2**20 < row["peak_bytes"] <= 2**20 for row in model["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-heads", "3"], "kv-heads must divide 4"),
        (["--hidden-size", "12"], "hidden-size be a multiple of 8"),
        (["--ranks", "1"], "ranks must be at least 2"),
        (["--budget-mib", "0"], "budget-mib must be above 0"),
        (["--layers", "0"], "layers must be at least 1"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(options: list[str], words: str) -> None:
    line = told("context", *options, code=2)
    assert line.startswith("ringspun bench: ") and words in line and line.count("\n") == 1
