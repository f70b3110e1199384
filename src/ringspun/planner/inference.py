"""Inference over a ring: what travels, keys or queries; time to the first token; decode, where a ring loses.

Letters of arXiv 2411.01783: T new tokens, P cached ones, N ranks, C FLOP/s and BW bytes per second of one device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ringspun.core.links import Link
from ringspun.errors import ConfigError
from ringspun.planner.hardware import Device
from ringspun.planner.models import Model

Travels = Literal["kv", "q"]


def least_new_fraction(model: Model) -> float:
    """T / (T + P) up to which queries are fewer bytes than keys and values. Equation 1."""
    return 2 * model.kv_heads / model.heads


def least_new_tokens(model: Model, ranks: int, flops: float, bytes_per_s: float, element_bytes: int = 2) -> float:
    """New tokens from which keys and values hide, whatever is cached. Equation 2."""
    return ranks * flops * model.kv_heads * element_bytes / (2 * model.heads * bytes_per_s)


def least_context(ranks: int, flops: float, bytes_per_s: float, element_bytes: int = 2) -> float:
    """Tokens, new and cached, from which queries hide. Equation 3."""
    return ranks * element_bytes * flops / (4 * bytes_per_s)


def travels(
    model: Model, new: float, cached: float, *, ranks: int, flops: float, bytes_per_s: float, element_bytes: int = 2
) -> Travels:
    """Whether keys and values go round, or queries: whichever hides or is less. Algorithm 1.

    The fitted h(T, P) of the paper is left out: as printed it is right in 4 of its own 14 rows.

    Raises:
        ConfigError: no new token, or fewer cached ones than none.
    """
    if new <= 0 or cached < 0:
        raise ConfigError(f"new must be more than 0 tokens and cached at least 0; got {new} and {cached}.")
    hidden = new >= least_new_tokens(model, ranks, flops, bytes_per_s, element_bytes)
    return "kv" if hidden or new / (new + cached) >= least_new_fraction(model) else "q"


def prefill_flops(model: Model, new: float, cached: float = 0, *, parameters: float | None = None) -> float:
    """Forward, of one prompt: products by all parameters (default: the model's own), causal attention.

    Source: arXiv 2411.01783: 2 W T + 4 D L (T^2 / 2 + T P).
    """
    weights = model.parameters if parameters is None else parameters
    return 2 * weights * new + 4 * model.q_width * model.layers * (new * new / 2 + new * cached)


def first_token_seconds(
    model: Model, new: float, devices: int, flops: float, cached: float = 0, *, parameters: float | None = None
) -> float:
    """Time to the first token, if transfers hide: one rate for all. Good to 10 % from 8,000 tokens per device on; short
    prompts on many devices take longer than this says (launches and ranks that wait for each other are not in it)."""
    return prefill_flops(model, new, cached, parameters=parameters) / (devices * flops)


@dataclass(frozen=True)
class Decode:
    """Attention of one new token of each sequence, one layer, in seconds.

    Args:
        local: reading a rank's part of the cache. ring: that, with keys and values going round. pass_q: with the query
            going round and partial results sent home. merge: with one merge of all ranks' partial results. whole: the
            whole cache on one rank. whole_fits: whether that holds it, beside the weights.
    """

    local: float
    ring: float
    pass_q: float
    merge: float
    whole: float
    whole_fits: bool = True

    @property
    def best(self) -> str:
        """The quickest of those that can be."""
        whole = self.whole if self.whole_fits else math.inf
        ways = {"one rank": whole, "one merge": self.merge, "passing queries": self.pass_q, "a ring": self.ring}
        return min(ways, key=lambda name: ways[name])


def decode(
    device: Device, link: Link, model: Model, cached: float, ranks: int, *, batch: int = 1, shared_heads: int = 1,
    element_bytes: int = 2,
) -> Decode:  # fmt: skip
    """What a new token costs by where the cache lies and what travels.

    Args:
        cached: tokens of each sequence. shared_heads: devices that share out the heads (tp).
    """
    width = max(1.0, model.kv_heads / shared_heads) * model.head_size
    n_bytes = 2 * batch * cached * width * element_bytes
    local, whole = (n_bytes / n / device.memory_bytes_per_s for n in (ranks, 1))
    heads = model.heads / shared_heads
    query = math.ceil(batch * heads * model.head_size * element_bytes)
    partial = math.ceil(batch * heads * (model.head_size + 1) * 4)
    if ranks == 1:
        return Decode(whole, whole, whole, whole, whole)
    shards = min(shared_heads, model.kv_heads)
    held = cache_bytes(model, cached, devices=shards, batch=batch, element_bytes=element_bytes)
    fits = held + model.parameters * element_bytes / shared_heads <= device.memory_bytes
    block = link.seconds(math.ceil(n_bytes / ranks))
    turns = math.ceil(math.log2(ranks))
    return Decode(
        local,
        local + (ranks - 1) * max(local, block),
        local + (ranks - 1) * max(local, link.seconds(query)) + link.seconds((ranks - 1) * partial),
        link.seconds(query) + local + turns * link.seconds(partial),  # the query is known everywhere after one hop
        whole,
        fits,
    )


def cache_bytes(model: Model, tokens: float, *, devices: int = 1, batch: int = 1, element_bytes: int = 2) -> float:
    """Key/value cache of one device; sliding layers keep their window alone."""
    slid = min(tokens, model.window or tokens)
    lengths = model.full_layers * tokens + (model.layers - model.full_layers) * slid
    return 2 * batch * lengths * model.kv_width * element_bytes / devices


@dataclass(frozen=True)
class Disaggregation:
    """Prefill and decode on devices of their own.

    Args:
        prefill, decode: devices of each. why: in words.
    """

    prefill: int
    decode: int
    why: str


def disaggregate(
    model: Model, device: Device, devices: int, *, prompt: float, answer: float, batch: int = 8, element_bytes: int = 2
) -> Disaggregation:
    """How many devices to give to prefill, so that neither side waits for the other.

    Args:
        prompt, answer: tokens of a request. batch: sequences that decode together.
    """
    if devices < 2:
        raise ConfigError(f"devices must be at least 2 to split; got {devices}.")
    prefill = prefill_flops(model, prompt) / device.attention
    weights = model.parameters * element_bytes / batch
    cache = cache_bytes(model, prompt + answer / 2, element_bytes=element_bytes)
    decoding = answer * (weights + cache) / device.memory_bytes_per_s
    share = prefill / (prefill + decoding)
    first = min(devices - 1, max(1, round(devices * share)))
    return Disaggregation(
        first,
        devices - first,
        f"a request costs {prefill:.1f} device-seconds of prefill, which computes, and {decoding:.1f} of decode, which "
        "reads memory",
    )
