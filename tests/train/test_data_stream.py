"""The stream: one sequence of sequences, whoever reads it, however it is divided, wherever it is taken up again."""

from __future__ import annotations

import functools
import itertools
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks_data import DOCUMENTS as FEW
from on_ranks_data import batches as batches_on_ranks
from on_ranks_data import mask_on_some
from tiny_tokenizers import CHATML, byte_tokenizer
from torch.utils.data import DataLoader

from ringspun import Causal, Zigzag
from ringspun.errors import CheckpointError, DataError
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.collate import Collator, to_ring
from ringspun.train.data.packing import Piece
from ringspun.train.data.samples import Encoder
from ringspun.train.data.stream import PackedStream, measure
from ringspun.train.data.walk import joined

SEQ_LEN = 64
DOCUMENTS = [
    np.arange(n) + 1000 * (i + 1)
    for i, n in enumerate(np.random.default_rng(0).lognormal(3, 1, 150).astype(int).tolist())
]


def stream(seq_len: int = SEQ_LEN, *, documents: Any = DOCUMENTS, overflow="split", **settings: Any) -> PackedStream:
    return PackedStream(documents, Collator(seq_len, overflow=overflow), **{"pool_documents": 20, **settings})


def sequences(batches: list[dict[str, Any]]) -> list[tuple[int, list[int], list[int], list[int]]]:
    """Number, tokens, positions and documents of every sequence, in the order of their numbers."""
    found = []
    for batch in batches:
        columns = zip(
            batch["sequences"], batch["input_ids"], batch["position_ids"], batch["document_lengths"], strict=True
        )
        found += [(n, ids.tolist(), at.tolist(), list(lengths)) for n, ids, at, lengths in columns]
    return sorted(found)


WHOLE = list(stream(epochs=2))
EXPECTED = sequences(WHOLE)


def test_every_token_of_every_epoch_is_there_once():
    tokens = [t for _, ids, _, lengths in EXPECTED for t in ids[: sum(lengths)]]
    assert sorted(tokens) == sorted(int(t) for d in DOCUMENTS for t in d for _ in range(2))
    counts = WHOLE[-1]["counts"]
    assert counts["tokens"] == counts["tokens_packed"] == len(tokens) and counts["documents"] == 300
    assert counts["sequences"] * SEQ_LEN == len(tokens) + counts["padding"]
    assert all(batch["input_ids"].shape == (1, SEQ_LEN) for batch in WHOLE)
    assert [n for n, *_ in EXPECTED] == list(range(len(EXPECTED)))


@functools.cache
def read_by(batch_size: int, data_ranks: int) -> list[dict[str, Any]]:
    """The batches of the last of some data ranks."""
    return list(stream(epochs=2, batch_size=batch_size, data_ranks=data_ranks, data_rank=data_ranks - 1))


@given(data=st.data())
@settings(max_examples=60)
def test_it_goes_on_anywhere_bit_for_bit(data):
    """Whatever was read before the interruption and however the rest is read: other batches, other data ranks."""
    before = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]), label="batch size, data ranks")
    after = data.draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3)]), label="batch size, data ranks afterwards")
    read = read_by(*before)
    at = data.draw(st.integers(0, len(read) - 1), label="batches read")
    state = json.loads(json.dumps(read[at]["state"]))
    rest = []
    for data_rank in range(after[1]):
        again = stream(epochs=2, batch_size=after[0], data_ranks=after[1], data_rank=data_rank)
        again.load_state_dict(state)
        rest += list(again)
    done = (at + 1) * before[0] * before[1]
    assert [s for s in sequences(rest) if s[3]] == EXPECTED[done:]


def test_what_follows_a_state_is_the_same_in_every_field():
    again = stream(epochs=2)
    again.load_state_dict(WHOLE[7]["state"])
    for ours, theirs in zip(again, WHOLE[8:], strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name], name


@pytest.mark.processes
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_loaders_workers_change_nothing(workers):
    loader = DataLoader(stream(epochs=2), batch_size=None, num_workers=workers)
    made = list(loader)
    assert [b["sequences"] for b in made] == [b["sequences"] for b in WHOLE] and sequences(made) == EXPECTED
    assert [b["state"] for b in made] == [b["state"] for b in WHOLE]
    again = stream(epochs=2)
    again.load_state_dict(made[10]["state"])
    rest = DataLoader(again, batch_size=None, num_workers=4 - workers)
    assert sequences(list(rest)) == EXPECTED[11:]


def test_known_lengths_change_nothing_and_only_what_is_yielded_is_read():
    class Counting(list):
        read = 0

        def __getitem__(self, i):
            Counting.read += 1
            return super().__getitem__(i)

    lengths = measure(DOCUMENTS, Encoder())
    parts = []
    for data_rank in range(3):
        Counting.read = 0
        ours = stream(documents=Counting(DOCUMENTS), lengths=lengths, data_ranks=3, data_rank=data_rank)
        parts += list(ours)
        assert Counting.read < 0.6 * len(DOCUMENTS)
    assert [s for s in sequences(parts) if s[3]] == sequences(list(stream()))
    wrong = stream(lengths=lengths + np.array([1, 0]))
    with pytest.raises(DataError, match="lengths must be what measure made of these documents"):
        list(wrong)


def test_a_length_of_0_is_compared_too():
    documents = [[1, 2, 3], [], [4, 5]]
    right = measure(documents, Encoder())
    assert sequences(list(stream(8, documents=documents, lengths=right))) == sequences(
        list(stream(8, documents=documents))
    )
    wrong = right.copy()
    wrong[2, 0] = 0
    with pytest.raises(DataError, match="got 0 tokens for document 2, which has 2"):
        list(stream(8, documents=documents, lengths=wrong))


def test_order_is_of_the_seed_and_new_in_every_epoch():
    def order(**settings: Any) -> list[int]:
        return [ids[0] for _, ids, _, _ in sequences(list(stream(**settings)))]

    assert len({tuple(order(seed=seed)) for seed in range(4)}) == 4
    first, second = (stream(), stream())
    second.set_epoch(1)
    tokens = [sorted(t for _, ids, _, n in sequences(list(s)) for t in ids[: sum(n)]) for s in (first, second)]
    assert tokens[0] == tokens[1] and sequences(list(first)) != sequences(list(second))
    assert sequences(list(first)) == sequences(list(first))
    unshuffled = list(stream(512, shuffle=False, pool_documents=1))
    assert unshuffled[0]["input_ids"][0, 0] == DOCUMENTS[0][0]


@pytest.mark.parametrize("at", [0, 7, -1])
def test_a_loop_over_epochs_goes_on_after_the_state_that_it_loads(at):
    epochs = []
    ours = stream()
    for epoch in range(3):
        ours.set_epoch(epoch)
        epochs.append(list(ours))
    again = stream()
    again.load_state_dict(json.loads(json.dumps(epochs[1][at]["state"])))
    for other in (0, 2):
        with pytest.raises(CheckpointError, match=f"epoch must be that of the state that was loaded, 1; got {other}"):
            again.set_epoch(other)
    rest = []
    for epoch in (1, 2):
        again.set_epoch(epoch)
        again.set_epoch(epoch)
        rest += sequences(list(again))
    assert rest == sequences(epochs[1][at:][1:]) + sequences(epochs[2])


@pytest.mark.timeout(60)
@pytest.mark.processes
def test_a_state_that_a_loaders_worker_read_from_stops_no_later_epoch():
    first, second = stream(), stream()
    state = list(first)[5]["state"]
    first.load_state_dict(state)
    for epoch in range(2):
        if epoch:
            first.set_epoch(epoch)
        last = list(DataLoader(first, batch_size=None, num_workers=1))
    second.set_epoch(1)
    assert sequences(last) == sequences(list(second))


def test_without_end_it_goes_through_the_epochs():
    some = list(itertools.islice(stream(epochs=None), len(EXPECTED) + 40))
    assert some[-1]["state"]["epoch"] >= 2 and some[-1]["counts"]["documents"] > 300
    packed = [sum(lengths) for batch in some for lengths in batch["document_lengths"]]
    assert sum(packed) >= 0.98 * SEQ_LEN * len(packed)


def test_what_is_left_over_is_padded_or_dropped_and_counted():
    """So every data rank has as many batches as the others."""
    padded, dropped = (
        [list(stream(batch_size=2, data_ranks=4, data_rank=d, last=last)) for d in range(4)] for last in ("pad", "drop")
    )
    assert len({len(made) for made in padded}) == len({len(made) for made in dropped}) == 1
    assert len(padded[0]) == len(dropped[0]) + 1
    assert padded[3][-1]["document_lengths"][-1] == [] and (padded[3][-1]["labels"][-1] == -100).all()
    counts = dropped[0][-1]["counts"]
    assert counts["tokens_dropped"] > 0 and counts["tokens"] == counts["tokens_packed"] + counts["tokens_dropped"]
    assert counts == dropped[3][-1]["counts"] and padded[0][-1]["counts"]["tokens_dropped"] == 0
    held = sum(sum(lengths) for made in dropped for batch in made for lengths in batch["document_lengths"])
    assert held == counts["tokens_packed"]


def test_a_new_stage_goes_on_with_the_same_documents():
    """From 64 to 256 tokens, and back to 16: no document is read twice or left out."""
    read, state, seen = [], None, 0
    for seq_len, count in ((64, 9), (256, 3), (16, None)):
        stage = stream(seq_len)
        if state is not None:
            with pytest.raises(CheckpointError, match=r"seq_len must be as when .* new_stage=True"):
                stage.load_state_dict(state)
            stage.load_state_dict(state, new_stage=True)
        made = list(itertools.islice(stage, count))
        assert all(batch["input_ids"].shape == (1, seq_len) for batch in made)
        read += [t for batch in made for t in batch["input_ids"][0, : sum(batch["document_lengths"][0])].tolist()]
        state, seen = made[-1]["state"], seen + len(made)
    assert sorted(read) == sorted(int(t) for d in DOCUMENTS for t in d)
    assert made[-1]["sequences"] == [seen - 1]


def test_what_was_split_and_waits_is_whole_in_a_longer_stage():
    """One document of 90 tokens in sequences of 16: a piece is used, the others are joined; one of 40, all of which
    waits, is not cut at all any more. A state of the same length changes nothing."""
    documents = [np.arange(90), 100 + np.arange(40)]
    short = stream(16, documents=documents, shuffle=False, pool_documents=7)
    first, second = itertools.islice(short, 2)
    assert first["document_lengths"] == [[16]] and first["counts"]["documents_cut"] == 2
    longer = stream(64, documents=documents, shuffle=False, pool_documents=7)
    longer.load_state_dict(first["state"], new_stage=True)
    made = list(longer)
    assert sorted(n for batch in made for n in batch["document_lengths"][0]) == [10, 40, 64]
    assert made[0]["input_ids"][0].tolist() == list(range(16, 80)) and made[-1]["counts"]["documents_cut"] == 1
    assert made[-1]["counts"]["tokens"] == made[-1]["counts"]["tokens_packed"] == 130
    again = stream(16, documents=documents, shuffle=False, pool_documents=7)
    again.load_state_dict(first["state"], new_stage=True)
    assert next(iter(again))["input_ids"].tolist() == second["input_ids"].tolist()


pieces = st.tuples(st.integers(1, 40), st.lists(st.integers(1, 39), max_size=5)).map(
    lambda drawn: list(itertools.pairwise(sorted({0, drawn[0], *(at for at in drawn[1] if at < drawn[0])})))
)


@given(st.lists(pieces, max_size=5), st.randoms(use_true_random=False))
def test_joined_pieces_are_the_same_tokens(documents, random):
    """Each document twice, as in two epochs, some of its first pieces used already, mixed with the others'."""
    queues = [[Piece(n, *p) for p in parts[random.randint(0, len(parts)) :]] for n, parts in enumerate(documents * 2)]
    queues = [[piece._replace(document=piece.document % (len(documents) or 1)) for piece in one] for one in queues]
    waiting, started = [], [list(one) for one in queues]
    while any(queues):
        waiting.append(random.choice([one for one in queues if one]).pop(0))
    made = joined(waiting)
    assert sum(parts for _, parts in made) == len(waiting)
    for of in (waiting, [piece for piece, _ in made]):
        assert all(piece.start < piece.stop for piece in of)
    tokens = [
        sorted((p.document, t) for p in of for t in range(p.start, p.stop)) for of in (waiting, [m[0] for m in made])
    ]
    assert tokens[0] == tokens[1]
    assert len(made) <= sum(bool(one) for one in started)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"seed": 1}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"pool_documents": 21}, "pool_documents"),
        ({"overflow": "truncate"}, "overflow"),
        ({"documents": DOCUMENTS[:-1]}, "documents"),
        ({"seq_len": 65}, "seq_len"),
    ],
    ids=str,
)
def test_a_state_of_another_stream_is_refused(changed, name):
    with pytest.raises(CheckpointError, match=f"{name} must be as when the state was saved"):
        stream(**changed).load_state_dict(WHOLE[3]["state"])
    with pytest.raises(CheckpointError, match="encoder must be as when"):
        PackedStream(DOCUMENTS, Collator(SEQ_LEN, overflow="split", encoder=Encoder(end=3))).load_state_dict(
            WHOLE[3]["state"]
        )


def test_a_state_is_given_only_where_it_is_known():
    ours = stream()
    with pytest.raises(DataError, match=r"state_dict must be called in the process that reads .*batch\['state'\]"):
        ours.state_dict()
    for batch in itertools.islice(ours, 5):
        assert ours.state_dict() == batch["state"]
    ours.load_state_dict(WHOLE[3]["state"])
    with pytest.raises(DataError, match="state_dict must be called"):
        ours.state_dict()


def test_a_worker_asked_for_its_state_says_where_it_is(monkeypatch):
    """As loaders do that ask each worker for its own."""
    ours = stream()
    next(iter(ours))
    monkeypatch.setattr("ringspun.train.data.stream.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1))
    with pytest.raises(DataError, match=r"Keep batch\['state'\]"):
        ours.state_dict()
    with pytest.raises(DataError, match="load_state_dict must be called in the main process"):
        ours.load_state_dict(WHOLE[3]["state"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1; got 0"),
        ({"data_rank": 2, "data_ranks": 2}, "data_rank must be below data_ranks = 2; got 2.*not the world rank"),
        ({"seed": -1}, "seed must be"),
        ({"epochs": 0}, "epochs must be an integer >= 1, or None"),
        ({"last": "keep"}, "last must be 'pad' or 'drop'"),
        ({"lengths": np.zeros((3, 2), np.int64)}, r"lengths must be what measure made of this source, \[150, 2\]"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_bad_settings_are_named(settings, words):
    with pytest.raises(DataError, match=words):
        stream(**settings)


@pytest.mark.parametrize(
    ("documents", "settings"),
    [
        ([[]], {}),
        ([[]], {"epochs": None}),
        ([[1] * 100], {"overflow": "drop"}),
        ([[1]], {"data_ranks": 2, "last": "drop"}),
    ],
    ids=str,
)
def test_a_stream_without_a_batch_is_an_error_and_never_endless(documents, settings):
    with pytest.raises(DataError, match=r"documents must (fill a batch|leave something to pack)"):
        list(stream(documents=documents, **settings))


def test_conversations_and_texts_in_one_stream():
    encoder = Encoder(byte_tokenizer(CHATML))
    talk = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Hello."}]
    rows = [{"messages": talk}, {"text": "a text " * 40}, "short"] * 5
    collator = Collator(64, overflow="split", overflow_conversations="drop", encoder=encoder)
    counts = list(PackedStream(rows, collator))[-1]["counts"]
    assert counts["documents_cut"] == 5 and counts["documents_dropped"] == 0
    shorter = Collator(32, overflow="split", overflow_conversations="drop", encoder=encoder)
    assert list(PackedStream(rows, shorter))[-1]["counts"]["documents_dropped"] == 5
    lengths = measure(rows, encoder)
    assert lengths[:, 1].tolist() == [1, 0, 0] * 5 and lengths[2].tolist() == [6, 0]
    assert list(PackedStream(rows, shorter, lengths=lengths))[-1]["counts"]["documents_dropped"] == 5


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_plans_come_from_the_workers():
    cp = ContextParallel(Loopback(3), layout=Zigzag())
    ours = PackedStream(DOCUMENTS, Collator(SEQ_LEN, overflow="split", geometry=cp.geometry), batch_size=2)
    both = zip(DataLoader(ours, batch_size=None, num_workers=1), stream(batch_size=2, pool_documents=1024), strict=True)
    for batch, theirs in itertools.islice(both, 4):
        local, plan = to_ring(batch, cp)
        again, own = to_ring(theirs, cp, Causal())
        assert plan.schedules == own.schedules and torch.equal(local["shift_labels"], again["shift_labels"])


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["stream", "map-style"])
def test_T12_ranks_of_a_ring_read_the_same_and_data_ranks_others(kind, pools):
    """4 ranks as 2 rings of 2, shuffled, 2 epochs, what is left over dropped."""
    told = pools(4).run(batches_on_ranks, "mesh", kind, timeout_s=60)
    assert all(how == "right" for rank in told for how, _ in rank)
    assert told[0] == told[1] and told[2] == told[3] and len(told[0]) == len(told[2]) > 4
    known = {t for d in FEW for t in d}
    for mine, theirs in zip(told[0], told[2], strict=True):
        assert set(mine[1]) & set(theirs[1]) & known <= {0}  # 0 pads, and is a token of the first document


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["stream", "map-style"])
@pytest.mark.parametrize(
    ("data_rank", "error", "words"),
    [
        ("world rank", "PlanMismatchError", "input_ids"),
        ("nobody's", "DataError", "data-parallel ranks must read different sequences; ranks 0 and 1"),
    ],
)
def test_T12_a_wrong_data_rank_is_noticed_on_every_rank(data_rank, error, words, kind, pools):
    for rank in pools(4).run(batches_on_ranks, data_rank, kind, timeout_s=60):
        assert [how for how, _ in rank] == [error] and words in rank[0][1][0]


@pytest.mark.parametrize("move", ["epoch", "state"])
def test_workers_that_persist_and_missed_a_move_say_so(move):
    ours = stream()
    ours.set_epoch(1)  # before the workers: nothing to say
    loader = DataLoader(ours, batch_size=None, num_workers=1, persistent_workers=True)
    batches = list(loader)
    assert sequences(list(loader)) == sequences(batches)
    if move == "epoch":
        ours.set_epoch(2)
    else:
        ours.load_state_dict(batches[3]["state"])
    with pytest.raises(DataError, match="persistent_workers=False"):
        next(iter(loader))
    rest = list(DataLoader(ours, batch_size=None, num_workers=1))
    assert sequences(rest) == sequences(list(ours))


@pytest.mark.processes
def test_a_rank_without_a_mask_is_heard_of_on_all(pools):
    assert pools(2).run(mask_on_some, timeout_s=40) == ["DataError", "PeerError"]
