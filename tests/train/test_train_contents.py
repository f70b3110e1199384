"""Data files are compared by what is in them: when a run resumes, and whenever a block is read."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_runs import write_text

from ringspun.errors import DataError
from ringspun.train.data import contents
from ringspun.train.data.contents import BLOCK_BYTES, differences, manifest, read_again, read_text
from ringspun.train.data.text import ByteStream, find_text

SIZES = st.sampled_from([1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, 17 * BLOCK_BYTES + 5])


def some_text(size: int) -> bytes:
    return np.random.default_rng(size).integers(32, 127, size, dtype=np.uint8).tobytes()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data") / "text.txt"


@given(size=SIZES, data=st.data())
def test_any_part_is_read_as_it_is(path: Path, size: int, data: st.DataObject) -> None:
    path.write_bytes(some_text(size))
    found = read_text(path)
    assert found.size_bytes == size and found.sha256 == hashlib.sha256(some_text(size)).hexdigest()
    start = data.draw(st.integers(0, size))
    count = data.draw(st.integers(0, size - start))
    assert read_again(path, found, start=start, count=count) == some_text(size)[start : start + count]


@given(size=SIZES, data=st.data())
def test_a_flipped_bit_is_named_where_its_block_is_read_and_only_there(
    path: Path, size: int, data: st.DataObject
) -> None:
    path.write_bytes(some_text(size))
    found = read_text(path)
    at = data.draw(st.integers(0, size - 1))
    damaged = bytearray(some_text(size))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    start = data.draw(st.integers(0, size - 1))
    count = data.draw(st.integers(1, size - start))
    block = at // BLOCK_BYTES
    if start // BLOCK_BYTES <= block <= (start + count - 1) // BLOCK_BYTES:
        first, last = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, size)
        with pytest.raises(DataError, match=rf"text\.txt: data must not change .*; bytes {first} to {last} are not"):
            read_again(path, found, start=start, count=count)
    else:
        assert read_again(path, found, start=start, count=count) == some_text(size)[start : start + count]


@pytest.mark.parametrize("size", [0, 5, 3 * BLOCK_BYTES])
def test_another_size_is_named(path: Path, size: int) -> None:
    path.write_bytes(some_text(2 * BLOCK_BYTES))
    found = read_text(path)
    path.write_bytes(some_text(size))
    with pytest.raises(DataError, match=r"text\.txt: data must not change during a run; it had 131072 bytes"):
        read_again(path, found, start=0, count=3)
    path.unlink()
    with pytest.raises(DataError, match=r"text\.txt: data must be readable; No such file"):
        read_again(path, found, start=0, count=3)


def test_a_stream_reads_only_what_it_found(tmp_path: Path) -> None:
    """A change that keeps the size."""
    corpus = write_text(tmp_path)
    stream = ByteStream(corpus, seq_len=corpus.tokens, seed=0)
    stream.at({})
    text = (tmp_path / "doc4.txt").read_text()
    (tmp_path / "doc4.txt").write_text(text[::-1])
    with pytest.raises(DataError, match=r"doc4\.txt: data must not change during a run; bytes 0 to 44 are not"):
        stream.at({})
    (tmp_path / "doc4.txt").write_text(text)
    stream.at({})


def test_the_digest_is_that_of_names_and_contents(tmp_path: Path) -> None:
    corpus = write_text(tmp_path / "text")
    assert corpus.digest == write_text(tmp_path / "moved").digest
    text = (tmp_path / "text" / "doc0.txt").read_text()
    (tmp_path / "text" / "doc0.txt").write_text(text[::-1])
    assert find_text(tmp_path / "text").digest != corpus.digest
    (tmp_path / "text" / "doc0.txt").write_text(text)
    (tmp_path / "text" / "doc0.txt").rename(tmp_path / "text" / "doc00.txt")
    assert find_text(tmp_path / "text").digest != corpus.digest


def test_the_manifest_is_what_sha256sum_says(tmp_path: Path) -> None:
    corpus = write_text(tmp_path)
    entries = json.loads(manifest(corpus.files))["files"]
    assert list(entries) == [f"doc{number}.txt" for number in range(6)]
    assert entries["doc2.txt"]["bytes"] == 150
    told = subprocess.run(["sha256sum", tmp_path / "doc2.txt"], capture_output=True, text=True, check=True).stdout
    assert told.split()[0] == entries["doc2.txt"]["sha256"]
    assert list(find_text(tmp_path / "doc2.txt").files) == ["doc2.txt"]


def test_differences_are_named(tmp_path: Path) -> None:
    kept = tmp_path / "data.json"
    kept.write_bytes(manifest(write_text(tmp_path / "text").files))
    (tmp_path / "text" / "doc0.txt").write_text("other")
    (tmp_path / "text" / "doc1.txt").unlink()
    (tmp_path / "text" / os.fsdecode(b"caf\xe9.txt")).write_text("new")
    now = find_text(tmp_path / "text").files
    words = ["doc1.txt is missing", os.fsdecode(b"caf\xe9.txt is new"), "doc0.txt is changed or damaged"]
    assert differences(kept, now) == ", ".join(words)
    for number in range(2, 6):
        (tmp_path / "text" / f"doc{number}.txt").write_text("other")
    told = differences(kept, find_text(tmp_path / "text").files)
    assert told.startswith(", ".join(words)) and told.endswith("doc3.txt is changed or damaged and 2 more")


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"files": 3}', '{"files": [3]}', "[" * 100_000, "\udcff"])
def test_a_manifest_that_cannot_be_read_hides_only_the_names(tmp_path: Path, text: str | None) -> None:
    kept = tmp_path / "data.json"
    if text is not None:
        kept.write_bytes(text.encode(errors="surrogateescape"))
    told = differences(kept, write_text(tmp_path / "text").files)
    assert told == f"files were added, removed or changed ({kept} cannot be read, so which is not known)"


def test_a_manifest_that_fits_says_so_without_names(tmp_path: Path) -> None:
    """The run's data is decided by its checkpoint; data.json only gives the names."""
    files = write_text(tmp_path / "text").files
    (tmp_path / "data.json").write_bytes(manifest(files))
    assert differences(tmp_path / "data.json", files) == "files were added, removed or changed"


def test_blocks_fit_the_pieces_that_are_read() -> None:
    assert contents._READ_BYTES % BLOCK_BYTES == 0
