"""SVG and PNG hold the numbers that they show."""

from __future__ import annotations

import html
import json
import re
import struct
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from ringspun import Contiguous, Documents
from ringspun.errors import ConfigError, MissingExtra
from ringspun.pictures import Scene
from ringspun.pictures.docs import PICTURES
from ringspun.pictures.figures import OF_SCENE, compare, schedule, timeline
from ringspun.pictures.save import save
from ringspun.planner.hardware import cluster
from tests.pictures.scenes import a_run

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"


def held_by_svg(path: Path):
    text = path.read_text(encoding="utf-8")
    return json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL).group(1)))


def held_by_png(path: Path):
    data, place, texts = path.read_bytes(), 8, {}
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    while place < len(data):
        (size,), kind = struct.unpack(">I", data[place : place + 4]), data[place + 4 : place + 8]
        chunk = data[place + 8 : place + 8 + size]
        if kind in (b"tEXt", b"zTXt"):
            key, _, value = chunk.partition(b"\0")
            texts[key.decode()] = (value if kind == b"tEXt" else zlib.decompress(value[1:])).decode("latin-1")
        place += size + 12
    return json.loads(texts["Description"])


def same(one, other) -> bool:
    """Equal, but for the last digits of numbers, which machines may round differently."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == (pytest.approx(other, rel=1e-9, abs=1e-15) if isinstance(one, float) else other)


def figures():
    scene = Scene.of(100, 3, documents=Documents([60, 30]))
    yield from (make(scene) for make in OF_SCENE.values())
    scenes = [scene, Scene.of(100, 3, layout=Contiguous(), documents=Documents([60, 30]))]
    yield timeline.of(scene, *timeline.on(scene, cluster("H100", 3)))
    yield compare.of(scenes, *timeline.on(scene, cluster("H100", 3)))
    yield replace(a_run(), panels=a_run().panels[:2])  # each takes long


def test_files_hold_their_numbers_and_are_the_same_twice(tmp_path):
    readers = {".svg": held_by_svg, ".json": lambda p: json.loads(p.read_text()), ".png": held_by_png}
    for i, figure in enumerate(figures()):
        told = json.loads(json.dumps(figure.as_dict()))
        for ending, held in list(readers.items())[: 2 if i else 3]:  # PNG is drawn as SVG is, and slowly
            first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
            save([figure], first)
            save([figure], second)
            assert held(first) == told
            assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", PICTURES)
def test_the_pictures_of_the_docs_are_not_stale(name):
    """`make pictures` draws them anew."""
    path = FOLDER / f"{name}.svg"
    assert same(held_by_svg(path), json.loads(json.dumps(PICTURES[name]().as_dict())))
    assert path.stat().st_size < 150_000


def test_every_picture_of_the_docs_is_made():
    assert {path.stem for path in FOLDER.glob("*")} == set(PICTURES)


def test_what_cannot_be_written_is_told(tmp_path):
    figure = schedule.of(Scene.of(8, 2))
    with pytest.raises(ConfigError, match=r"save must be a file that ends in .*svg.*; got 'x\.gif'"):
        save([figure], tmp_path / "x.gif")
    with pytest.raises(ConfigError, match=r"save must be given one figure for 'x\.svg'; got 2"):
        save([figure, figure], tmp_path / "x.svg")
    with pytest.raises(ConfigError, match="must be given a timeline"):
        save([figure], tmp_path / "x.trace.json")


def test_without_matplotlib_the_install_line_is_told(monkeypatch, tmp_path):
    for name in [n for n in sys.modules if n.startswith(("matplotlib", "ringspun.pictures.plot"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr("ringspun.pictures.plot", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'ringspun\[plot\]'"):
        save([schedule.of(Scene.of(8, 2))], tmp_path / "x.svg")
