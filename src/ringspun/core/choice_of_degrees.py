"""The choice of degrees: how many of the ranks split heads and how many are a ring, by the bytes that each would send.

A rank that holds T = S / N of the tokens, with H query and K key/value heads of size D and b bytes an element, sends in
forward and backward together

    ring of R, heads split U ways     T U (R - 1) D (2 k b + w)         k: KV heads that it computes with, about K / U
        w, in backward                k (2 b + 2 x 4), or h (2 b + 4)   h: query heads, H / U; the smaller of the two
    exchange among U                  T (U - 1) D b 2 (2 H / U + 2 k')  k': KV heads that a rank of its row looks at

The ring's hide behind its tiles, the exchange's do not; both count alike here, for which of them hides is a matter of
lengths and links.

Source: counts of `ringspun.core.accounting`, without framing, lse and delta (`ringspun.core.ways`); in the manner of
arXiv 2405.07719, section 4.
"""

from __future__ import annotations

from dataclasses import replace

from ringspun.core.degrees import Degrees, HeadSplit
from ringspun.core.links import Links
from ringspun.core.wire import Side
from ringspun.errors import PlanError

ACCUMULATOR_BYTES = 4
ELEMENTS = 1 << 20
"""Tokens of a rank times head size, where links tell the time of messages: long enough to be rated by bandwidth."""

WeighedDegrees = tuple[tuple[Degrees, float], ...]
"""Degrees and what each costs, best first: elements a token and head size, or seconds by links."""


def sent(split: HeadSplit, degrees: Degrees, itemsize: int, backward: str = "keys") -> tuple[float, float]:
    """Bytes that the busiest rank sends per token that it holds and element of a head, forward and backward together:
    in its ring, and in exchanges.

    Args:
        backward: what travels in it (`ringspun.core.ways.WANTED`).
    """
    ring = exchange = 0.0
    for mine in range(degrees.ulysses):
        others = [u for u in range(degrees.ulysses) if u != mine]
        there = sum(_width(split.queries(u)) + 2 * _width(split.keys(u)) for u in others)
        back = len(others) * _width(split.queries(mine))
        mirrored = sum(_width(split.queries(u)) for u in others)
        mirrored += len(others) * (_width(split.queries(mine)) + 2 * _width(split.keys(mine)))
        exchange = max(exchange, float(itemsize * (there + back + mirrored)))
        keys, queries = len(split.held(mine)), _width(split.queries(mine))
        ways = {
            Side.KEYS.value: keys * (2 * itemsize + 2 * ACCUMULATOR_BYTES),
            Side.QUERIES.value: queries * (2 * itemsize + ACCUMULATOR_BYTES),
        }
        block = 2 * keys * itemsize + ways.get(backward, min(ways.values()))
        ring = max(ring, float((degrees.ring - 1) * degrees.ulysses * block))
    return ring, exchange


def choose_degrees(
    size: int, heads: int, kv_heads: int, *, itemsize: int = 2, links: Links | None = None, backward: str = "keys"
) -> WeighedDegrees:
    """Every split of `size` ranks that gives all the same number of query heads, best first; a longer ring first where
    they are equal.

    Args:
        size: ranks. heads, kv_heads: H and K. itemsize: bytes per element on the wire. links: as measured; heads are
            then split inside a node alone. backward: what travels in it (`ringspun.core.ways.WANTED`).
    Raises:
        PlanError: heads that are none.
    """
    if min(size, heads, kv_heads) < 1 or heads % kv_heads:
        raise PlanError(f"heads must be H and K, a multiple of it; got {heads} and {kv_heads}, for {size} ranks.")
    found = []
    for ulysses in range(1, size + 1):
        inside = links is None or links.node is None or links.node % ulysses == 0
        if size % ulysses or heads % ulysses or not inside:
            continue
        degrees = Degrees(size // ulysses, ulysses)
        ring, exchange = sent(HeadSplit(heads, kv_heads, ulysses), degrees, itemsize, backward)
        cost = ring + exchange
        if links is not None:
            cost = _seconds(ring, of_ring(links, degrees)) + _seconds(exchange, links)
        found.append((degrees, cost))
    return tuple(sorted(found, key=lambda one: one[1]))


def of_ring(links: Links, degrees: Degrees) -> Links:
    """The links of one ring of a hybrid, of which a node may hold fewer ranks."""
    if links.node is None or links.far is None:
        return replace(links, ranks=degrees.ring)
    here = links.node // degrees.ulysses if degrees.inner == "ulysses" else links.node
    if here > 1:
        return replace(links, ranks=degrees.ring, node=here if here < degrees.ring else None)
    return replace(links, ranks=degrees.ring, near=links.far, far=None, node=None)


def _seconds(n_bytes: float, links: Links) -> float:
    """Of a rank's messages between neighbours, the slowest of which wait for."""
    link = links.near if links.far is None or links.node is None or links.ranks <= links.node else links.far
    return link.seconds(int(n_bytes * ELEMENTS))


def _width(span: tuple[int, int]) -> int:
    return span[1] - span[0]
