"""How much of a message is checked: what may be asked for, and which calls have checksums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringspun.core.checks import Checks
from ringspun.errors import PlanError


@given(st.integers(0, 999_999_999))
def test_text_and_value_say_the_same(every):
    checks = Checks(every)
    assert Checks.parse(str(checks)) == checks


WRONG = (
    "",
    "Header",
    "header/2",
    "checksum/",
    "checksum/0",
    "checksum/-1",
    "checksum/1.5",
    "checksum/ 2",
    "checksum/1e3",
)


@pytest.mark.parametrize("text", [*WRONG, "checksum/1000000000", "checksum\n", None, 16, True])
def test_everything_else_is_refused(text):
    with pytest.raises(PlanError, match=r"^checks must be 'header', 'checksum' or 'checksum/N' .*; got "):
        Checks.parse(text)


def test_header_is_never_and_checksum_is_always():
    assert not any(Checks(0).sums(call) for call in range(100))
    assert all(Checks(1).sums(call) for call in range(100))


@given(st.integers(2, 50), st.integers(0, 10**15))
def test_one_call_in_every_n(every, turn):
    checks = Checks(every)
    assert sum(checks.sums(every * turn + place) for place in range(every)) == 1


@pytest.mark.parametrize("every", [2, 8, 16, 25])
@pytest.mark.parametrize("calls_of_a_step", [1, 2, 4, 16, 48, 50])
def test_every_layer_has_its_turn(every, calls_of_a_step):
    """A model calls its layers in a fixed order; a fixed place in N could miss all but one of them for ever."""
    checks, steps = Checks(every), 40 * every
    turns = [0] * calls_of_a_step
    for call in range(calls_of_a_step * steps):
        turns[call % calls_of_a_step] += checks.sums(call)
    assert all(10 < n < 120 for n in turns), turns  # 40 by right
