"""The ring: one forward and one backward, as generators that execute a schedule and decide nothing.

They know no mask, no layout and no route. Each step computes the tiles that the schedule names, with the block in the
slot that it names, and posts the messages that it names (`ringspun.core.route.base` says when). A driver moves them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringspun.core.route.base import OWN, Moment, StepColumn
from ringspun.core.wire import Side
from ringspun.steplog import What
from ringspun.torch.buffers import Leases
from ringspun.torch.drivers.base import RankProgram
from ringspun.torch.job import Job, Part
from ringspun.torch.kernels import accumulate
from ringspun.torch.kernels.accumulate import Result
from ringspun.torch.kernels.base import Gradients, Rows, Saved, accumulator_dtype
from ringspun.torch.mail import Mail
from ringspun.torch.sums import RowSum, add_to


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> RankProgram[tuple[Tensor, Tensor]]:
    """Local attention of local queries ``[B, H, T, D]`` over all keys: ``(out [B, H, T, Dv], lse [B, H, T])``."""
    one, dtype = job.one, accumulator_dtype(q.dtype)
    mail, leases = Mail(job, (k, v)), Leases(job.pool, q.device)
    shape = torch.Size((*q.shape[:-1], v.shape[-1]))
    found = accumulate.start(job.kernel, Result(shape, q.dtype, q.device, leases.room(dtype, q.dtype)))
    for step, row in enumerate(one.steps):
        part = job.part(step, row)
        yield from mail.arrive(step, row, part)
        mail.note(What.COMPUTE, step, source=job.owner(step, row))
        operands = q[:, part.heads], *mail.block(row, part)
        found.step(job.block(part, int(row[StepColumn.SOURCE]), operands), part.tiles, part.heads)
        mail.release(step, 2)
        yield from mail.finish(step)
    yield from mail.close()
    results = found.finish(job.terms.sinks, job.parts)
    leases.close()
    return results


def backward(job: Job, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> RankProgram[tuple[Tensor, ...]]:
    """This rank's ``(dq, dk, dv)``, each in its input's dtype, and its shares of the bias's gradient: one, or one per
    unit of queries on a grid. Blocks of keys go round again, or blocks of queries with what backward knows of them;
    their gradients follow them home, and those of the other side gather here."""
    one, dtype, grid = job.one, accumulator_dtype(q.dtype), job.schedule.grid
    queries, leases = one.side == Side.QUERIES, Leases(job.pool, q.device)
    mail = Mail(job, (q, saved.dout, saved.lse, saved.delta) if queries else (k, v))
    dq, dk, dv = (RowSum(x.shape, dtype, leases.room(dtype, x.dtype)) for x in (q, k, v))
    staying, going = ((dk, dv), (dq,)) if queries else ((dq,), (dk, dv))
    for total in staying:
        total.reserve()  # now, or blocks would take the buffers of its size that forward left
    values = q.new_zeros(0) if job.bias is None else job.bias.values
    dbias = q.new_zeros((len(job.parts), *values.shape), dtype=dtype)
    for step, row in enumerate(one.steps):
        part = job.part(step, row)
        yield from mail.arrive(step, row, part)
        arrived = False
        mail.note(What.COMPUTE, step, source=job.owner(step, row))
        operands, known = (_with_queries if queries else _with_keys)(row, part, mail.block(row, part), (q, k, v), saved)
        block = job.block(part, int(row[StepColumn.SOURCE]), operands)
        of_staying, of_going = (part.kv_heads, part.heads) if queries else (part.heads, part.kv_heads)
        here = [total.of_heads(of_staying) for total in staying]
        for g in job.kernel.backward(block, known, part.tiles):
            if not arrived:  # waited for only now, when the first tile has hidden the journey
                away = yield from mail.collect(step, row, going)
                arrived = True
            stay, go = (_of_keys(g), _of_queries(g)) if queries else (_of_queries(g), _of_keys(g))
            for total, found in zip(here, stay.parts, strict=True):
                total.add(stay.rows, found)
            for n, found in enumerate(go.parts):
                if away is None:
                    going[n].of_heads(of_going).add(go.rows, found)
                else:
                    add_to(away[n][go.rows.batch, :, go.rows.tokens], found)
            if g.dbias is not None and job.bias is not None:
                share = dbias[g.q_rows.tokens.start // grid if grid else 0]
                job.bias.rule.part(share, part.heads)[1].add_(g.dbias)
            del g, stay, go, found  # not kept while the next are made
        if not arrived:
            away = yield from mail.collect(step, row, going)
        if away is not None:
            mail.bring_home(step, row, going)
        mail.release(step, 2)
        yield from mail.post(step, Moment.AFTER)
        yield from mail.finish(step)
    yield from mail.close()
    results = *(x.sum.to(q.dtype) for x in (dq, dk, dv)), dbias
    leases.close()
    return results


class _Shares(NamedTuple):
    """Of the gradients of one side, of some rows."""

    rows: Rows
    parts: tuple[Tensor, ...]


def _of_queries(g: Gradients) -> _Shares:
    return _Shares(g.q_rows, (g.dq,))


def _of_keys(g: Gradients) -> _Shares:
    return _Shares(g.k_rows, (g.dk, g.dv))


def _with_keys(
    row: Any, part: Part, met: tuple[Tensor, ...], own: tuple[Tensor, ...], saved: Saved
) -> tuple[tuple[Tensor, ...], Saved]:
    """A rank's queries with the block of keys and values that they met, and what is known of the queries."""
    return (own[0][:, part.heads], *met), saved.heads(part.heads)


def _with_queries(
    row: Any, part: Part, met: tuple[Tensor, ...], own: tuple[Tensor, ...], saved: Saved
) -> tuple[tuple[Tensor, ...], Saved]:
    """A rank's keys and values with the block of queries that met them, and what is known of the queries."""
    keys = (x[:, part.kv_heads] for x in own[1:])
    if row[StepColumn.SLOT] == OWN:  # its own, of which it knows `out` as well
        return (own[0][:, part.heads], *keys), saved.heads(part.heads)
    q, dout, lse, delta = met
    return (q, *keys), Saved(None, lse, dout, None, delta)
