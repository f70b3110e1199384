"""Where documents come from: the same rows by index, in every process, and a digest that says so."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringspun.errors import DataError, MissingExtra
from ringspun.train.data.collate import Collator
from ringspun.train.data.samples import Encoder, Sample
from ringspun.train.data.sources import DataSet, JsonLines, Parquet, Rows, Source, TextFiles, open_source
from ringspun.train.data.stream import PackedStream, measure

ROWS: list[Any] = [{"text": "eins"}, {"text": "zwei ü"}, {"input_ids": [1, 2, 3]}, "drei", [4, 5]]


def rows_of(source: Source) -> list[Any]:
    return [source[i] for i in range(len(source))]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]], row_group_size: int = 3) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def test_lists_are_read_as_they_are():
    for rows in (["a", "b"], [[1, 2], [3]], ROWS, tuple(ROWS), [np.arange(3)]):
        source = open_source(rows)
        assert isinstance(source, Rows) and rows_of(source) == list(rows) and open_source(source) is source


def test_files_and_folders_of_text_are_a_document_each(tmp_path):
    for name, text in {"b.txt": "zwei ü\n", "a.md": "eins", "sub/c.py": "drei", "no.csv": "x"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    source = open_source(tmp_path)
    assert isinstance(source, TextFiles) and rows_of(source) == ["eins", "zwei ü\n", "drei"]
    assert rows_of(open_source(tmp_path / "no.csv")) == ["x"]
    (tmp_path / "b.txt").write_text("andere\n\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.txt: data must not change during a run"):
        source[1]
    assert open_source(tmp_path).digest() != source.digest()


def test_json_lines_of_one_file_several_or_a_folder(tmp_path):
    write_lines(tmp_path / "a.jsonl", ROWS[:3])
    (tmp_path / "b.jsonl").write_text('\n"drei"\n  \n[4, 5]', encoding="utf-8")  # blank lines, no newline at the end
    assert rows_of(open_source(tmp_path / "a.jsonl")) == ROWS[:3]
    for what in (tmp_path, [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]):
        source = open_source(what)
        assert isinstance(source, JsonLines) and rows_of(source) == ROWS
        assert rows_of(pickle.loads(pickle.dumps(source))) == ROWS
    before = source.digest()
    write_lines(tmp_path / "a.jsonl", ROWS[1:3])
    assert open_source(tmp_path).digest() != before


def test_bad_json_lines_are_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('"x"\n\n{"text": \n"y"\n', encoding="utf-8")
    source = open_source(path)
    assert (source[0], source[2]) == ("x", "y")
    with pytest.raises(DataError, match=r"a\.jsonl: every line must be JSON; line 3 is not"):
        source[1]
    path.write_text('"x"\n\n{"text":1\n"y"\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"a\.jsonl: data must not change"):
        source[0]
    path.write_text("\n \n", encoding="utf-8")
    with pytest.raises(DataError, match="data must hold at least one line"):
        open_source(path)
    path.write_bytes(b'"\xff"\n')
    with pytest.raises(DataError, match="text must be UTF-8"):
        open_source(path)


def test_parquet_of_one_file_several_or_a_folder(tmp_path):
    rows = [{"text": f"Nr. {i}", "meta": {"n": i}, "ids": [i] * i} for i in range(11)]
    write_parquet(tmp_path / "a.parquet", rows[:7])
    write_parquet(tmp_path / "b.parquet", rows[7:])
    for what in (tmp_path, [tmp_path / "a.parquet", tmp_path / "b.parquet"]):
        source = open_source(what)
        assert isinstance(source, Parquet) and rows_of(source) == rows
        assert source.blocks().tolist() == [3, 3, 1, 3, 1]
        assert [pickle.loads(pickle.dumps(source))[i] for i in (10, 0, 6)] == [rows[i] for i in (10, 0, 6)]
    before = source.digest()
    write_parquet(tmp_path / "b.parquet", [dict(row, text="x") for row in rows[7:]])
    assert open_source(tmp_path).digest() != before


def test_bad_parquet_is_named(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="data must hold at least one row"):
        open_source(tmp_path / "empty.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DataError, match=r"bad\.parquet: data must be a Parquet file"):
        open_source(tmp_path / "bad.parquet")


def test_without_pyarrow_the_line_to_install_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(MissingExtra, match=r"pip install 'ringspun\[data\]'"):
        open_source(tmp_path / "a.parquet")


def test_hugging_face_data_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"text": f"Nr. {i}", "ids": [i, i]} for i in range(40)]
    data = datasets.Dataset.from_list(rows)
    source = open_source(data)
    assert isinstance(source, DataSet) and rows_of(source) == rows
    assert open_source(datasets.Dataset.from_list(rows)).digest() == source.digest()
    assert open_source(data.select(range(39))).digest() != source.digest()
    for wrong in (datasets.DatasetDict({"train": data}), data.to_iterable_dataset()):
        with pytest.raises(
            DataError, match=r"source must be a list, a pathlib\.Path or a data set that is read by index"
        ):
            open_source(wrong)


@pytest.mark.parametrize("what", ["a.txt", 5, {"train": []}, iter([1]), None], ids=lambda x: type(x).__name__)
def test_what_is_no_source_is_refused(what):
    with pytest.raises(DataError, match=r"source must be a list, .* A file: write Path\(name\)"):
        open_source(what)


def test_places_without_documents_are_named(tmp_path):
    with pytest.raises(DataError, match="source must hold at least one document"):
        open_source([])
    with pytest.raises(DataError, match=r"data must exist; got .*nowhere"):
        open_source([tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match="data must hold text files"):
        open_source(tmp_path)
    with pytest.raises(DataError, match=r"paths must all be \.jsonl or all be \.parquet; got \.jsonl, \.txt"):
        open_source([tmp_path / "a.jsonl", tmp_path / "a.txt"])
    write_lines(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "b.parquet").write_bytes(b"")
    with pytest.raises(DataError, match=r"folder must hold one kind of files; .* has \.jsonl and \.parquet"):
        open_source(tmp_path)


class InBlocks(Rows):
    """Rows that are cheap to read in blocks of three."""

    def blocks(self) -> Any:
        return np.array([3] * (len(self) // 3) + [len(self) % 3])


def test_an_order_has_every_document_once_and_keeps_blocks_together():
    source, other = InBlocks(list(range(20))), Rows(list(range(20)))
    assert source.order(None).tolist() == list(range(20))
    orders = [tuple(s.order([seed, epoch])) for s in (source, other) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 8 and all(sorted(order) == list(range(20)) for order in orders)
    assert source.order([0, 0]).tolist() == list(orders[0])
    blocks = [i // 3 for i in orders[0]]
    assert sum(a != b for a, b in pairwise(blocks)) == 6
    assert len({tuple(dict.fromkeys(i // 3 for i in order)) for order in orders[:4]}) == 4  # and blocks in any order


def test_a_digest_tells_rows_apart_and_no_others():
    different = [
        ["ab", "c"], ["a", "bc"], ["abc"], [[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [{"a": 1}], [{"b": 1}],
        [{"a": [1]}], [{"a": None}], [{"a": "None"}], [True], [1], [1.0], [np.arange(3)], [np.arange(3.0)], [[]], [""],
    ]  # fmt: skip
    assert len({Rows(rows).digest() for rows in different}) == len(different)
    assert Rows([{"a": 1, "b": [2]}]).digest() == Rows([{"b": [2], "a": 1}]).digest()
    assert Rows([[1, 2]]).digest() == Rows([(1, 2)]).digest() == Rows([np.array([1, 2])]).digest()


def test_a_digest_is_of_all_values_and_not_of_how_numpy_prints_them():
    def digests(*arrays: np.ndarray) -> set[str]:
        samples = [[Sample({"input_ids": one, "labels": tokens})] for one in arrays]
        rows = [[{"input_ids": one, "labels": tokens}] for one in arrays]
        mixed = [[[None, one]] for one in arrays]
        objects = [[np.array([*one.tolist(), None])] for one in arrays]
        return {Rows(made).digest() for kind in (samples, rows, mixed, objects) for made in kind}

    tokens = np.arange(5000)
    other = tokens.copy()
    other[2500] = 7
    assert len(digests(tokens)) == 4 and len(digests(tokens, other)) == 8
    assert digests(tokens.copy()) == digests(tokens)
    assert len(digests(tokens, tokens.astype(np.int32), tokens.astype(">i4"))) == 10  # a list has no dtype
    sample = Sample({"input_ids": tokens, "labels": tokens})
    assert Rows([sample]).digest() != Rows([Sample(sample.fields, whole=True)]).digest()


BAD = {"input_ids": [1, 2], "labels": [1]}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("rows", "document 4"),
        ("jsonl", r"document 4 \(.*b\.jsonl, line 3\)"),
        ("parquet", r"document 4 \(.*b\.parquet, row group 1, its row 0\)"),
        ("text", r"document 1 \(.*b\.txt\)"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(kind, where, tmp_path):
    good, source = {"input_ids": [1, 2], "labels": [1, 2]}, tmp_path
    if kind == "rows":
        source = [good] * 4 + [BAD]
    elif kind == "jsonl":
        write_lines(tmp_path / "a.jsonl", [good] * 3)
        (tmp_path / "b.jsonl").write_text(f"{json.dumps(good)}\n\n{json.dumps(BAD)}\n")
    elif kind == "parquet":
        write_parquet(tmp_path / "a.parquet", [good] * 3, 1)
        write_parquet(tmp_path / "b.parquet", [good, BAD], 1)
    else:
        (tmp_path / "a.txt").write_text("")
        (tmp_path / "a1.txt").write_text("a")
        (tmp_path / "b.txt").write_text("b")
    encoder = Encoder(NoB()) if kind == "text" else Encoder()
    words = f"^{where}: " + (
        "it must be readable; ValueError: no b" if kind == "text" else "labels must have one value"
    )
    with pytest.raises(DataError, match=words):
        list(PackedStream(source, Collator(8, overflow="split", encoder=encoder)))
    with pytest.raises(DataError, match=words):
        measure(source, encoder)


def test_a_bad_row_of_a_batch_is_named():
    with pytest.raises(DataError, match=r"^document 1: it must be readable; ValueError"):
        Collator(8, overflow="split")([[1], {"input_ids": [[1], [2, 3]]}])


class NoB:
    """A tokenizer that fails as they do."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if text == "b":
            raise ValueError(f"no {text}")
        return [1]


def test_a_changed_or_deep_line_is_told_in_its_own_words(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [[1], [2]])
    source = open_source(path)
    write_lines(path, [[1], [3]])
    with pytest.raises(DataError, match="must not change") as told:
        source[0]
    assert "must be JSON" not in str(told.value)
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="line 1 is not"):
        open_source(path)[0]


def test_a_parquet_file_that_changes_while_it_is_read_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [{"input_ids": [i]} for i in range(9)])
    source = open_source(path)
    assert source[0] == {"input_ids": [0]}
    write_parquet(path, [{"input_ids": [100 + i]} for i in range(9)])
    with pytest.raises(DataError, match="must not change"):
        source[8]
    broken = bytearray(path.read_bytes())
    broken[4:40] = b"\xff" * 36
    path.write_bytes(broken)
    with pytest.raises(DataError, match="row group 0"):
        open_source(path)[0]
