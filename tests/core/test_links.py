"""Links: times between and beyond what was measured, files that come back, and files that are none."""

from __future__ import annotations

import json

import pytest

from ringspun.core.links import Link, Links
from ringspun.errors import ConfigError

LINK = Link((1000, 2000, 10_000), (1.0, 2.0, 4.0), (1.0, 3.0, 12.0))


def test_times_between_and_beyond_what_was_measured():
    assert LINK.seconds(1500) == 2.0 and LINK.seconds(1500, together=False) == 1.5
    assert LINK.seconds(1) == LINK.latency_s == 1.0
    assert LINK.seconds(6000) == 7.5
    assert LINK.seconds(20_000) == 24.0
    assert LINK.peak == 2500.0 and LINK.shared == 3.0


@pytest.mark.parametrize("far", [None, LINK])
def test_a_file_comes_back(tmp_path, far):
    links = Links(8, LINK, far, None if far is None else 4, "two racks")
    links.save(tmp_path / "links.json")
    assert Links.load(tmp_path / "links.json") == links


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": 2}, "format must be 1"),
        ({"near": None}, "near must be there"),
        ({"near": {"message_bytes": [2, 1], "alone_s": [1, 1], "together_s": [1, 1]}}, "ascending"),
        ({"near": {"message_bytes": [1, 2], "alone_s": [1], "together_s": [1, 1]}}, "alone_s"),
        ({"near": {"message_bytes": [1, 2], "alone_s": [1, 0], "together_s": [1, 1]}}, "alone_s"),
        ({"near": {"message_bytes": [1, 2], "alone_s": [1, 1], "together_s": [1, "x"]}}, "together_s"),
        ({"speed": 3}, "speed"),
    ],
)
def test_files_that_are_none_are_refused(tmp_path, change, words):
    path = tmp_path / "links.json"
    Links(2, LINK).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match="links must be a file that `ringspun bench links` wrote") as problem:
        Links.load(path)
    assert words in str(problem.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"format": 1}'])
def test_text_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match="Measure again"):
        Links.load(tmp_path / "x")
    with pytest.raises(ConfigError, match="Measure again"):
        Links.load(tmp_path / "absent")
