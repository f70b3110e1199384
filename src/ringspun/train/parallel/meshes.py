"""The ranks of a training job as one mesh of four named dimensions, and which of them does what.

    dp_replicate   other sequences; weights held again, whole                     } data: who reads which sequence
    dp_shard       other sequences; weights cut among them        }               }
    ring           the same sequences, cut among them             } weights cut   } context: who holds one sequence
    ulysses        the same tokens' heads, split among them       }               }

Ranks that hold one sequence together would otherwise hold the same weights, so FSDP cuts weights over them too: over
dp_shard x ring x ulysses, flattened. The last dimension's ranks are neighbours: those that talk most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringspun.core.host import is_integer
from ringspun.errors import ConfigError

AXES = ("dp_replicate", "dp_shard", "ring", "ulysses")
"""Names of the dimensions, the outermost first."""


@dataclass(frozen=True)
class JobMesh:
    """A mesh of `AXES` over all ranks of the job, and its parts by what they are for; see `make_mesh`."""

    whole: DeviceMesh

    @property
    def data(self) -> DeviceMesh:
        """Ranks that hold the same part of other sequences: for `TokenMean(cp, data=...)`."""
        return self.whole["dp_replicate", "dp_shard"]

    @property
    def context(self) -> DeviceMesh:
        """Ranks that hold one sequence together: for `ContextParallel(...)`."""
        return self.whole["ring", "ulysses"]

    @property
    def data_size(self) -> int:
        """Groups of ranks that read different sequences."""
        return self.whole.size(0) * self.whole.size(1)

    @property
    def data_rank(self) -> int:
        """Which of them this rank is in: what a sampler or loader is given as its rank."""
        return self.whole.get_local_rank("dp_replicate") * self.whole.size(1) + self.whole.get_local_rank("dp_shard")

    @property
    def fsdp(self) -> DeviceMesh:
        """One dimension, dp_shard x ring x ulysses: what FSDP cuts weights over."""
        return self.hsdp["fsdp"]

    @cached_property
    def hsdp(self) -> DeviceMesh:
        """Two dimensions, ("dp_replicate", "fsdp"): copies, and what each is cut over. Collective at its first use."""
        ranks = self.whole.mesh.reshape(self.whole.size(0), -1)
        return DeviceMesh(self.whole.device_type, ranks, mesh_dim_names=("dp_replicate", "fsdp"))


def make_mesh(
    *, dp_replicate: int = 1, dp_shard: int = 1, ring: int = 1, ulysses: int = 1, device_type: str = "cpu"
) -> JobMesh:
    """The mesh of all ranks of the default process group. Collective.

    Args:
        dp_replicate: copies of the weights (ranks). dp_shard: ranks with sequences of their own that share one copy.
        ring: shares that a sequence is cut into. ulysses: ranks that split the heads of a share.
        device_type: "cpu" (gloo) or "cuda" (nccl).
    Raises:
        ConfigError: a size that is no number of ranks, or sizes whose product is not the number of ranks; the message
            has the nearest that are.
    """
    if not dist.is_initialized():
        raise ConfigError("ranks must be in a process group; got none. Call init_process_group first.")
    sizes = dict(zip(AXES, (dp_replicate, dp_shard, ring, ulysses), strict=True))
    check_sizes(sizes, dist.get_world_size())
    return JobMesh(init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES))


def check_sizes(sizes: Mapping[str, int], world: int) -> None:
    """Refuses sizes that are not those of `world` ranks.

    Raises:
        ConfigError: see `make_mesh`.
    """
    for name, size in sizes.items():
        if not is_integer(size) or size < 1:
            raise ConfigError(f"{name} must be a number of ranks, at least 1; got {size!r}.")
    if (ranks := math.prod(sizes.values())) != world:
        raise ConfigError(
            f"mesh must have the job's {world} ranks; got {ranks}, {_shown(sizes)}. The nearest that has: "
            f"{_shown(nearest_sizes(sizes, world))}."
        )


def nearest_sizes(sizes: Mapping[str, int], world: int) -> dict[str, int]:
    """Sizes whose product is `world`: the fewest others, by the least factor; rather others of the outer dimensions."""
    divisors = [n for n in range(1, world + 1) if world % n == 0]
    legal: list[tuple[int, ...]] = [
        (*first, world // math.prod(first))
        for first in itertools.product(divisors, repeat=len(sizes) - 1)
        if world % math.prod(first) == 0
    ]
    wanted = tuple(sizes.values())

    def distance(found: tuple[int, ...]) -> tuple[int, float, tuple[int, ...]]:
        factors = [abs(math.log(mine / other)) for mine, other in zip(found, wanted, strict=True)]
        changed = [mine != other for mine, other in zip(found, wanted, strict=True)]
        return sum(changed), round(sum(factors), 9), tuple(i for i, one in enumerate(changed) if one)

    best: tuple[int, ...] = min(legal, key=distance)
    return dict(zip(sizes, best, strict=True))


def _shown(sizes: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in sizes.items())
