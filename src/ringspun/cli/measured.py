"""What the commands of `ringspun bench` share."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from ringspun.cli.options import bounded, one_of
from ringspun.core.mask import Mask
from ringspun.core.route import Ring, Route
from ringspun.core.text import parse_layout, parse_mask, parse_route
from ringspun.errors import RingspunError

if TYPE_CHECKING:
    from ringspun.testing.work import Work

T = TypeVar("T")
U = TypeVar("U")

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""Element size of every dtype that a ring takes on a CPU."""
MOST_RANKS = 64


def measured_rows(wanted: Callable[[], list[T]], measure: Callable[[T], U]) -> list[U]:
    """What was measured of all that is wanted; what cannot be is told in one line."""
    try:
        works = wanted()
    except (ValueError, TypeError) as problem:
        typer.echo(f"ringspun bench: {problem}", err=True)
        raise typer.Exit(2) from None
    try:
        return [measure(work) for work in works]
    except RingspunError as problem:
        typer.echo(f"ringspun bench: {_brief(problem)}", err=True)
        raise typer.Exit(1) from None


def attention_work(
    ranks: int, seq_len: int, shape: tuple[int, int, int, str], mask: str, layout: str, route: Route, batch: int = 1,
    ulysses: int = 1,
) -> Work:  # fmt: skip
    """The work, if a ring can do it on this machine."""
    from ringspun.testing.work import Work

    heads, kv_heads, head_size, dtype = shape
    element = BYTES[one_of("dtype", dtype, tuple(BYTES))]
    bounded("heads", heads, least=1)
    bounded("head-size", head_size, least=1)
    if heads % bounded("kv-heads", kv_heads, least=1):
        raise ValueError(f"kv-heads must divide heads; got {kv_heads} and heads = {heads}.")
    needed = 4 * batch * seq_len * (heads + kv_heads) * head_size * element  # q, k, v, out and their gradients
    if needed > machine_bytes():
        raise ValueError(
            f"q, k, v, out and their gradients must fit this machine's {machine_bytes():,} bytes; they take {needed:,} "
            f"(batch {batch}, seq-len {seq_len}, heads {heads} and {kv_heads}, head-size {head_size}, {dtype}). "
            "Ask for less."
        )
    if ranks % ulysses or ulysses > heads:
        raise ValueError(f"ulysses must divide ranks and be at most heads; got {ulysses}, {ranks} and {heads}.")
    dealt = _fitting(mask, seq_len), parse_layout(layout), batch
    return Work(ranks, seq_len, *shape, *dealt, route=route, ulysses=ulysses)


def route_in_blocks(text: str, block_size: int | None) -> Route:
    """The route that `text` names, its blocks at most `block_size` tokens."""
    route = parse_route(text)
    if block_size is None:
        return route
    if route != Ring():
        raise ValueError(f"block-size must come with --route ring; got {route}. Leave one out.")
    return Ring(bounded("block-size", block_size, least=1))


def _fitting(text: str, seq_len: int) -> Mask:
    mask = parse_mask(text)
    mask.regions(seq_len, seq_len)  # a mask that does not fit its length is refused before any rank starts
    return mask


def machine_bytes() -> int:
    """Bytes of this machine's memory; 1 TiB where the system does not tell."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 40


def described(work: Work) -> dict[str, Any]:
    """What a row says of the work that was measured."""
    sizes = {k: v for k, v in asdict(work).items() if isinstance(v, int | str)}
    return {**sizes, "mask": str(work.mask), "layout": str(work.layout), "route": str(work.route)}


def _brief(problem: RingspunError) -> str:
    """An error in one line: of an error on the ranks, what the first of them says, not its call stack."""
    for rank, failure in getattr(problem, "failures", {}).items():
        return f"ring rank {rank} raised {failure.kind}: {failure.message}"
    return str(problem)
