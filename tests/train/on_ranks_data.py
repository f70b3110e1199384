"""What the ranks of a pool of 4 are asked about their batches: 2 rings of 2."""

from __future__ import annotations

from torch.distributed import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler

from ringspun import Causal
from ringspun.errors import DataError, PlanMismatchError, RingspunError
from ringspun.torch import ContextParallel
from ringspun.train.data.collate import Collator, check_disjoint, to_ring
from ringspun.train.data.stream import PackedStream

DOCUMENTS = [[100 * i + j for j in range(1 + 7 * i % 23)] for i in range(50)]
COLLATE = Collator(32, overflow="error")


def batches(ring_rank: int, data_rank: str, kind: str) -> list[tuple[str, list[int]]]:
    """How two epochs of batches were received, and their tokens; `data_rank` is what this rank takes for it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    cp = ContextParallel(mesh["ring"], timeout_s=20)
    place, of = {
        "mesh": (mesh["data"].get_local_rank(), 2),
        "world rank": (ring_rank, 4),
        "nobody's": (0, 2),
    }[data_rank]
    told = []
    for batch in loader(kind, place, of):
        try:
            check_disjoint(batch, mesh["data"].get_group())
            to_ring(batch, cp, Causal())
            told.append(("right", batch["input_ids"].flatten().tolist()))
        except (DataError, PlanMismatchError) as problem:
            return [(type(problem).__name__, [str(problem)])]
    return told


def loader(kind: str, place: int, of: int):
    if kind == "stream":
        stream = PackedStream(DOCUMENTS, COLLATE, seed=1, epochs=2, data_rank=place, data_ranks=of, last="drop")
        return DataLoader(stream, batch_size=None)
    sampler = DistributedSampler(DOCUMENTS, num_replicas=of, rank=place, shuffle=True, seed=1, drop_last=True)
    made = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        made += list(DataLoader(DOCUMENTS, batch_size=4, sampler=sampler, collate_fn=COLLATE, drop_last=True))
    return made


def mask_on_some(ring_rank: int) -> str:
    """What a rank raises when only ring rank 0 has neither schedules nor a mask."""
    cp = ContextParallel(timeout_s=20)
    batch = Collator(8, overflow="split", geometry=None if ring_rank == 0 else cp.geometry)([[1, 2, 3]])
    try:
        to_ring(batch, cp)
    except RingspunError as problem:
        return type(problem).__name__
    return "nothing"
