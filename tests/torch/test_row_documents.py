"""A batch whose rows have different documents: positions, labels and their count are each row's own."""

from __future__ import annotations

import pytest
import torch

from ringspun import Causal, Documents, Full, Keys, Zigzag
from ringspun.errors import RingspunWarning, ShapeError
from ringspun.torch import ContextParallel, Loopback, Plan

S = 9
ROWS = [Causal() & Documents([4, 3]), Causal() & Documents([5], [3]), Causal()]


def plan(ranks: int = 3) -> Plan:
    return ContextParallel(Loopback(ranks), layout=Zigzag()).plan(S, ROWS)


def test_positions_restart_in_each_row_s_own_documents():
    part = plan().partition
    found = part.gather(part.positions(restart=True), dim=1)
    assert found.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 0], [0, 0, 0, 0, 1, 2, 3, 4, 0], list(range(S))]
    assert part.documents is None and part.row_documents == (Documents([4, 3]), Documents([5], [3]), None)


def test_labels_end_with_each_row_s_own_documents():
    part = plan().partition
    ids = torch.arange(S).expand(3, -1)
    batch = part.shard_batch({"input_ids": ids, "labels": ids})
    labels = part.gather(batch["shift_labels"], dim=1)
    no = -100
    assert labels.tolist() == [
        [1, 2, 3, no, 5, 6, no, no, no],
        [no, no, no, 4, 5, 6, 7, no, no],
        [1, 2, 3, 4, 5, 6, 7, 8, no],
    ]
    assert batch["num_items_in_batch"] == 5 + 4 + 8
    assert torch.equal(batch["position_ids"], part.positions(restart=True))
    kept = part.shard_batch({"input_ids": ids, "position_ids": ids + 7})
    assert torch.equal(part.gather(kept["position_ids"], dim=1), ids + 7)


def test_as_many_rows_as_masks():
    ids = torch.zeros(2, S, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"batch must have 3 rows, one per mask of the plan; got 2\."):
        plan().partition.shard_batch({"input_ids": ids})


def test_rows_that_agree_are_the_partition_s_documents():
    docs = Documents([4, 5])
    part = ContextParallel(Loopback(2)).plan(S, [Causal() & docs, Full() & docs]).partition
    assert part.documents == docs and part.row_documents is None
    assert part.positions(restart=True).shape == (S,)


@pytest.mark.filterwarnings("error::ringspun.errors.RingspunWarning")
def test_what_is_hardly_meant_is_warned_of():
    """An encoder's padding as documents hides the decoder's first tokens; a table of blocks for another length."""
    from ringspun import Blocks

    context = ContextParallel(Loopback(2))
    with pytest.warns(RingspunWarning, match=r"write Keys\(start, stop\), for packed pairs DocumentPairs"):
        context.plan(4, Documents([5], [4]), key_len=S)
    context.plan(4, Keys(4, S), key_len=S)
    context.plan(4, Causal() & Documents([S]), key_len=S, query_start=S - 4)
    for table, size in (([[0]], 4), ([[0], [1], [2], [0]], 4), ([[0], [1], [3]], 4), ([[0]] * 3, 2)):
        with pytest.warns(RingspunWarning, match=r"Blocks of \d tokens should be a table of \d query blocks"):
            context.plan(S, Causal() & Blocks(table, size))
    context.plan(S, Blocks([[0], [1], [2]], 4))
