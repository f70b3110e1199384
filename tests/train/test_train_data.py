"""Text files as sequences of joined documents."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from training_runs import SEQ_LEN, write_text

from ringspun.errors import DataError
from ringspun.train.data.text import END_OF_DOCUMENT, ByteStream, Position, find_text


def epoch_tokens(stream: ByteStream, sequences: int) -> list[int]:
    position: Position = {}
    tokens: list[int] = []
    for _ in range(sequences):
        packed = stream.at(position)
        assert packed.ids.shape == (stream.seq_len,) and sum(packed.documents.lengths) == stream.seq_len
        tokens += packed.ids.tolist()
        position = packed.after
    return tokens


def test_no_token_is_lost_or_added(tmp_path: Path) -> None:
    corpus = write_text(tmp_path)
    sequences = corpus.tokens // SEQ_LEN + 1
    tokens = epoch_tokens(ByteStream(corpus, seq_len=SEQ_LEN, seed=1), sequences)[: corpus.tokens]
    found = bytes(t if t != END_OF_DOCUMENT else 0 for t in tokens).split(b"\0")
    assert found.pop() == b""
    assert sorted(found) == sorted(path.read_bytes() for path in tmp_path.glob("*.txt"))


@pytest.mark.parametrize("seq_len", [2, 3, 31, 64, 1000])
def test_a_document_ends_with_its_file_or_with_the_sequence(tmp_path: Path, seq_len: int) -> None:
    stream, position = ByteStream(write_text(tmp_path), seq_len=seq_len, seed=0), {}
    for _ in range(12):
        packed = stream.at(position)
        ends = np.cumsum(packed.documents.lengths) - 1
        assert np.flatnonzero(packed.ids[:-1] == END_OF_DOCUMENT).tolist() == ends[:-1].tolist()
        assert packed.documents_cut == (packed.ids[-1] != END_OF_DOCUMENT)
        assert (packed.after["offset"] > 0) == packed.documents_cut
        position = packed.after


def test_stream_is_a_function_of_position_and_seed(tmp_path: Path) -> None:
    corpus = write_text(tmp_path)
    one, two = (ByteStream(corpus, seq_len=SEQ_LEN, seed=5) for _ in range(2))
    third = one.at(one.at(one.at({}).after).after)
    again = two.at(json.loads(json.dumps(two.at(two.at({}).after).after)))
    assert third.ids.tolist() == again.ids.tolist() and third.documents == again.documents
    orders = {tuple(epoch_tokens(ByteStream(corpus, seq_len=SEQ_LEN, seed=s), 3)) for s in range(4)}
    assert len(orders) == 4


def test_epochs_follow_each_other_in_new_orders(tmp_path: Path) -> None:
    corpus = write_text(tmp_path)
    stream = ByteStream(corpus, seq_len=corpus.tokens, seed=0)
    first = stream.at({})
    second = stream.at(first.after)
    assert [one.after for one in (first, second)] == [{"epoch": n, "document": 0, "offset": 0} for n in (1, 2)]
    assert first.ids.tolist() != second.ids.tolist()
    assert sorted(first.ids.tolist()) == sorted(second.ids.tolist())


def test_folders_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    for name in ("b/x.py", "a/y.md", "a/z.csv", "tests/t.py", ".git/g.py", "__pycache__/c.py", "empty.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.txt" else name)
    corpus = find_text(tmp_path, skip_folders=("tests", "__pycache__"))
    assert corpus.names == ("a/y.md", "b/x.py")
    assert find_text(tmp_path / "a" / "z.csv").tokens == len("a/z.csv") + 1  # one file is read whatever its name


def test_bad_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data must exist; got .*nowhere"):
        find_text(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has none that end in \.md, \.py, \.txt"):
        find_text(tmp_path)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="must not be empty"):
        find_text(tmp_path)
    with pytest.raises(DataError, match="must not be empty"):
        find_text(tmp_path / "a.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"gone\.txt: data must be readable; No such file"):
        find_text(tmp_path)


@pytest.mark.parametrize("before", [0, 5, (1 << 20) - 1, (1 << 20) + 3])
def test_text_that_is_not_utf8_is_named_with_its_byte(tmp_path: Path, before: int) -> None:
    (tmp_path / "bad.txt").write_bytes(b"x" * before + b"\xe9 caf\xe9")
    with pytest.raises(DataError, match=rf"bad\.txt: text must be UTF-8; byte {before} is 0xe9"):
        find_text(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"x" * before + "é".encode())
    find_text(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"x" * before + "é".encode()[:1])
    with pytest.raises(DataError, match=rf"byte {before} is 0xc3"):
        find_text(tmp_path)


def test_a_file_that_changes_during_a_run_is_named(tmp_path: Path) -> None:
    stream = ByteStream(write_text(tmp_path), seq_len=400, seed=0)
    (tmp_path / "doc2.txt").write_text("short")
    with pytest.raises(DataError, match=r"doc2\.txt: data must not change during a run; it had 150 bytes"):
        stream.at({})


def test_a_pipe_is_no_text(tmp_path: Path) -> None:
    """Reading it would wait for ever."""
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(DataError, match=r"a\.txt: data must be a regular file"):
        find_text(tmp_path)


def test_names_may_be_any_bytes(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("text")
    assert len(find_text(tmp_path).digest) == 16
