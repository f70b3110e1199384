"""The ring: one forward and one backward, as generators that execute a schedule and decide nothing.

They know no mask, no layout and no route. Each step computes the tiles that the schedule names, with the block in the
slot that it names, and posts the messages that it names (`ringspun.core.route.base` says when). A driver moves them.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspun.core.route.base import NONE, OWN, Action, MessageColumn, Moment, StepColumn, pack_slot
from ringspun.core.schedule import Blocks, Pass, Schedule
from ringspun.core.wire import Format, Header, Payload, Side
from ringspun.steplog import StepLog, What
from ringspun.steplog.log import call_words
from ringspun.torch.bias import RankBias
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers.base import RankProgram, Together, Transfer
from ringspun.torch.kernels.base import Block, Kernel, Saved, StepTiles, Terms, accumulator_dtype
from ringspun.torch.messages import check, clear, seal, views
from ringspun.torch.softmax import RunningSoftmax
from ringspun.torch.sums import RowSum

Flow = Generator[Any, Any, None]


@dataclass(frozen=True)
class Job:
    """One rank's part of one call.

    Args:
        schedule: what to do. one: its pass that is to be done. blocks: what goes round in it. tiles: the tiles of each
            step. kernel: who computes them. wire: what messages look like.
        pool: where buffers come from. terms: what enters beside q, k, v. bias: this rank's, where there is one.
        plan_id, call, phase: what stands in headers: the plan; the number of this call on this ring; 0 in forward, in
            backward 1 + the number of the forward call that it belongs to.
        log: this rank's. sync_steps: whether all ranks finish a step before the next.
        sums: whether messages carry checksums.
    """

    schedule: Schedule
    one: Pass
    blocks: Blocks
    tiles: list[StepTiles]
    kernel: Kernel
    wire: Format
    pool: BufferPool
    terms: Terms
    bias: RankBias | None
    plan_id: int
    call: int
    phase: int
    log: StepLog
    sync_steps: bool
    sums: bool

    @property
    def parts(self) -> list[slice]:
        """Rows of the queries that are summed over, or gone through, by themselves: all, or each unit on a grid."""
        tokens, grid = self.schedule.local_tokens, self.schedule.grid
        return [slice(a, min(a + grid, tokens)) for a in range(0, tokens, grid)] if grid else [slice(0, tokens)]

    def owner(self, step: int, row: Any) -> int:
        """Ring rank whose block a step computes with; this one's where it computes nothing."""
        blocks = self.blocks
        return blocks.owner(int(row[StepColumn.SOURCE])) if len(self.tiles[step].tiles) else blocks.ring_rank

    def block(self, step: int, source: int, operands: tuple[Tensor, ...]) -> Block:
        """The q, k and v that meet in a step that is about the block `source`."""
        q, k, v = operands
        bias = None if self.bias is None or not len(self.tiles[step].tiles) else self.bias.block(source)
        return Block(q, k, v, self.terms.scale, self.terms.softcap, bias)


def forward(job: Job, q: Tensor, k: Tensor, v: Tensor) -> RankProgram[tuple[Tensor, Tensor]]:
    """Local attention of local queries ``[B, H, T, D]`` over all keys: ``(out [B, H, T, Dv], lse [B, H, T])``."""
    one = job.one
    mail = _Mail(job, (k, v))
    running = RunningSoftmax((*q.shape[:-1], v.shape[-1]), accumulator_dtype(q.dtype), q.device)
    for step, row in enumerate(one.steps):
        yield from mail.wait(step, Moment.BEFORE)
        yield from mail.post(step, Moment.BEFORE)
        mail.note(What.COMPUTE, step, source=job.owner(step, row))
        block = job.block(step, int(row[StepColumn.SOURCE]), (q, *mail.block(step, row)))
        for rows, out, lse in job.kernel.forward(block, job.tiles[step]):
            running.add(rows, out, lse)
        yield from mail.finish(step)
    yield from mail.close()
    if job.terms.sinks is not None:
        for part in job.parts:
            running.add_sinks(job.terms.sinks, part)
    return running.out.to(q.dtype), running.lse


def backward(job: Job, q: Tensor, k: Tensor, v: Tensor, saved: Saved) -> RankProgram[tuple[Tensor, ...]]:
    """This rank's ``(dq, dk, dv)``, each in its input's dtype, and its shares of the bias's gradient: one, or one per
    unit of queries on a grid. Blocks of keys go round again, or blocks of queries with what backward knows of them;
    their gradients follow them home, and those of the other side gather here."""
    one, dtype, grid = job.one, accumulator_dtype(q.dtype), job.schedule.grid
    queries = one.side == Side.QUERIES
    mail = _Mail(job, (q, saved.dout, saved.lse, saved.delta) if queries else (k, v))
    dq, dkv = (RowSum(q, dtype),), (RowSum(k, dtype), RowSum(v, dtype))
    going, staying = (dq, dkv) if queries else (dkv, dq)
    values = q.new_zeros(0) if job.bias is None else job.bias.values
    dbias = q.new_zeros((len(job.parts), *values.shape), dtype=dtype)
    for step, row in enumerate(one.steps):
        yield from mail.wait(step, Moment.BEFORE)
        yield from mail.post(step, Moment.BEFORE)
        arrived = False
        mail.note(What.COMPUTE, step, source=job.owner(step, row))
        met = mail.block(step, row)
        operands, known = _visited(row, met, q, k, v, saved) if queries else ((q, *met), saved)
        block = job.block(step, int(row[StepColumn.SOURCE]), operands)
        for g in job.kernel.backward(block, known, job.tiles[step]):
            if not arrived:  # waited for only now, when the first tile has hidden the journey
                yield from mail.wait(step, Moment.AFTER)
                away = mail.gradients(row)
                arrived = True
            of_q, of_kv = (g.q_rows, (g.dq,)), (g.k_rows, (g.dk, g.dv))
            (there, gone), (here, stayed) = (of_q, of_kv) if queries else (of_kv, of_q)
            for total, part in zip(staying, stayed, strict=True):
                total.add(here, part)
            for n, part in enumerate(gone):
                if away is None:
                    going[n].add(there, part)
                else:
                    away[n][there.batch, :, there.tokens] += part
            if g.dbias is not None:
                dbias[g.q_rows.tokens.start // grid if grid else 0] += g.dbias
        if not arrived:
            yield from mail.wait(step, Moment.AFTER)
            mail.gradients(row)
        mail.bring_home(row, going)
        yield from mail.post(step, Moment.AFTER)
        yield from mail.finish(step)
    yield from mail.close()
    return dq[0].sum.to(q.dtype), dkv[0].sum.to(k.dtype), dkv[1].sum.to(v.dtype), dbias


def _visited(
    row: Any, met: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, saved: Saved
) -> tuple[tuple[Tensor, ...], Saved]:
    """A rank's keys and values with the block of queries that it met, and what is known of these."""
    if row[StepColumn.SLOT] == OWN:  # its own, of which it knows `out` as well
        return (q, k, v), saved
    their_q, dout, lse, delta = met
    return (their_q, k, v), Saved(None, lse, dout, None, delta)


class _Posted(NamedTuple):
    """Messages under way: those that come, with the header that each must have and who sends it; and what the step log
    calls the time that they are waited for at."""

    ticket: Any
    step: int
    when: int
    expected: list[tuple[Tensor, Header, int]]


class _Mail:
    """One rank's buffers and messages during one pass. `own`: the rank's tensors of the side that travels."""

    def __init__(self, job: Job, own: tuple[Tensor, ...]) -> None:
        self._job, self._pass, self._own = job, job.one, own
        self._me = job.schedule.ring_rank
        self._device = own[0].device
        self._slots = {
            key: job.pool.lease(job.wire.message_bytes(key[0], rows), self._device)
            for key, rows in job.one.slot_rows(job.blocks.travelling_tokens).items()
        }
        self._open: dict[tuple[int, Moment], list[_Posted]] = {}
        self.note = partial(job.log.note, job.call, job.phase)
        self.note(What.CALL)

    def post(self, step: int, moment: Moment) -> Flow:
        """Start the messages of one step and moment, those together that are waited for together."""
        rows = self._pass.messages_of(step, moment)
        for due in np.unique(rows[:, MessageColumn.DUE]).tolist():
            transfers, expected = [], []
            when = moment + len(Moment) * (due - step - 1)
            for row in rows[rows[:, MessageColumn.DUE] == due]:
                transfer, header = self._message(row, when)
                transfers.append(transfer)
                if transfer.action == Action.RECEIVE:
                    expected.append((transfer.buffer, header, transfer.peer))
            self._open.setdefault((due, moment), []).append(_Posted((yield transfers), step, when, expected))

    def _message(self, row: NDArray[np.int64], when: int) -> tuple[Transfer, Header]:
        """One message, its buffer ready."""
        job, step, source = self._job, int(row[MessageColumn.STEP]), int(row[MessageColumn.SOURCE])
        payload, action = Payload(row[MessageColumn.PAYLOAD]), Action(row[MessageColumn.ACTION])
        peer = int(row[MessageColumn.PEER])
        buffer = self._buffer(payload, int(row[MessageColumn.SLOT]), int(row[MessageColumn.ROW1]))
        header = Header(job.plan_id, job.call, job.phase, payload, step, source, buffer.numel())
        if action == Action.SEND:
            packed = row[MessageColumn.SLOT] <= OWN
            if packed:
                self._pack(int(row[MessageColumn.SLOT]), source)
            # gradients, to which every rank adds, get a new checksum
            seal(buffer, header, sums=job.sums, relayed=payload == self._pass.side.block and not packed)
        else:
            clear(buffer)
        posted = What.SEND if action == Action.SEND else What.RECEIVE
        self.note(posted, step, when, payload, job.blocks.owner(source), peer, header.length)
        what = f"{payload.name} of {self._named(source)} at step {step} of call {job.call}"
        return Transfer(action, peer, buffer, what, header), header

    def wait(self, step: int, moment: Moment) -> Flow:
        """Wait for what is due, and check what came."""
        for posted in self._open.pop((step, moment), []):
            self.note(What.WAIT, posted.step, posted.when)
            yield posted.ticket
            self.note(What.LANDED, posted.step, posted.when)
            for message in posted.expected:
                self._check(*message)

    def finish(self, step: int) -> Flow:
        """With `sync_steps`, wait until all ranks have all that they posted up to this step."""
        if self._job.sync_steps:
            yield from self._wait_for_all()
            yield Together(f"the end of step {step} of {call_words(self._job.call, self._job.phase)}")

    def close(self) -> Flow:
        """Wait for everything and give the buffers back."""
        yield from self._wait_for_all()
        for buffer in self._slots.values():
            self._job.pool.give_back(buffer)
        self.note(What.END)

    def _wait_for_all(self) -> Flow:
        for due, moment in sorted(self._open):
            yield from self.wait(due, moment)

    def block(self, step: int, row: Any) -> tuple[Tensor, ...]:
        """The block of a step: keys and values, or queries and what comes with them; a step without tiles may have
        none, and then gets the rank's own."""
        if len(self._pass.tiles_of(step)) == 0:
            return self._own
        if row[StepColumn.SLOT] == OWN:
            rows = self._indices(self._job.blocks.rows_of_tiles(int(row[StepColumn.SOURCE])))
            mine = (x[:, :, rows] for x in self._own)
            return tuple(map(_copy, mine) if self._job.schedule.grid else mine)
        return self._views(self._pass.side.block, int(row[StepColumn.SLOT]), int(row[StepColumn.SOURCE]))

    def gradients(self, row: Any) -> tuple[Tensor, ...] | None:
        """Where the gradients of a step's block gather, zeroed where the schedule says that they start here; None for
        the rank's own."""
        if row[StepColumn.GRAD_SLOT] == OWN:
            return None
        found = self._views(self._pass.side.gradients, int(row[StepColumn.GRAD_SLOT]), int(row[StepColumn.SOURCE]))
        if row[StepColumn.GRAD_FRESH]:
            for one in found:
                one.zero_()
        return found

    def bring_home(self, row: Any, own: tuple[RowSum, ...]) -> None:
        """Add the gradients that others gathered for this rank's block, at the step that the schedule names."""
        if row[StepColumn.HOME_SLOT] == NONE:
            return
        block = int(row[StepColumn.HOME])
        rows = self._indices(self._job.blocks.travelling_rows(block))
        found = self._views(self._pass.side.gradients, int(row[StepColumn.HOME_SLOT]), block)
        for mine, theirs in zip(own, found, strict=True):
            mine.sum[:, :, rows] += theirs

    def _named(self, block: int) -> str:
        """A block in words: it is a rank's shard, or a part of it."""
        schedule = self._job.schedule
        part = f"unit {block} of " if schedule.grid else "part of " if block >= schedule.ring_size else ""
        return f"{part}ring rank {self._job.blocks.owner(block)}"

    def _indices(self, rows: Any) -> Any:
        """Rows as torch takes them."""
        return rows if isinstance(rows, slice) else torch.from_numpy(rows).to(self._device)

    def _check(self, buffer: Tensor, header: Header, peer: int) -> None:
        """Compare what came with what the schedule expects."""
        what = (
            f"ring rank {self._me}: the {Payload(header.payload).name} block of {self._named(header.source)} "
            f"that ring rank {peer} sent at step {header.step} of call {header.call}"
        )
        check(buffer, header, what, sums=self._job.sums)

    def _buffer(self, payload: Payload, slot: int, rows: int) -> Tensor:
        return self._slots[payload, pack_slot(slot)][: self._job.wire.message_bytes(payload, rows)]

    def _views(self, payload: Payload, slot: int, source: int) -> tuple[Tensor, ...]:
        rows, wire, narrow = int(self._job.blocks.travelling_tokens[source]), self._job.wire, self._own[0].dtype
        dtypes = tuple(accumulator_dtype(narrow) if part.wide else narrow for part in wire.parts(payload))
        return tuple(views(self._buffer(payload, slot, rows), wire.segments(payload, rows), dtypes))

    def _pack(self, slot: int, block: int) -> None:
        rows = self._indices(self._job.blocks.travelling_rows(block))
        for view, mine in zip(self._views(self._pass.side.block, slot, block), self._own, strict=True):
            view.copy_(mine[:, :, rows])


def _copy(x: Tensor) -> Tensor:
    """As it would lie in a message."""
    return x.clone(memory_format=torch.contiguous_format)
