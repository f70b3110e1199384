"""The mail: one rank's messages during one pass, posted, waited for and checked, and the buffers that they lie in."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ringspun.core.route.base import KEPT, NONE, OWN, Action, MessageColumn, Moment, StepColumn, carried, pack_slot
from ringspun.core.wire import Format, Header, Payload, Side
from ringspun.steplog import What
from ringspun.steplog.log import call_words
from ringspun.torch.drivers.base import Together, Transfer
from ringspun.torch.job import Job, Part
from ringspun.torch.kernels.base import Rows, accumulator_dtype
from ringspun.torch.messages import Marks, check, clear, seal, views
from ringspun.torch.sums import RowSum
from ringspun.torch.uploads import uploaded

Flow = Generator[Any, Any, None]


class _Posted(NamedTuple):
    """Messages under way: those that come, with the header that each must have and who sends it; and what the step log
    calls the time that they are waited for at."""

    ticket: Any
    step: int
    when: int
    expected: list[tuple[Tensor, Header, int]]


class _Held(NamedTuple):
    """What lies in a slot: some KV heads of a block, or of its gradients."""

    payload: Payload
    slot: int
    block: int
    heads: slice


class Mail:
    """One rank's buffers and messages during one pass. `own`: the rank's tensors of the side that travels."""

    def __init__(self, job: Job, own: tuple[Tensor, ...]) -> None:
        self._job, self._pass, self._own, self._blocks = job, job.one, own, job.blocks
        self._me = job.schedule.ring_rank
        self._device = own[0].device
        self._slots: dict[tuple[Payload, int], Tensor] = {}
        self._slot_bytes = job.blocks.slot_bytes(job.one, job.wire)
        self._kept = _by_slot(job)
        self._open: dict[tuple[int, Moment], list[_Posted]] = {}
        self._marks = Marks(job.sums) if job.deferred else None
        note: Callable[..., None] = partial(job.log.note, job.call, job.phase)
        self.note = note if job.meter is None else job.meter.hearing(note)
        self.note(What.CALL)

    def arrive(self, step: int, row: Any, part: Part) -> Flow:
        """Wait for what a step computes with, and start the messages of those after it."""
        yield from self.wait(step, Moment.BEFORE)
        self._put_together(step, row, part)
        self.release(step, 0)
        yield from self.post(step, Moment.BEFORE)

    def collect(self, step: int, row: Any, own: Sequence[RowSum]) -> Generator[Any, Any, tuple[Tensor, ...] | None]:
        """Wait for the gradients that are due. Where a step's gather (None: in `own`)."""
        yield from self.wait(step, Moment.AFTER)
        away = self.gradients(row)
        if away is None:
            self.bring_home(step, row, own)
        self.release(step, 1)
        return away

    def release(self, step: int, third: int) -> None:
        """Give back the buffers that nothing uses after this part of a step (`Pass.last_uses`)."""
        for key in [k for k in self._slots if self._pass.last_uses[k] <= 3 * step + third]:
            self._job.pool.give_back(self._slots.pop(key))

    def post(self, step: int, moment: Moment) -> Flow:
        """Start the messages of one step and moment, those together that are waited for together."""
        rows = carried(self._pass.messages_of(step, moment), self._job.wire.kv_heads)
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
        buffer = self._buffer(self._of_message(row))
        header = Header(job.plan_id, job.call, job.phase, payload, step, source, buffer.numel())
        if action == Action.SEND:
            packed = row[MessageColumn.SLOT] <= OWN
            if packed:
                self._pack(row)
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
            if self._marks and posted.expected:
                yield self._marks

    def finish(self, step: int) -> Flow:
        """With `sync_steps`, wait until all ranks have all that they posted up to this step."""
        if self._job.sync_steps:
            yield from self._wait_for_all()
            yield Together(f"the end of step {step} of {call_words(self._job.call, self._job.phase)}")

    def close(self) -> Flow:
        """Wait for everything and give the buffers back."""
        yield from self._wait_for_all()
        while self._slots:
            self._job.pool.give_back(self._slots.popitem()[1])
        self.note(What.END)

    def _wait_for_all(self) -> Flow:
        for due, moment in sorted(self._open):
            yield from self.wait(due, moment)

    def block(self, row: Any, part: Part) -> tuple[Tensor, ...]:
        """The block of a step: keys and values, or queries and what comes with them; a step without tiles may have
        none, and then gets the rank's own."""
        if len(part.tiles.tiles) == 0:
            return self._own
        if row[StepColumn.SLOT] == OWN:
            rows = self._indices(self._blocks.rows_of_tiles(int(row[StepColumn.SOURCE])))
            mine = (x[:, :, rows] for x in self._own_of(part.kv_heads))
            return tuple(map(_copy, mine) if self._job.schedule.grid else mine)
        return self._views(self._of_step(row, self._pass.side.block, StepColumn.SLOT))

    def gradients(self, row: Any) -> tuple[Tensor, ...] | None:
        """Where the gradients of a step's block gather, zeroed where the schedule says that they start here; None for
        the rank's own."""
        if row[StepColumn.GRAD_SLOT] == OWN:
            return None
        found = self._views(self._of_step(row, self._pass.side.gradients, StepColumn.GRAD_SLOT))
        if row[StepColumn.GRAD_FRESH]:
            for one in found:
                one.zero_()
        return found

    def bring_home(self, step: int, row: Any, own: Sequence[RowSum]) -> None:
        """Add what was gathered for this rank's block, at the step that the schedule names."""
        gradients = self._pass.side.gradients
        if row[StepColumn.HOME_SLOT] != NONE:
            self._add_home(own, self._of_step(row, gradients, StepColumn.HOME_SLOT, StepColumn.HOME))
        for m in self._unpacked(step, gradients):
            self._add_home(own, self._of_message(m))

    def _add_home(self, own: Sequence[RowSum], held: _Held) -> None:
        for mine, theirs in zip(own, self._views(held), strict=True):
            home = mine.of_heads(self._heads(held.heads))
            for rows, place in self._own_rows(held.block):
                if isinstance(rows, slice):
                    home.add(Rows(slice(0, None), rows), theirs[:, :, place])
                else:
                    home.add_rows(rows, theirs[:, :, place])

    def _own_rows(self, block: int) -> list[tuple[Any, slice]]:
        """Which of the rank's own rows a block holds, and where."""
        if block != self._blocks.whole:
            return [(self._indices(self._blocks.travelling_rows(block)), slice(None))]
        return [(rows, place) for part, rows, place in self._gathered if part == self._me]

    @property
    def _gathered(self) -> list[tuple[int, slice, slice]]:
        """Of what is put together: rows of which block, and where they lie in it."""
        table = self._blocks.gathered.tolist()
        return [(block, slice(a, b), slice(place, place + b - a)) for block, a, b, place in table]

    def _put_together(self, step: int, row: Any, part: Part) -> None:
        """The block of a step, where it is of several ranks' rows."""
        block = self._pass.side.block
        if row[StepColumn.SOURCE] != self._blocks.whole or not len(part.tiles.tiles):
            return
        came = {self._me: self._own_of(part.kv_heads)}
        for held in map(self._of_message, self._unpacked(step, block)):
            came[held.block] = self._views(held)
        room = self._views(self._of_step(row, block, StepColumn.SLOT))
        for part_of, rows, place in self._gathered:
            for into, x in zip(room, came[part_of], strict=True):
                into[:, :, place] = x[:, :, rows]

    def _unpacked(self, step: int, payload: Payload) -> NDArray[np.int64]:
        """Messages that are waited for at a step and belong elsewhere than in their slot."""
        m = carried(self._pass.messages, self._job.wire.kv_heads)
        due = (m[:, MessageColumn.DUE] == step) & (m[:, MessageColumn.PAYLOAD] == payload)
        comes = (m[:, MessageColumn.ACTION] == Action.RECEIVE) & (m[:, MessageColumn.SLOT] <= OWN)
        found: NDArray[np.int64] = m[due & comes]
        return found

    def _named(self, block: int) -> str:
        """A block in words: it is a rank's shard, or a part of it."""
        schedule = self._job.schedule
        part = f"unit {block} of " if schedule.grid else "part of " if block >= schedule.ring_size else ""
        return f"{part}ring rank {self._blocks.owner(block)}"

    def _indices(self, rows: Any) -> Any:
        """Rows as torch takes them."""
        return rows if isinstance(rows, slice) else uploaded(rows, self._device)

    def _check(self, buffer: Tensor, header: Header, peer: int) -> None:
        """Compare what came with what the schedule expects."""
        what = (
            f"ring rank {self._me}: the {Payload(header.payload).name} block of {self._named(header.source)} "
            f"that ring rank {peer} sent at step {header.step} of call {header.call}"
        )
        check(buffer, header, what, sums=self._job.sums, marks=self._marks)

    def _of_message(self, row: NDArray[np.int64]) -> _Held:
        payload, slot, block = row[[MessageColumn.PAYLOAD, MessageColumn.SLOT, MessageColumn.SOURCE]].tolist()
        return _Held(Payload(payload), pack_slot(slot), block, self._job.kv_heads(row, MessageColumn))

    def _of_step(self, row: Any, payload: Payload, slot: StepColumn, block: StepColumn = StepColumn.SOURCE) -> _Held:
        return _Held(payload, int(row[slot]), int(row[block]), self._job.kv_heads(row, StepColumn))

    def _wire(self, held: _Held) -> Format:
        return self._job.wire.of_heads(held.heads.stop - held.heads.start)

    def _buffer(self, held: _Held) -> Tensor:
        key = held.payload, held.slot
        if held.slot >= KEPT:
            return self._kept[held.slot]
        if key not in self._slots:
            self._slots[key] = self._job.pool.lease(self._slot_bytes[key], self._device)
        return self._slots[key][: self._wire(held).message_bytes(held.payload, self._blocks.rows(held.block))]

    def _views(self, held: _Held) -> tuple[Tensor, ...]:
        wire, narrow = self._wire(held), self._own[0].dtype
        dtypes = tuple(accumulator_dtype(narrow) if part.wide else narrow for part in wire.parts(held.payload))
        return tuple(views(self._buffer(held), wire.segments(held.payload, self._blocks.rows(held.block)), dtypes))

    def _heads(self, kv_heads: slice) -> slice:
        """Of the side that travels, the heads that go with some KV heads."""
        return kv_heads if self._pass.side == Side.KEYS else self._job.query_heads(kv_heads)

    def _own_of(self, kv_heads: slice) -> tuple[Tensor, ...]:
        return tuple(x[:, self._heads(kv_heads)] for x in self._own)

    def _pack(self, row: NDArray[np.int64]) -> None:
        """What a message carries: the rank's own rows, another's that were kept, or of the step's gradients those of
        one owner's rows."""
        held = self._of_message(row)
        if held.payload == self._pass.side.block and self._blocks.owner(held.block) != self._me:
            step = self._pass.steps[row[MessageColumn.STEP]]
            parts, sources = (
                [(slice(None), slice(None))],
                self._views(self._of_step(step, held.payload, StepColumn.SLOT)),
            )
        elif held.payload == self._pass.side.block:
            rows = self._indices(self._blocks.travelling_rows(held.block))
            parts, sources = [(slice(None), rows)], self._own_of(held.heads)
        else:
            step = self._pass.steps[row[MessageColumn.STEP]]
            parts = [(rows, place) for block, rows, place in self._gathered if block == held.block]
            sources = self._views(self._of_step(step, held.payload, StepColumn.GRAD_SLOT))
        for view, source in zip(self._views(held), sources, strict=True):
            for into, rows in parts:
                view[:, :, into] = source[:, :, rows]


def _by_slot(job: Job) -> dict[int, Tensor]:
    """The memory of each block that forward leaves to backward."""
    if not job.kept.numel():
        return {}
    sizes = [job.wire.message_bytes(Payload.KV, rows) for rows in job.schedule.kept_rows]
    return dict(zip(job.schedule.kept, torch.split(job.kept, sizes), strict=True))


def _copy(x: Tensor) -> Tensor:
    """As it would lie in a message."""
    return x.clone(memory_format=torch.contiguous_format)
