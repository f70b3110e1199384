"""The `[data]` table: every format as sequences to train on, held-out documents, and what is wrong in words."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data_sources import write_lines, write_parquet
from test_train_stages import no_profiler as no_profiler  # autouse
from test_train_stages import run as run_stages
from test_train_stages import staged
from tiny_tokenizers import CHATML, byte_tokenizer
from training_runs import losses, same_bits, tiny_config, write_text
from typer.testing import CliRunner

from ringspun.cli.train import app
from ringspun.errors import CheckpointError, ConfigError, DataError, RingspunError
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.checkpoints.resume import _comparable as comparable
from ringspun.train.config import TrainConfig, load_config
from ringspun.train.data.opening import open_data
from ringspun.train.data.packed import PackedSequences
from ringspun.train.data.stream import PackedStream
from ringspun.train.data.text import Corpus, Position, Sequences, TrainingData
from ringspun.train.data.vocabulary import encoder_of, load_tokenizer
from ringspun.train.loop import Hooks, Run, train
from ringspun.train.model import build_model

TEXTS = ["".join(chr(97 + (i * n) % 26) for i in range(3 + 7 * n % 60)) for n in range(1, 30)]
TALKS = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n} it is"}] for n in range(20)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(CHATML).save_pretrained(folder)
    return folder


def config(folder: Path, **data: Any) -> TrainConfig:
    values = {name: str(value) if isinstance(value, Path) else value for name, value in data.items()}
    return tiny_config(folder / "run", data=values, checkpoint_every=0)


def write(folder: Path, kind: str) -> Path:
    """The same texts in each format."""
    rows = [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
    if kind in ("bytes", "text"):
        for n, text in enumerate(TEXTS):
            (folder / "data").mkdir(exist_ok=True)
            (folder / "data" / f"{n:02}.txt").write_text(text)
    elif kind == "jsonl":
        write_lines(folder / "data" / "a.jsonl", rows[:11])
        write_lines(folder / "data" / "b.jsonl", rows[11:])
    elif kind == "parquet":
        write_parquet(folder / "data" / "a.parquet", rows)
    else:
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(folder / "data")
    return folder / "data"


def read(sequences: Sequences, count: int, position: Position | None = None) -> tuple[list[list[int]], Position]:
    """The documents of some sequences, as they lie in them, and the next position."""
    found, position = [], position or {}
    for _ in range(count):
        packed = sequences.at(position)
        assert len(packed.ids) == sum(packed.documents.lengths) + int((packed.arrays["labels"] == -100).sum())
        ends = np.cumsum(packed.documents.lengths)
        found += [packed.ids[end - n : end].tolist() for end, n in zip(ends, packed.documents.lengths, strict=True)]
        position = packed.after
    return found, position


def epoch(data: TrainingData, documents: int, **changes: Any) -> list[list[int]]:
    """Documents of the first epoch, with sequences that hold them whole."""
    sequences, found, position = data.sequences(**{"seq_len": 64, "seed": 1, **changes}), [], {}
    while len(found) < documents:
        more, position = read(sequences, 1, position)
        found += more
    return found[:documents]


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "dataset"])
def test_every_format_gives_the_same_documents(tmp_path, tokenizer, kind):
    data = open_data(config(tmp_path, format=kind, tokenizer=tokenizer), [write(tmp_path, kind)])
    tokens = byte_tokenizer()
    expected = sorted([*tokens.encode(text), tokens.eos_token_id] for text in TEXTS)
    everything = read(data.sequences(seq_len=64, seed=1), 200)[0]
    assert {tuple(one) for one in everything} == {tuple(one) for one in expected}
    here, there = data.sequences(seq_len=64, seed=1), pickle.loads(pickle.dumps(data)).sequences(seq_len=64, seed=1)
    position: Position = {}
    for _ in range(4):  # the same in every process, and from a position that was a file's
        one, two = here.at(position), there.at(json.loads(json.dumps(position)))
        assert one.ids.tolist() == two.ids.tolist() and one.documents == two.documents and one.after == two.after
        position = one.after


def test_positions_may_be_asked_for_in_any_order(tmp_path, tokenizer):
    data = open_data(config(tmp_path, format="text", tokenizer=tokenizer), [write(tmp_path, "text")])
    one, places = data.sequences(seq_len=16, seed=1), [{}]
    for _ in range(30):
        places.append(one.at(places[-1]).after)
    expected = [one.at(place) for place in places]
    for n in np.random.default_rng(0).permutation(30):
        again = one.at(places[n])
        assert again.ids.tolist() == expected[n].ids.tolist() and again.after == expected[n].after
        assert again.documents_cut == expected[n].documents_cut >= 0
    cut = sum(packed.documents_cut for packed in expected)
    assert cut == expected[-1].after["counts"]["documents_cut"] > 0


def over_stages(data: TrainingData) -> tuple[list[int], Position]:
    """The tokens of stages of several lengths, up and down, one after another."""
    position, tokens = {}, []
    for seq_len, count in ((16, 5), (48, 4), (8, 30), (33, 20)):
        found, position = read(data.sequences(seq_len=seq_len, seed=2), count, position)
        tokens += [t for one in found for t in one]
    return tokens, position


def test_bytes_go_on_where_they_were_when_the_length_changes(tmp_path):
    data = open_data(config(tmp_path), [write(tmp_path, "bytes")])
    tokens, position = over_stages(data)
    assert isinstance(data, Corpus) and data.tokens < len(tokens) < 2 * data.tokens and position["epoch"] == 1
    assert sorted(tokens[: data.tokens]) == sorted([*"".join(TEXTS).encode(), *[256] * len(TEXTS)])


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
def test_nothing_is_read_twice_or_lost_when_the_length_changes(tmp_path, tokenizer, overflow):
    """Over stages of other lengths: every token is used, waits, or is counted as dropped; documents end once each."""
    settings = {"format": "text", "tokenizer": tokenizer, "overflow": overflow, "pool_documents": 5}
    tokens, position = over_stages(open_data(config(tmp_path, **settings), [write(tmp_path, "text")]))
    counts, waiting = position["counts"], sum(stop - start for _, start, stop in position["pool"])
    assert counts["tokens"] == counts["tokens_packed"] + counts["tokens_dropped"] + waiting
    assert counts["tokens_packed"] == len(tokens) and (counts["tokens_dropped"] > 0) == (overflow != "split")
    if overflow == "split":
        ends = sum(t == byte_tokenizer().eos_token_id for t in tokens)
        assert ends + sum(stop == len(TEXTS[n]) + 1 for n, _, stop in position["pool"]) == counts["documents"]
    assert position["of"]["seq_len"] == 33


def test_conversations_learn_what_the_assistant_says(tmp_path, tokenizer):
    write_lines(tmp_path / "talks.jsonl", [{"talk": talk, "text": "not this"} for talk in TALKS])
    data = open_data(
        config(tmp_path, format="jsonl", tokenizer=tokenizer, messages_field="talk"), [tmp_path / "talks.jsonl"]
    )
    packed, tokens = data.sequences(seq_len=128, seed=0).at({}), byte_tokenizer()
    assert packed.labels is not None
    learnt = tokens.decode([t for t in packed.labels.tolist() if t != -100]).split("<|im_end|>\n")
    assert set(learnt[:-1]) <= {f"{n} it is" for n in range(20)} and len(learnt) > 2 and learnt[-1] == ""
    assert packed.targets == sum(len(one) + 2 for one in learnt[:-1])
    short = open_data(
        config(tmp_path, format="jsonl", tokenizer=tokenizer, messages_field="talk"), [tmp_path / "talks.jsonl"]
    ).sequences(seq_len=16, seed=0)
    with pytest.raises(
        DataError, match=r"talks\.jsonl, line \d+\): .* at most seq_len = 16 tokens; .* overflow_conversations"
    ):
        short.at({})


def test_rows_of_tokens_need_no_tokenizer_but_a_vocabulary(tmp_path):
    rows = [{"input_ids": [n, n + 1, 7], "labels": [-100, n + 1, 7], "loss_weights": [0, 0.5, 2]} for n in range(9)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ConfigError, match=r"model\.vocab_size must be given for rows of tokens"):
        open_data(config(tmp_path, format="jsonl"), [path])
    model = tiny_config(tmp_path).model.model_dump()
    right, small = (
        tiny_config(tmp_path, data={"format": "jsonl"}, model=model | {"vocab_size": size}) for size in (10, 9)
    )
    packed = open_data(right, [path]).sequences(seq_len=27, seed=0).at({})
    assert packed.targets == pytest.approx(9 * 2.5) and packed.loss_weights is not None
    with pytest.raises(DataError, match=r"rows\.jsonl, line 9\): input_ids must be at least 0 and below .* 9; got 9"):
        open_data(small, [path]).sequences(seq_len=27, seed=0).at({})
    assert build_model(right).get_input_embeddings().num_embeddings == 10


def test_a_model_has_a_token_for_each_of_the_tokenizers(tmp_path, tokenizer):
    data = {"format": "text", "tokenizer": str(tokenizer)}
    built = build_model(tiny_config(tmp_path, data=data))
    assert (
        built.config.vocab_size == len(byte_tokenizer()) and built.config.eos_token_id == byte_tokenizer().eos_token_id
    )
    model = tiny_config(tmp_path).model.model_dump() | {"vocab_size": 100}
    with pytest.raises(ConfigError, match=r"model\.vocab_size must be at least the 259 tokens of the data; got 100"):
        build_model(tiny_config(tmp_path, data=data, model=model))


@pytest.mark.parametrize("kind", ["bytes", "text", "parquet"])
@pytest.mark.parametrize("how", ["share", "path"])
def test_what_is_held_out_is_never_trained_on(tmp_path, tokenizer, kind, how):
    more = {} if kind == "bytes" else {"tokenizer": tokenizer}
    if how == "path":
        (tmp_path / "other").mkdir()
        other = write(tmp_path / "other", kind)
        with pytest.raises(DataError, match=r"held_out must be files that are not trained on; .* is in both"):
            open_data(config(tmp_path, format=kind, held_out=other, **more), [other])
    held_out = other if how == "path" else 0.25
    data = open_data(config(tmp_path, format=kind, held_out=held_out, **more), [write(tmp_path, kind)])
    trained, held = data.sequences(seq_len=64, seed=1), data.held_out(seq_len=64, seed=1)
    assert held is not None and "held out" in data.summary
    if kind == "bytes":
        names = [set(corpus.files) for corpus in (data, data.held)]
        assert how == "path" or (len(names[1]) == 7 and len(data.names) == 22 and not names[1] & set(data.names))
    elif how == "share":
        seen, kept = ({tuple(one) for one in read(one, 60)[0]} for one in (trained, held))
        assert len(kept) == 7 and len(seen) == 22 and not seen & kept
    plain = open_data(config(tmp_path, format=kind, **more), [tmp_path / "data"])
    assert plain.held_out(seq_len=64, seed=1) is None and (plain.digest != data.digest or how == "share")


def test_a_share_leaves_something(tmp_path):
    with pytest.raises(DataError, match=r"held_out must leave documents to train on; got 0\.5 of 1"):
        open_data(config(tmp_path, held_out=0.5), [write_text(tmp_path / "text", lengths=(9,)).root])


def test_several_paths_are_one_set_of_files(tmp_path):
    for name in ("a", "b"):
        write_text(tmp_path / name, lengths=(5, 9))
    plain = config(tmp_path)
    both = [open_data(plain, [tmp_path / one for one in order]) for order in ("ab", "ba")]
    assert both[0].digest == both[1].digest
    assert list(both[0].files) == ["a/doc0.txt", "a/doc1.txt", "b/doc0.txt", "b/doc1.txt"]
    with pytest.raises(DataError, match=r"data must name each file once; got .*a/doc0\.txt twice"):
        open_data(plain, [tmp_path / "a", tmp_path])
    rows = [write_lines(tmp_path / f"{n}.jsonl", [{"input_ids": [n]}]) for n in range(2)]
    many = tiny_config(tmp_path, data={"format": "jsonl"}, model=plain.model.model_dump() | {"vocab_size": 9})
    assert list(open_data(many, rows).files) == ["0.jsonl", "1.jsonl"]
    with pytest.raises(DataError, match="each file once"):
        open_data(many, [rows[0], tmp_path])


WRONG: dict[str, tuple[str, bytes, dict[str, Any], str]] = {
    "half a line": (
        "x.jsonl",
        b'{"text": "a"}\n\n{"text": "b',
        {},
        r"x\.jsonl: every line must be JSON; line 3 is not",
    ),
    "no JSON": ("x.jsonl", b"\0\1\2\n", {}, r"x\.jsonl: every line must be JSON; line 1 is not"),
    "binary": ("x.jsonl", b'{"text": "\xff\xfe"}\n', {}, r"x\.jsonl: text must be UTF-8; byte 10 is 0xff"),
    "empty": ("x.jsonl", b"\n \n", {}, r"data must hold at least one line; got none in .*x\.jsonl"),
    "wrong field": (
        "x.jsonl",
        b'{"body": "a"}\n{"boody": "a", "n": 1}\n',
        {"text_field": "body"},
        r"x\.jsonl, line 2\): a row must have .* fields 'body'; got 'boody', 'n'\. The nearest is 'boody'",
    ),
    "no object": (
        "x.jsonl",
        b'"a"\n',
        {"text_field": "body"},
        r"line 1\): a row must be an object with 'body'; got str",
    ),
    "no known field": ("x.jsonl", b'{"body": "a"}', {}, r"line 1\): a row must have exactly one .* data\.text_field"),
    "a number": ("x.jsonl", b"[1]\n3\n", {}, r"line 2\): documents must be strings, lists of tokens or dicts; got int"),
    "no Parquet": ("x.parquet", b"garbage" * 99, {}, r"x\.parquet: data must be a Parquet file"),
    "no data set": ("x.dataset", b"", {}, r"x\.dataset: data must be a folder of datasets' save_to_disk"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_files_are_named_before_anything_starts(tmp_path, tokenizer, name):
    file, content, more, words = WRONG[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(RingspunError, match=words):
        open_data(config(tmp_path, format=file[2:], tokenizer=tokenizer, **more), [tmp_path / file])


def test_texts_begin_as_the_tokenizer_begins_them(tmp_path):
    """Not by its having a token for that, but by its using it."""
    from tokenizers.processors import TemplateProcessing

    made = byte_tokenizer(bos_token="<|im_start|>")
    made.save_pretrained(tmp_path / "without")
    places = [("<|im_start|>", made.bos_token_id)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=places)
    made.save_pretrained(tmp_path / "with")
    found = [encoder_of(tmp_path / name)("a").fields["input_ids"].tolist() for name in ("without", "with")]
    assert found == [
        [*made.encode("a", add_special_tokens=False), made.eos_token_id],
        [*made.encode("a"), made.eos_token_id],
    ]


def test_texts_need_a_tokenizer(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", [{"input_ids": [1]}, {"text": "a"}])
    with pytest.raises(
        ConfigError, match=r"data\.tokenizer must be given for rows of text; .*x\.jsonl, line 2\) is one"
    ):
        open_data(config(tmp_path, format="jsonl"), [path])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            {"format": "json"},
            "data.format: input should be 'bytes', 'text', 'jsonl', 'parquet' or 'dataset'; got 'json'",
        ),
        ({"tokeniser": "x"}, "unknown key 'data.tokeniser'; the nearest is 'data.tokenizer'"),
        ({"tokenizer": "x"}, "tokenizer must not be given with format = 'bytes', where it has no effect"),
        ({"format": "text", "text_field": "x"}, "set format = 'jsonl' or 'parquet' or 'dataset'"),
        ({"format": "jsonl", "suffixes": [".x"]}, "suffixes must not be given with format = 'jsonl'"),
        ({"held_out": True}, "held_out must be a share of at least 0 and below 1, or a path; got True"),
        ({"path": ["a", 3]}, "data.path: path must be a text or a list of texts; got ['a', 3]"),
        ({"held_out": 1.0}, "held_out must be a share of at least 0 and below 1, or a path; got 1.0"),
        (
            {"format": "text", "overflow": "cut"},
            "data.overflow: input should be 'truncate', 'split', 'drop' or 'error'",
        ),
    ],
    ids=str,
)
def test_the_table_is_strict(tmp_path, data, words):
    smallest = {"seq_len": 8, "steps": 1, "model": tiny_config(tmp_path).model.model_dump(exclude_none=True)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in smallest.items() if key != "model"]
    for table in ("model", "data"):
        rows = data if table == "data" else smallest["model"]
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in rows.items())]
    (tmp_path / "run.toml").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.toml")
    assert words in str(caught.value)


def test_paths_of_a_config_are_from_its_folder_on(tmp_path):
    model = "[model]\nlayers = 1\nhidden_size = 8\nintermediate_size = 8\nheads = 2\n"
    data = '[data]\npath = ["a", "/b"]\nformat = "text"\ntokenizer = "../t"\nheld_out = "h"\n'
    (tmp_path / "run.toml").write_text("seq_len = 8\nsteps = 1\n" + model + data)
    found = load_config(tmp_path / "run.toml").data
    assert found.path == (tmp_path / "a", Path("/b")) and found.held_out == tmp_path / "h"
    assert found.tokenizer == tmp_path / "../t"


def test_missing_extras_and_tokenizers_are_named(tmp_path, tokenizer, monkeypatch):
    with pytest.raises(ConfigError, match=r"data must be given\. Write --data PATH, or path = \.\.\. in .* \[data\]"):
        open_data(config(tmp_path))
    path = write(tmp_path, "text")
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be given with format = 'text'"):
        open_data(config(tmp_path, format="text"), [path])
    with pytest.raises(ConfigError, match=r"tokenizer must be a folder with a Hugging Face tokenizer; got .*nowhere"):
        open_data(config(tmp_path, format="text", tokenizer=tmp_path / "nowhere"), [path])
    with pytest.raises(ConfigError, match=r"tokenizer must be loadable from .*data; .* Give a folder that save_pret"):
        open_data(config(tmp_path, format="text", tokenizer=path), [path])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RingspunError, match=r"pip install 'ringspun\[data\]'"):
        open_data(config(tmp_path, format="dataset", tokenizer=tokenizer), [path])


def test_stages_on_packed_documents_are_one_stream(tmp_path, tokenizer, capsys):
    """Ended in the first stage and at the switch to the second, it is the run that was not; nothing is lost between."""
    settings = {"data": {"format": "parquet", "tokenizer": str(tokenizer), "pool_documents": 9}}
    texts, ends = write(tmp_path, "parquet"), [2, 4]
    whole = run_stages(staged(tmp_path / "whole", **settings), texts)
    for step in ends:
        with pytest.raises(InterruptedError):
            run_stages(staged(tmp_path / "run", **settings), texts, hooks=Hooks(stop_in(step)))
    run_stages(staged(tmp_path / "run", **settings), texts)
    assert same_bits(tmp_path / "run", tmp_path / "whole")
    counts, pool = whole.position["counts"], whole.position["pool"]
    assert whole.position["of"]["seq_len"] == 48 and counts["sequences"] == 3 * 2 + 3
    assert counts["tokens"] == counts["tokens_packed"] + sum(stop - start for _, start, stop in pool)
    assert len(load_tokenizer(next((tmp_path / "run" / "checkpoints").iterdir()) / "model")) == 259
    words = f"data: {counts['documents']} documents read, {counts['documents_cut']} of them cut, 0 dropped (0 tokens)"
    assert words in capsys.readouterr().out


def stop_in(step: int) -> Any:
    def stop(number: int, model: Any) -> None:
        if number == step:
            raise InterruptedError

    return stop


def a_run(folder: Path, name: str, path: Path, *, hooks: Hooks | None = None, **changes: Any) -> Run:
    settings = tiny_config(folder / name, batch_size=2, **changes)
    return Run(settings, open_data(settings, [path]), ContextParallel(Loopback(2, seed=0)), hooks=hooks or Hooks())


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "dataset", "tokenizer"])
def test_data_that_changed_is_named_when_the_run_goes_on(tmp_path, tokenizer, kind):
    """A byte in the middle of a file: of Parquet neither its footer nor its rows' number tells of it."""
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "tokenizer")
    form = kind if kind != "tokenizer" else "jsonl"
    path, settings = write(tmp_path, form), {"data": {"format": form, "tokenizer": str(tmp_path / "tokenizer")}}
    train(a_run(tmp_path, "run", path, steps=1, checkpoint_every=1, warmup_steps=0, **settings))
    moved = path.rename(tmp_path / "moved")  # elsewhere it is the same data
    settings["data"]["path"] = [str(moved)]
    train(a_run(tmp_path, "run", moved, steps=2, checkpoint_every=1, warmup_steps=0, **settings))
    where = tmp_path / "tokenizer" if kind == "tokenizer" else moved
    victim = {"jsonl": "b.jsonl", "tokenizer": "tokenizer_config.json", "text": "07.txt"}.get(kind)
    file = where / victim if victim else next(where.glob("*.parquet" if kind == "parquet" else "*.arrow"))
    old = file.read_bytes()
    file.write_bytes(
        old.replace(b"eos", b"xos") if kind == "tokenizer" else old.replace(TEXTS[7][:1].encode(), b"Z", 1)
    )
    assert file.read_bytes() != old
    with pytest.raises(RingspunError, match=rf"{file.name} is changed or damaged|data must be a folder|loadable"):
        train(a_run(tmp_path, "run", moved, steps=3, checkpoint_every=1, warmup_steps=0, **settings))


def test_settings_of_an_older_checkpoint_are_compared_with_what_was_the_default(tmp_path):
    now = config(tmp_path, path="x").model_dump(mode="json")
    then = {name: now["data"][name] for name in ("suffixes", "skip_folders")}
    assert comparable("data", json.loads(json.dumps(then))) == comparable("data", now["data"])
    assert comparable("data", then | {"format": "text"}) != comparable("data", now["data"])
    assert comparable("data", then | {"held_out": 0.5}) != comparable("data", then | {"held_out": "a"})
    assert comparable("data", then | {"held_out": "b"}) == comparable("data", then | {"held_out": "a"})
    model = {name: value for name, value in now["model"].items() if name != "vocab_size"}
    assert comparable("model", model) == comparable("model", now["model"])
    assert comparable("model", model | {"layers": 9}) != comparable("model", now["model"])
    assert comparable("seed", 3) == 3 and comparable("model", None) is None


def test_a_position_of_another_kind_is_refused(tmp_path, tokenizer):
    packed = open_data(config(tmp_path, format="text", tokenizer=tokenizer), [write(tmp_path, "text")])
    plain = open_data(config(tmp_path), [tmp_path / "data"])
    ours, theirs = (one.sequences(seq_len=16, seed=0).at({}).after for one in (packed, plain))
    with pytest.raises(CheckpointError, match="position must be one of these 29 documents' bytes"):
        plain.sequences(seq_len=16, seed=0).at(ours)
    with pytest.raises(CheckpointError):
        packed.sequences(seq_len=16, seed=0).at(theirs)
    for wrong in ({"epoch": 0, "document": 29, "offset": 0}, {"document": -1}, {"offset": 999}, {"epoch": 1.5}):
        with pytest.raises(CheckpointError, match="position must be one of these 29"):
            plain.sequences(seq_len=16, seed=0).at(wrong)
    with pytest.raises(DataError, match=r"stream must be without end .* got epochs=1"):
        PackedSequences(PackedStream(TEXTS, packed.sequences(seq_len=16, seed=0)._stream.collator))


def test_the_command_says_where_data_may_be_given(tmp_path, tokenizer):
    model = "[model]\nlayers = 1\nhidden_size = 16\nintermediate_size = 16\nheads = 2\n"
    data = f'[data]\nformat = "jsonl"\ntokenizer = "{tokenizer}"\n'
    top = f'seq_len = 32\nsteps = 2\ndtype = "float32"\noutput = "{tmp_path / "run"}"\n'
    (tmp_path / "run.toml").write_text(top + model + data)
    runner = CliRunner()
    found = runner.invoke(app, [str(tmp_path / "run.toml")])
    assert found.exit_code == 1 and "data must be given. Write --data PATH" in found.output
    folder = write(tmp_path, "jsonl")
    paths = [str(option) for name in ("a.jsonl", "b.jsonl") for option in ("--data", folder / name)]
    found = runner.invoke(app, [str(tmp_path / "run.toml"), *paths])
    assert found.exit_code == 0, found.output
    assert "29 documents, " in found.output and losses(tmp_path / "run")
    (tmp_path / "run.toml").write_text(top + model + data + 'path = "data"\n')
    found = runner.invoke(app, [str(tmp_path / "run.toml")])
    assert found.exit_code == 0 and "already has its 2 steps" in found.output
