"""Sizes of a mesh, and who holds the weights on it: refused before any rank starts, with what would do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mesh_runs as mr
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from training_runs import tiny_config

from ringspun.errors import ConfigError
from ringspun.train.parallel.meshes import AXES, check_sizes, make_mesh, nearest_sizes
from ringspun.train.parallel.wrapping import decoder_layers

SIZES = st.lists(st.integers(1, 12), min_size=4, max_size=4).map(lambda sizes: dict(zip(AXES, sizes, strict=True)))


@given(sizes=SIZES, world=st.integers(1, 64))
def test_the_nearest_sizes_are_those_of_the_ranks(sizes: dict[str, int], world: int) -> None:
    """They fit; they are the wanted ones where those fit; and one other size is enough where one can be."""
    found = nearest_sizes(sizes, world)
    check_sizes(found, world)
    changed = [name for name in AXES if found[name] != sizes[name]]
    product = math.prod(sizes.values())
    if product == world:
        assert changed == []
    elif any(world % (product // size) == 0 for size in sizes.values()):
        assert len(changed) == 1


@pytest.mark.parametrize(
    ("sizes", "world", "words"),
    [
        ((1, 1, 4, 1), 8, "the job's 8 ranks; got 4, .* The nearest that has: dp_replicate 2 x dp_shard 1 x ring 4"),
        ((2, 1, 3, 1), 8, "got 6, .* nearest that has: dp_replicate 2 x dp_shard 1 x ring 4 x ulysses 1"),
        ((1, 0, 4, 1), 4, "dp_shard must be a number of ranks, at least 1; got 0"),
        ((1, 1, True, 1), 4, "ring must be a number of ranks, at least 1; got True"),
    ],
)  # fmt: skip
def test_sizes_of_other_ranks_are_refused(sizes: tuple[int, ...], world: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_sizes(dict(zip(AXES, sizes, strict=True)), world)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 3, "ulysses": 2}, "ulysses must divide ranks; got 2 and ranks = 3"),
        ({"ranks": 8, "ulysses": 8}, "ulysses must be at most model.heads, 4; got 8"),
        ({"dp_replicate": 2}, r"batch_size must be a multiple of dp_replicate \* dp_shard, 2; got 1. Set 2"),
        ({"dp_shard": 2, "batch_size": 2}, "dp_shard must be 1 where no weights are cut; got 2 and shard = 'none'"),
        ({"dp_shard": 2, "batch_size": 2, "shard": "ddp"}, "dp_shard must be 1 where no weights are cut"),
        ({"dp_replicate": 2, "batch_size": 2, "shard": "fsdp"}, "dp_replicate must be 1 for 'fsdp'"),
        ({"shard": "hsdp"}, "dp_replicate must be above 1 for 'hsdp'"),
        ({"checkpoints": "sharded"}, "checkpoints must be 'whole' where all ranks hold all weights"),
    ],
)
def test_settings_without_effect_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        tiny_config(Path("unused"), **changes)


def test_a_mesh_needs_a_group_and_a_model_its_layers() -> None:
    with pytest.raises(ConfigError, match="ranks must be in a process group; got none"):
        make_mesh(ring=2)
    with pytest.raises(ConfigError, match="layers must be given for a model that does not say which they are; Linear"):
        decoder_layers(torch.nn.Linear(2, 2))
    assert [type(layer).__name__ for layer in decoder_layers(torch.nn.Sequential(mr.tied()))] == [
        "LlamaDecoderLayer"
    ] * 2


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_every_part_of_a_mesh_has_its_ranks(pools) -> None:
    """In row-major order, the last dimension's ranks neighbours; data ranks numbered without a gap."""
    found = pools(4).run(mr.parts, {"dp_replicate": 2, "ring": 2})
    assert found == [
        {"data": [r % 2, r % 2 + 2], "context": [r // 2 * 2, r // 2 * 2 + 1], "fsdp": [r // 2 * 2, r // 2 * 2 + 1],
         "hsdp": [0, 1, 2, 3], "data_rank": [r // 2, 2]}
        for r in range(4)
    ]  # fmt: skip
