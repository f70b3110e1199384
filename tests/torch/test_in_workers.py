"""Schedules made in a loader's worker: pure data there, a plan in the main process."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ringspun import Causal, Documents
from ringspun.errors import PlanError
from ringspun.torch import ContextParallel, Loopback

LENGTHS = [(5, 7, 1), (3, 3, 8), (13,)]
SEQ_LEN = 14


class Schedules(Dataset):
    """What a collator would do: documents and schedules of every batch, in the worker."""

    def __init__(self, context: ContextParallel) -> None:
        self.geometry = context.geometry

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int):
        documents = Documents(LENGTHS[i])
        return documents, self.geometry.schedule(Causal() & documents, SEQ_LEN, documents)


class CrossSchedules(Dataset):
    """The same for keys of another length and a mask per batch row."""

    def __init__(self, context: ContextParallel) -> None:
        self.geometry = context.geometry

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, i: int):
        masks = [Causal(), Documents(LENGTHS[i])]
        return masks, self.geometry.schedule(masks, 5, key_len=SEQ_LEN, query_start=9)


class Plans(Dataset):
    """What must not be done: a plan in the worker."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int):
        return ContextParallel(Loopback(3)).plan(SEQ_LEN, Causal())


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_schedules_of_a_worker_are_plans_in_the_main_process():
    context = ContextParallel(Loopback(3))
    for documents, schedules in DataLoader(Schedules(context), batch_size=None, num_workers=1):
        part = context.partition(SEQ_LEN, documents=documents)
        plan = part.plan(schedules)
        assert plan.schedules == part.plan(Causal() & documents).schedules
        q = torch.randn(1, 2, SEQ_LEN, 4, dtype=torch.float64)
        own = part.plan(Causal() & documents).attention(q, q, q)
        assert torch.equal(plan.attention(q, q, q), own)


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_schedules_of_cross_attention_and_rows_come_from_workers_too():
    context = ContextParallel(Loopback(3))
    for masks, schedules in DataLoader(CrossSchedules(context), batch_size=None, num_workers=1):
        own = context.plan(5, masks, key_len=SEQ_LEN, query_start=9)
        plan = own.queries.plan(schedules, keys=own.keys)
        assert plan.schedules == own.schedules and plan.mask == tuple(masks)
        q, k = (torch.randn(2, 2, n, 4, dtype=torch.float64) for n in (5, SEQ_LEN))
        assert torch.equal(plan.attention(q, k, k), own.attention(q, k, k))
        with pytest.raises(PlanError, match="schedule must be made from this partition's length, layout"):
            own.queries.plan(schedules, keys=context.partition(SEQ_LEN + 1))


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_plan_in_a_worker_is_refused():
    with pytest.raises(PlanError, match=r"plan must be made in the main process; .*geometry\.schedule"):
        next(iter(DataLoader(Plans(), batch_size=None, num_workers=1)))
