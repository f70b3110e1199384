"""Who reads which row, and what documents a batch of any collator has."""

from __future__ import annotations

from typing import Any

import hf_trainers as hf
import pytest
import torch
from hf_trainers import VOCAB, S
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from ringspun import Causal, Documents, Zigzag
from ringspun.errors import DataError
from ringspun.integrations.loaders import DataPlace, RingSampler, ring_loader
from ringspun.integrations.ring import RingBatches
from ringspun.integrations.transformers import PLAN_KEYWORD, prepare
from ringspun.torch import ContextParallel, Loopback
from ringspun.train.data.collate import Collator
from ringspun.train.data.stream import PackedStream


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40), batch=st.integers(1, 4), rings=st.integers(1, 5), epoch=st.integers(0, 3),
    shuffle=st.booleans(), drop=st.booleans(),
)  # fmt: skip
def test_every_row_is_learnt_once_in_the_same_step_whatever_the_rings(
    rows: int, batch: int, rings: int, epoch: int, shuffle: bool, drop: bool
) -> None:
    """Batch k of D rings of b rows is batch k of one ring of b D rows."""

    def read(size: int, rank: int, place: int) -> list[list[int]]:
        sampler = RingSampler(
            rows, size, place=DataPlace(rank, place), shuffle=shuffle, seed=7, drop_last=drop
        )  # fmt: skip
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler) and all(batches)
        return batches

    one = read(batch * rings, 0, 1)
    several = [read(batch, rank, rings) for rank in range(rings)]
    whole = RingSampler(rows, batch, place=DataPlace(0, rings), drop_last=drop)
    for k, expected in enumerate(one):
        assert whole.rows_in(k) == len(expected)
        assert [i for of_rank in several for i in of_rank[k] if i >= 0] == expected
        assert all(0 <= ~i < rows for of_rank in several for i in of_rank[k] if i < 0)
    assert all(len(of_rank) == len(one) for of_rank in several)
    learnt = sorted(i for k in one for i in k)
    assert len(set(learnt)) == len(learnt) and (drop or learnt == list(range(rows)))


def test_epochs_have_other_orders_and_loaders_tell_their_sampler() -> None:
    loader = ring_loader(hf.ROWS, hf.collate, batch_size=2, place=DataPlace(), shuffle=True)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append([tuple(row) for batch in loader for row in batch["input_ids"].tolist()])
    assert orders[0] == orders[2] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_of_a_row_that_is_read_to_take_part_nothing_is_learnt() -> None:
    loader = ring_loader(hf.ROWS[:3], hf.collate, batch_size=2, place=DataPlace(1, 2))
    (batch,) = loader
    assert batch["input_ids"].tolist() == [hf.ROWS[2]] and (batch["labels"] != -100).any()
    loader = ring_loader(hf.ROWS[:2], hf.collate, batch_size=2, place=DataPlace(1, 2))
    (batch,) = loader
    assert batch["input_ids"].tolist() == [hf.ROWS[0]] and (batch["labels"] == -100).all()


def test_a_stream_of_another_data_rank_is_refused() -> None:
    stream = PackedStream(hf.ROWS, Collator(S, overflow="error"), data_rank=0, data_ranks=2)
    with pytest.raises(DataError, match="stream must be that of data rank 1 of 2; got 0 of 2"):
        ring_loader(stream, hf.collate, batch_size=1, place=DataPlace(1, 2))


LENGTHS = [9, 5, 6]


def pieces() -> list[torch.Tensor]:
    return list(torch.randint(0, VOCAB, (sum(LENGTHS),), generator=torch.manual_seed(5)).split(LENGTHS))


def of_collator(**more: Any) -> dict[str, Any]:
    return Collator(S, overflow="error", **more)([piece.tolist() for piece in pieces()])


def flattened() -> dict[str, Any]:
    return dict(DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": p.tolist()} for p in pieces()]))


def padded() -> dict[str, Any]:
    """One document a row, some on the left and some on the right."""
    ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, (piece, start) in enumerate(zip(pieces(), (2, 0, 5), strict=True)):
        ids[row, start : start + len(piece)] = piece
        mask[row, start : start + len(piece)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    "batch", [of_collator, flattened, padded, "schedules", "function"], ids=lambda b: getattr(b, "__name__", b)
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_documents_reach_the_plan_whoever_says_them(batch: Any, size: int) -> None:
    """Each document alone, by the model's own attention: a document that saw another would differ."""
    model, whole, targets = hf.build(), torch.zeros(()), sum(LENGTHS) - len(LENGTHS)
    with torch.no_grad():
        for piece in pieces():
            whole += model(input_ids=piece[None], labels=piece[None]).loss * (len(piece) - 1)
    prepare(model)
    ring = RingBatches(ContextParallel(Loopback(size), layout=Zigzag()))
    if batch == "schedules":
        made = of_collator(geometry=ring.context.geometry)
    elif batch == "function":
        ring.mask, made = (lambda documents: Causal() & documents), of_collator()
    else:
        made = batch()
    inputs = ring.inputs(model, made)
    count = ring.mean.count([inputs])
    share, _ = ring.share(model, inputs, count.total)
    assert count.targets == (targets,)
    torch.testing.assert_close(share.detach(), whole / targets, rtol=2e-6, atol=0)
    assert Documents(LENGTHS).lengths == tuple(LENGTHS) and PLAN_KEYWORD in inputs


def test_weights_of_targets_are_honoured() -> None:
    model, ring = prepare(hf.build()), RingBatches(ContextParallel(Loopback(2)))
    batch = of_collator()
    batch["loss_weights"] = torch.rand(batch["labels"].shape, generator=torch.manual_seed(2))
    inputs = ring.inputs(model, batch)
    total = ring.mean.count([inputs]).total
    share, outputs = ring.share(model, inputs, total)
    logs = torch.log_softmax(outputs.logits, -1)
    real = inputs["shift_labels"] != -100
    each = -logs.gather(-1, inputs["shift_labels"].clamp(min=0)[..., None])[..., 0]
    weights = inputs["shift_loss_weights"]
    expected = (each * weights)[real].sum() / weights[real].sum()
    torch.testing.assert_close(share, expected, rtol=1e-6, atol=0)


def test_documents_that_are_said_twice_are_refused() -> None:
    ring, model = RingBatches(ContextParallel(Loopback(2))), prepare(hf.build())
    with pytest.raises(DataError, match="batch must say documents once; got document_lengths and attention_mask"):
        ring.inputs(model, of_collator() | {"attention_mask": torch.ones(1, S)})
    both = padded() | {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]] * 3)}
    with pytest.raises(DataError, match="attention_mask with padding and position_ids that restart"):
        ring.inputs(model, both)
