"""Shares of the gradients of replicated inputs, of which every rank has some: sinks and the tensor of a bias.

A rank's share comes from the pairs that it computes, and somebody else adds the shares up, in an order of his own. On a
grid (`ringspun.core.route.Route.grid`) the sum may not depend on it: every unit of queries has a share, the ring folds
them in the sequence's order, and the total is the first rank's share; the others' are zero.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ringspun.core.layout.base import RANK, START
from ringspun.core.partition import Partition
from ringspun.torch.drivers import Driver
from ringspun.torch.kernels.base import Rows, Saved, Terms


def of_sinks_and_bias(
    saved: Saved, terms: Terms, dbias: Sequence[Tensor], queries: Partition, driver: Driver, grid: int
) -> tuple[Tensor, Tensor]:
    """This process's shares of the gradients of sinks and of a bias's tensor; empty where there is none. On a grid
    collective.

    Args:
        dbias: of every rank that this process plays ``[parts, ...]``: of all its queries, or of each unit on a grid.
    """
    dsinks = none = saved.delta.new_zeros(0)
    if not grid:
        return none if terms.sinks is None else _of_sinks(saved, terms.sinks), _fold(part[0] for part in dbias)
    if terms.sinks is not None:
        parts = [_part(saved, rows) for rows in _units(queries, driver.ring_ranks)]
        each = [_of_sinks(part, terms.sinks) for part in parts]
        dsinks = _in_order(torch.stack(each) if each else none.new_zeros(0, len(terms.sinks)), queries, driver)
    return dsinks, none if terms.bias is None else _in_order(torch.cat(list(dbias)), queries, driver)


def _of_sinks(saved: Saved, sinks: Tensor) -> Tensor:
    """A sink is one more key, of value 0, in every row: its weight times (0 - delta)."""
    logits = sinks.to(saved.lse.dtype)[:, None]
    weight = torch.exp(logits - saved.lse).masked_fill(logits == -torch.inf, 0.0)
    assert saved.out is not None, "of a rank's own rows"
    seen = (saved.out != 0).any(-1)  # in a row without keys dout may hold anything, NaN too: out is 0 whatever happens
    delta = saved.delta.masked_fill(~seen, 0.0) if saved.dlse is None else torch.where(seen, saved.delta, -saved.dlse)
    return -(weight * delta).sum((0, 2))


def _units(queries: Partition, ring_ranks: Iterable[int]) -> list[slice]:
    """The rows of each unit among those of some ranks joined."""
    of_ranks = [queries.run_tokens[queries.runs[:, RANK] == rank] for rank in ring_ranks]
    edges = np.append(0, np.cumsum(np.concatenate(of_ranks)))
    return [slice(a, b) for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]


def _part(saved: Saved, rows: slice) -> Saved:
    """Some rows, laid out as if there were no others."""
    out, lse, dout, dlse, delta = saved.rows(Rows(slice(None), rows))
    out, dlse = (None if x is None else x.contiguous() for x in (out, dlse))
    return Saved(out, lse.contiguous(), dout, dlse, delta.contiguous())


def _in_order(per_unit: Tensor, queries: Partition, driver: Driver) -> Tensor:
    """This process's share of a gradient of which every unit that it holds has one, ``[units, ...]``. Collective."""
    counts = np.bincount(queries.runs[:, RANK], minlength=queries.ring_size).tolist()
    if not len(queries.runs):
        return per_unit.new_zeros(per_unit.shape[1:])
    everybody = driver.all_gather_rows(per_unit, counts)
    total = _fold(everybody[i] for i in np.argsort(queries.runs[:, START]).tolist())
    return total if 0 in driver.ring_ranks else torch.zeros_like(total)


def _fold(parts: Iterable[Tensor]) -> Tensor:
    """The sum, from left to right."""
    first, *rest = parts
    return functools.reduce(torch.add, rest, first)
