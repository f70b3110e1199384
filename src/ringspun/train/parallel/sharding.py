"""Who holds the weights: the names, and what they ask of a mesh. Without PyTorch, for configs read them."""

from __future__ import annotations

from typing import Literal, get_args

from ringspun.errors import ConfigError

Sharding = Literal["none", "ddp", "fsdp", "hsdp"]
SHARDED = ("fsdp", "hsdp")
"""Those that cut weights over ranks."""


def check_sharding(shard: str, *, dp_replicate: int, dp_shard: int) -> None:
    """Refuses sizes of data-parallel dimensions that `shard` would not honour.

    Raises:
        ConfigError: saying which other setting is meant.
    """
    if shard not in get_args(Sharding):
        raise ConfigError(f"shard must be one of {', '.join(get_args(Sharding))}; got {shard!r}.")
    if shard not in SHARDED and dp_shard > 1:
        raise ConfigError(
            f"dp_shard must be 1 where no weights are cut; got {dp_shard} and shard = {shard!r}. Give these ranks to "
            "dp_replicate, or shard by 'fsdp'."
        )
    if shard == "fsdp" and dp_replicate > 1:
        raise ConfigError(
            f"dp_replicate must be 1 for 'fsdp', which cuts one copy; got {dp_replicate}. Give these ranks to "
            "dp_shard, or shard by 'hsdp'."
        )
    if shard == "hsdp" and dp_replicate == 1:
        raise ConfigError("dp_replicate must be above 1 for 'hsdp', whose copies it counts; got 1. Shard by 'fsdp'.")
