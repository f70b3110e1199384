"""Execution: what an op's handle stands for. Agrees with the other ranks on a call, then runs the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ringspun.core import ways
from ringspun.core.checks import Checks
from ringspun.core.partition import Sides
from ringspun.core.passes import Blocks, Pass
from ringspun.core.schedule import Schedule
from ringspun.core.wire import Format, Side
from ringspun.errors import NotDifferentiable, RingspunError
from ringspun.steplog.meter import Meter
from ringspun.torch import ring, sharding, shares
from ringspun.torch.bias import FunctionRule, RankBias, Rule
from ringspun.torch.buffers import BufferPool, Leases, in_lines
from ringspun.torch.drivers import Driver
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.job import Job
from ringspun.torch.kernels import Call, Kernel, choose
from ringspun.torch.kernels.base import Rows, Saved, StepTiles, Terms, accumulator_dtype
from ringspun.torch.ops import Grads
from ringspun.torch.scraps import scraps
from ringspun.torch.uploads import uploaded

TOPIC = "an attention call"
BACKWARD_TOPIC = "a backward call"
BYTES_OF_A_TILE = 360
"""64 in the table, and the rest as a list of Python integers."""


@dataclass(frozen=True)
class Options:
    """What is fixed in an op's handle beside the plan: the kernel asked for, and the rule of a bias."""

    kernel: str | Kernel | None = None
    rule: Rule | None = None


class Walk(NamedTuple):
    """What a rank does in one direction: its pass, what goes round in it, and the tiles of each step."""

    one: Pass
    blocks: Blocks
    tiles: list[StepTiles]


@dataclass(eq=False)
class Calls:
    """What all calls of a plan share.

    Args:
        sync_steps: whether all ranks finish a step before the next.
        backward: what is asked to travel in backward (`ringspun.core.ways.WANTED`).
        meters: measure forward calls, one per rank, if they do.
        agreed: facts of the last call that all ranks agreed on, by topic.
    """

    driver: Driver
    pool: BufferPool
    sides: Sides
    schedules: tuple[Schedule, ...]
    plan_id: int
    checks: Checks
    sync_steps: bool = False
    backward: str = "keys"
    meters: Sequence[Meter | None] = ()
    agreed: dict[str, str] = field(default_factory=dict)
    _sides: dict[Format, Side] = field(default_factory=dict)
    _digests: dict[Side, bytes] = field(default_factory=dict)
    _walks: dict[Side | bool, list[Walk]] = field(default_factory=dict)

    @property
    def grid(self) -> int:
        """See `Schedule`."""
        return self.schedules[0].grid

    @property
    def n_bytes(self) -> int:
        """About what the schedules take, with their tiles as Python integers."""
        passes = [p for s in self.schedules for p in (s.forward, s.backward)]
        passes += [walk.one for walk in self._walks.get(Side.QUERIES, ())]
        return sum(p.messages.nbytes + p.steps.nbytes + BYTES_OF_A_TILE * len(p.tiles) for p in passes)

    def fail(self, failure: Exception) -> None:
        """Tell the other ranks: by the first call's agreement where they wait in it, else by a note."""
        if not self.agreed:
            self.driver.agree(TOPIC, bytes(32), {}, failure)
        self.driver.report(failure)

    def side(self, wire: Format) -> Side:
        """What travels in backward calls of a format."""
        if wire not in self._sides:
            self._sides[wire] = ways.take(self.schedules[0], wire, self.backward)
        return self._sides[wire]

    def _sizes(self, side: Side) -> bytes:
        """Stands for the rows of all blocks, of which there may be as many as pairs of ranks."""
        if side not in self._digests:
            self._digests[side] = digest_of(self._walks_of(side)[0].blocks.travelling_tokens.tobytes())
        return self._digests[side]

    def agree(self, topic: str, wire: Format, fields: dict[str, str], side: Side = Side.KEYS) -> None:
        """Agree with all ranks on the facts of a call: at a plan's first call, and whenever facts or sizes change.

        To remember all facts ever agreed on is not enough: ranks that then call with two different known ones, of one
        plan or of two, send each other messages of two lengths, and gloo aborts a process for that.
        """
        text, sizes = repr(sorted(fields.items())), repr((wire, side, self._sizes(side)))
        if self.agreed.get(topic) == text and self.driver.state.agreed_sizes == sizes:
            return
        self.driver.agree(
            topic, digest_of((topic, text, sizes)), {**fields, "seq_len": str(self.sides.queries.seq_len)}
        )
        self.agreed[topic] = text
        self.driver.state.agreed_sizes = sizes

    @cached_property
    def _tiles(self) -> list[list[list[StepTiles]]]:
        """Per rank, the tiles of forward's steps and of backward's."""
        return [_step_tiles(s.forward, s.backward) for s in self.schedules]

    def _walks_of(self, which: Side | bool) -> list[Walk]:
        """What each rank does in backward while one side travels; or in forward, keeping blocks for it or not."""
        if which not in self._walks:
            here = zip(self.schedules, self._tiles, strict=True)
            if isinstance(which, bool):
                self._walks[which] = [Walk(s.forward if which else s.passing, s, tiles) for s, (tiles, _) in here]
            elif which == Side.KEYS:
                self._walks[which] = [Walk(s.backward, s, tiles) for s, (_, tiles) in here]
            else:
                turned = ways.turned(self.schedules)
                self._walks[which] = [Walk(one.backward, one, *_step_tiles(one.backward)) for one in turned]
        return self._walks[which]

    def jobs(
        self,
        q: Tensor,
        wire: Format,
        kernel: Kernel,
        terms: Terms,
        rule: Rule | None,
        kept: Tensor,
        of: int | None = None,
    ) -> list[Job]:
        """One job per rank: of a forward call, or of the backward call `of` a forward call's number.

        Args:
            kept: the memory of the blocks that forward leaves to backward, all ranks'; empty: it leaves none.
        """
        state = self.driver.state
        number, state.calls = state.calls, state.calls + 1
        phase, sums = 0 if of is None else 1 + of, self.checks.sums(number)
        walks = self._walks_of(bool(kept.numel()) if of is None else self.side(wire))
        parts = torch.split(kept, [s.kept_bytes(wire) for s in self.schedules]) if kept.numel() else [kept] * len(walks)
        jobs, deferred = [], self.driver.defers(q.device)
        meters = (None,) * len(self.schedules) if phase or not self.meters else self.meters
        for schedule, walk, log, meter, mine in zip(self.schedules, walks, state.logs, meters, parts, strict=True):
            bias = None if rule is None else self._bias(q, rule, terms.bias, walk)
            what = schedule, walk.one, walk.blocks, walk.tiles, kernel, wire, self.pool, terms, bias
            jobs.append(Job(*what, self.plan_id, number, phase, log, self.sync_steps, sums, meter, deferred, mine))
        return jobs

    def _bias(self, q: Tensor, rule: Rule, values: Tensor | None, walk: Walk) -> RankBias:
        values, blocks = q.new_zeros(0) if values is None else values, walk.blocks
        going, staying = self.sides.keys, self.sides.queries
        if walk.one.side == Side.QUERIES:
            going, staying = staying, going
        own = uploaded(staying.positions(blocks.ring_rank), q.device)

        @lru_cache(maxsize=1)
        def positions(block: int) -> tuple[Tensor, Tensor]:
            theirs = uploaded(blocks.positions(block, going), q.device)
            return (own, theirs) if walk.one.side == Side.KEYS else (theirs, own)

        return RankBias(rule, values.to(accumulator_dtype(q.dtype)), positions)


@dataclass(frozen=True, eq=False)
class Execution:
    """A plan with a call's options fixed: what an op's handle stands for."""

    calls: Calls
    options: Options

    @property
    def holds_function(self) -> bool:
        """Whether a bias function, and whatever that holds, lives as long as this does."""
        return isinstance(self.options.rule, FunctionRule)

    @property
    def n_bytes(self) -> int:
        """About what the plan takes."""
        return self.calls.n_bytes

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, kept: Tensor
    ) -> tuple[Tensor, Tensor, tuple[int, int]]:
        calls, rule, wire = self.calls, self.options.rule, wire_of(q, k, v)
        kernel = choose(call_of(q, k, v, terms.scale, terms.softcap, rule, calls.grid), self.options.kernel)
        mark = self._mark(q.device)
        calls.agree(TOPIC, wire, _facts(wire, kernel, terms, rule) | {"bias at some positions": hex(mark)})
        jobs = calls.jobs(q, wire, kernel, terms, rule, kept)
        if q.shape[0] == 0:
            out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            return out, q.new_zeros(q.shape[:-1], dtype=accumulator_dtype(q.dtype)), (jobs[0].call, mark)
        programs = [ring.forward(job, *rows) for job, rows in zip(jobs, self._rows(q, k, v), strict=True)]
        with torch.autocast(q.device.type, enabled=False):
            results = calls.driver.run(programs)
        out, lse = (_joined(parts) for parts in zip(*results, strict=True))
        if rule is not None:
            try:
                rule.check_lse(lse)
            except RingspunError as failure:
                calls.fail(failure)
                raise
        return out, lse, (jobs[0].call, mark)

    def run_backward(
        self,
        grads: Grads,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        out: Tensor,
        lse: Tensor,
        call: tuple[int, int],
        kept: Tensor,
    ) -> tuple[Tensor, ...]:
        calls, rule, wire = self.calls, self.options.rule, wire_of(q, k, v)
        kernel = choose(call_of(q, k, v, terms.scale, terms.softcap, rule, calls.grid), self.options.kernel)
        facts = _facts(wire, kernel, terms, rule) | {"gradients of q, k, v, sinks, bias": str(grads.needs)}
        side = calls.side(wire)
        calls.agree(BACKWARD_TOPIC, wire, facts | {"what travels": side.value}, side)
        if self._mark(q.device) != call[1]:
            failure = NotDifferentiable(
                "bias function must give in backward what it gave in forward; it changed in between. Bind what it uses "
                "when it is made: `lambda q, k, slope=slope: ...`, and change no tensor that it captured."
            )
            calls.fail(failure)
            raise failure
        jobs = calls.jobs(q, wire, kernel, terms, rule, kept, of=call[0])
        if q.shape[0] == 0:
            shared = (q.new_zeros(0) if x is None else torch.zeros_like(x) for x in (terms.sinks, terms.bias))
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *shared
        leases = Leases(calls.pool, q.device)
        delta = leases.tensor(lse.shape, lse.dtype)
        saved = _saved(grads._replace(dout=grads.dout.contiguous()) if calls.grid else grads, out, lse, delta)
        here = calls.driver.ring_ranks
        q_rows = sharding.slices(calls.sides.queries, here)
        programs = [
            ring.backward(job, *rows, self._alike(saved.rows(Rows(slice(None), r))))
            for job, rows, r in zip(jobs, self._rows(q, k, v), q_rows, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, dbias = zip(*calls.driver.run(programs), strict=True)
        of_shared = shares.of_sinks_and_bias(saved, terms, dbias, calls.sides.queries, calls.driver, calls.grid)
        leases.close()
        return _joined(dq), _joined(dk), _joined(dv), *of_shared

    def _mark(self, device: torch.device) -> int:
        """See `FunctionRule.mark`: of a few positions of the queries and of the keys; 0 without a function."""
        rule, sides = self.options.rule, (self.calls.sides.queries, self.calls.sides.keys)
        if not isinstance(rule, FunctionRule) or not all(side.seq_len for side in sides):
            return 0
        q, k = (side.start + np.unique(np.linspace(0, side.seq_len - 1, 7).astype(np.int64)) for side in sides)
        some = torch.from_numpy(q).to(device)[:, None], torch.from_numpy(k).to(device)[None, :]
        try:
            return rule.mark(*some)
        except Exception as failure:  # a function may raise anything
            self.calls.fail(failure)
            raise

    def _alike(self, saved: Saved) -> Saved:
        """On a grid, with rows where they lie on every ring."""
        if not self.calls.grid:
            return saved
        out, lse, dout, dlse, delta = saved
        out, dlse = (None if x is None else in_lines(x) for x in (out, dlse))
        return Saved(out, in_lines(lse), in_lines(dout), dlse, in_lines(delta))

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The rows of each rank that this process plays."""
        sides, here = self.calls.sides, self.calls.driver.ring_ranks
        both = zip(sharding.slices(sides.queries, here), sharding.slices(sides.keys, here), strict=True)
        parts = [(q[:, :, a], k[:, :, b], v[:, :, b]) for a, b in both]
        return [(in_lines(q), k, v) for q, k, v in parts] if self.calls.grid else parts


def _saved(grads: Grads, out: Tensor, lse: Tensor, delta: Tensor) -> Saved:
    for x, dx, both in scraps(out, grads.dout, delta[..., None]):
        torch.sum(x.to(delta.dtype) * dx.to(delta.dtype), -1, keepdim=True, out=both)
    if grads.dlse is not None:
        delta -= grads.dlse
    return Saved(out, lse, grads.dout, grads.dlse, delta)


def _step_tiles(*passes: Pass) -> list[list[StepTiles]]:
    """Of each step of some passes; equal ones are one, lowered once: of both directions, of strides."""
    kept: dict[bytes, StepTiles] = {}

    def of_pass(one: Pass) -> list[StepTiles]:
        each = (one.tiles_of(step) for step in range(len(one)))
        return [kept.setdefault(tiles.tobytes(), StepTiles(tiles)) for tiles in each]

    return [of_pass(one) for one in passes]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Ranks' rows joined; a fresh contiguous tensor in any case, because an op's results must not alias its inputs."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 2)


def call_of(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, rule: Rule | None, grid: int) -> Call:
    """What kernels judge a call by."""
    kind = "" if rule is None else rule.name
    of = q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device.type
    return Call(*of, scale, softcap, kind, across_rings=grid > 0)


def wire_of(q: Tensor, k: Tensor, v: Tensor) -> Format:
    """What the messages of a call look like."""
    size = accumulator_dtype(q.dtype).itemsize
    dtype = str(q.dtype).removeprefix("torch.")
    return Format(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], dtype, q.dtype.itemsize, size)


def _facts(wire: Format, kernel: Kernel, terms: Terms, rule: Rule | None) -> dict[str, str]:
    asked = {"scale": repr(terms.scale), "kernel": kernel.name, "softcap": repr(terms.softcap), "bias": str(rule)}
    shared = {name: described(x) for name, x in (("sinks", terms.sinks), ("bias tensor", terms.bias))}
    return {**{k: str(v) for k, v in asdict(wire).items()}, **asked, **shared}


def described(x: Tensor | None) -> str:
    """A replicated input, as ranks compare it."""
    return "None" if x is None else f"{x.dtype} {list(x.shape)}"
