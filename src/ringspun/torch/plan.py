"""`Plan`: one mask over one partition, ready to be called. Checks the tensors, agrees on the wire, runs the ring."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ringspun.core.mask import Mask, RowMasks
from ringspun.core.partition import Sides
from ringspun.core.schedule import Schedule, compile_schedules
from ringspun.core.wire import Format
from ringspun.errors import PlanError, RingspunError
from ringspun.torch import inputs, ring, sharding
from ringspun.torch.bias import Bias, RankBias, Rule
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.explain import Explanation, explain
from ringspun.torch.kernels import Call, Kernel, choose
from ringspun.torch.kernels.base import Rows, Saved, StepTiles, Terms, accumulator_dtype
from ringspun.torch.ops import REGISTRY, Grads, attention_op
from ringspun.torch.partition import Partition

if TYPE_CHECKING:
    from ringspun.torch.context import ContextParallel


class Asked(NamedTuple):
    """What a caller asks of attention beside q, k and v, unchecked; see `Plan.attention`."""

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None
    kernel: str | Kernel | None = None


class Plan:
    """What a ring computes for one mask: made by `Partition.plan` or `ContextParallel.plan`, never directly.

    Keep it as long as the mask and length stay the same; every layer of a model may call the same plan. All ranks call
    `attention` equally often, and all call backward equally often (with ``0 * out.sum()`` where a rank has no loss).
    """

    def __init__(
        self,
        context: ContextParallel,
        sides: Sides,
        mask: Mask | RowMasks,
        schedules: tuple[Schedule, ...],
    ) -> None:
        self._context, self._sides, self._mask, self.schedules = context, sides, mask, schedules
        here = context.driver.ring_ranks
        self._rows = sides.queries.rows_of(here), sides.keys.rows_of(here)  # ints: traced calls guard on them
        self._agreed: dict[str, str] = {}
        self._handles: OrderedDict[Options, tuple[int, _Executable]] = OrderedDict()
        number = context.number.to_bytes(8, "little")
        self._id = int.from_bytes(hashlib.blake2b(schedules[0].inputs + number, digest_size=7).digest(), "little")
        for options in (Options(), *context.options):  # here, for a traced call cannot change the registry
            self._handle(options)

    @property
    def mask(self) -> Mask | tuple[Mask, ...]:
        """What may be seen; one mask per batch row where the plan was made with several."""
        return self._mask.masks if isinstance(self._mask, RowMasks) else self._mask

    @property
    def queries(self) -> Partition:
        """Who holds which query."""
        return Partition(self._context, self._sides.queries)

    @property
    def keys(self) -> Partition:
        """Who holds which key and value; the same as `queries` but for cross-attention."""
        return Partition(self._context, self._sides.keys)

    @property
    def partition(self) -> Partition:
        """Who holds which token: `queries`."""
        return self.queries

    @property
    def schedule(self) -> Schedule:
        """This rank's schedule (a loopback's first; see `schedules`)."""
        return self.schedules[0]

    def with_mask(self, mask: Mask | Sequence[Mask]) -> Plan:
        """Another mask over the same partition (a model with several attention patterns). Collective, like `plan`."""
        return self._context._plan(self._sides, mask)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, bias: Bias | None = None, return_lse: Literal[False] = False,
        kernel: str | Kernel | None = None,
    ) -> Tensor: ...  # fmt: skip

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, softcap: float | None = None,
        sinks: Tensor | None = None, bias: Bias | None = None, return_lse: Literal[True],
        kernel: str | Kernel | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def attention(
        self,
        q: Float[Tensor, "B H Tq D"],
        k: Float[Tensor, "B K Tk D"],
        v: Float[Tensor, "B K Tk Dv"],
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Float[Tensor, " H"] | None = None,
        bias: Bias | None = None,
        return_lse: bool = False,
        kernel: str | Kernel | None = None,
        **refused: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the whole sequence's keys, exact. Differentiable.

            score = bound(scale * q . k) + bias,  bound(x) = softcap * tanh(x / softcap);  what the mask hides: -inf
            out   = sum(exp(score) v) / (exp(sink) + sum(exp(score))),  lse = log of that denominator

        Args:
            q, k, v: this rank's rows, any strides, one dtype and device; H a multiple of K. Only K heads travel.
            scale: of the scores; default ``D ** -0.5``.
            softcap: bound of the scores (Gemma 2); default none.
            sinks: one logit per query head, in the denominator once per row (gpt-oss). Differentiable.
            bias: added to the scores: `Alibi`, `RelativeTable` (both differentiable), or a function of query positions
                ``[t, 1]`` and key positions ``[1, s]`` that returns ``[t, s]`` or ``[H, t, s]`` and has no gradient;
                -inf there hides a pair, a row hidden wholly is one without keys.
            return_lse: also return the natural-log normaliser ``[B, H, T]`` in fp32 (fp64 for fp64), differentiable;
                -inf for a row that sees no key, whose output is 0. With sinks it includes the sink.
            kernel: a kernel, its name, or None for the first that does not refuse.
            refused: nothing else is taken; what other attentions call an argument is refused with what to do instead.
        Returns:
            ``out [B, H, T, Dv]`` in q's dtype, or ``(out, lse)``. Gradients of sinks and bias are this rank's shares,
            as of every replicated parameter.
        Raises:
            ShapeError, DtypeError: tensors that do not fit the plan or each other.
            PlanError: numbers that cannot be used, or a bias function that moves a whole row out of its dtype's reach.
            KernelRefused: no kernel can do it. PlanMismatchError: ranks call with different shapes, dtype or arguments.
            TransferError: a foreign or stale message arrived. PeerError: another rank is dead, late or failed.

        Source: softcap before bias and mask as in FlashAttention; sinks: arXiv 2508.10925.
        """
        return self._attend(q, k, v, Asked(scale, softcap, sinks, bias, kernel), return_lse, refused)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, return_lse: bool, refused: dict[str, object] | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        try:
            inputs.refuse(refused or {})
            q, k, v = inputs.autocast(q, k, v)
            rule, values, call = self._checked(q, k, v, asked)
            choose(call, asked.kernel)
        except Exception as failure:  # a bias function may raise anything
            self._fail(failure)
            raise
        handle = self._handle(Options(asked.kernel, rule))
        out, lse, _ = attention_op(q, k, v, asked.sinks, values, handle, call.scale, call.softcap)
        return (out, lse) if return_lse else out

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> tuple[Rule | None, Tensor | None, Call]:
        """The rule and tensor of a bias, and the facts of a call; raises what is wrong with its arguments."""
        batch = len(self._mask) if isinstance(self._mask, RowMasks) else None
        inputs.check_tensors(self._context.driver, self._rows, batch, q, k, v)
        scale, softcap = inputs.checked_scale(asked.scale, q.shape[-1]), inputs.checked_softcap(asked.softcap)
        rule, values = inputs.check_terms(self._context.driver, q, asked.sinks, asked.bias)
        return rule, values, _call(q, k, v, scale, softcap, rule)

    def explain(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        bias: Bias | None = None,
        kernel: str | Kernel | None = None,
        ring_rank: int | None = None,
    ) -> Explanation:
        """What `attention` would do with the same arguments: kernel and why, tiles, hops, bytes, balance per step.

        Local: nothing is computed or sent. ``print(plan.explain(q, k, v))``.

        Args:
            ring_rank: whose part; default this process's (a loopback's first). Others as in `attention`.
        """
        asked = Asked(scale, softcap, sinks, bias, kernel)
        q, k, v = inputs.autocast(q, k, v)
        _, _, call = self._checked(q, k, v, asked)
        chosen = self.schedule.ring_rank if ring_rank is None else ring_rank
        if not 0 <= chosen < self._context.ring_size:
            raise PlanError(f"ring_rank must be from 0 to {self._context.ring_size - 1}; got {ring_rank}.")
        words = f"{str(self._mask)[:60]} over {self._sides.queries.seq_len:,} tokens, {self._sides.queries.layout}"
        return explain(words, self._everybody[chosen], self._everybody, _wire(q, k, v), call, kernel)

    @cached_property
    def _everybody(self) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        ranks = range(self._context.ring_size)
        return compile_schedules(self._sides, self._mask, self._context.geometry.route, ranks)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _fail(self, failure: Exception) -> None:
        """Tell the other ranks: by the first call's agreement where they wait in it, else by a note."""
        if not self._agreed:
            self._context.driver.agree(_TOPIC, bytes(32), {}, failure)
        self._context.driver.report(failure)

    def _agree(self, topic: str, wire: Format, fields: dict[str, str]) -> None:
        """Agree with all ranks on the facts of a call: at a plan's first call, and whenever facts or sizes change.

        To remember all facts ever agreed on is not enough: ranks that then call with two different known ones, of one
        plan or of two, send each other messages of two lengths, and gloo aborts a process for that.
        """
        text, sizes = repr(sorted(fields.items())), repr((wire, self._sides.keys.tokens.tobytes()))
        if self._agreed.get(topic) == text and self._context.driver.state.agreed_sizes == sizes:
            return
        self._context.driver.agree(
            topic, digest_of((topic, text, sizes)), {**fields, "seq_len": str(self._sides.queries.seq_len)}
        )
        self._agreed[topic] = text
        self._context.driver.state.agreed_sizes = sizes

    # -- execution ---------------------------------------------------------------------------------------------------

    def _handle(self, options: Options) -> int:
        if options not in self._handles:
            if torch.compiler.is_compiling():
                raise RingspunError(
                    "attention must be called once uncompiled with this kernel or bias before a whole compiled graph "
                    "(fullgraph=True) can hold it; got its first call. Later plans of the context need none."
                )
            executable = _Executable(self, options)
            self._handles[options] = REGISTRY.add(id(self._context), executable), executable
            if len(self._handles) > KEPT_OPTIONS:  # a new bias function in every call, say
                del self._handles[next(o for o in self._handles if o != Options())]  # compiled calls count on that one
            self._context.remember(options)
        return self._handles[options][0]

    @cached_property
    def _tiles(self) -> list[tuple[list[StepTiles], list[StepTiles]]]:
        """Per rank, the tiles of forward's steps and of backward's; one list where they are the same, lowered once."""
        return [_step_tiles(s) for s in self.schedules]

    def _jobs(
        self, q: Tensor, wire: Format, kernel: Kernel, terms: Terms, rule: Rule | None, of: int | None = None
    ) -> list[ring.Job]:
        """One job per rank: of a forward call, or of the backward call `of` a forward call's number."""
        state, pool = self._context.driver.state, self._context.pool
        number, state.calls = state.calls, state.calls + 1
        phase = 0 if of is None else 1 + of
        jobs = []
        for schedule, tiles in zip(self.schedules, self._tiles, strict=True):
            bias = None if rule is None else self._bias(q, rule, terms.bias, schedule.ring_rank)
            ids = self._id, number, phase
            jobs.append(ring.Job(schedule, tiles[min(phase, 1)], kernel, wire, pool, terms, bias, *ids))
        return jobs

    def _bias(self, q: Tensor, rule: Rule, values: Tensor | None, ring_rank: int) -> RankBias:
        values = q.new_zeros(0) if values is None else values

        @lru_cache(maxsize=1)
        def keys(rank: int) -> Tensor:
            rows = slice(None) if rank == ring_rank else self.schedule.travelling_rows(rank)
            return torch.from_numpy(self._sides.keys.positions(rank)[rows]).to(q.device)

        own = torch.from_numpy(self._sides.queries.positions(ring_rank)).to(q.device)
        return RankBias(rule, values.to(accumulator_dtype(q.dtype)), own, keys)

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # a frozen value; models that hold one are copied

    def __reduce__(self) -> str:
        raise TypeError(
            "plan must not be pickled: it belongs to this process's ring. "
            "Send context.geometry, or its schedules, and plan again where they arrive."
        )

    def __repr__(self) -> str:
        return f"Plan(mask={str(self.mask)[:60]}, {self.partition!r})"


_TOPIC = "an attention call"
_BACKWARD_TOPIC = "a backward call"


@dataclass(frozen=True)
class Options:
    """What is fixed in an op's handle beside the plan: the kernel asked for, and the rule of a bias."""

    kernel: str | Kernel | None = None
    rule: Rule | None = None


KEPT_OPTIONS = 64


@dataclass(frozen=True, eq=False)
class _Executable:
    """A plan with a call's options fixed: what an op's handle stands for."""

    plan: Plan
    options: Options

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, int]:
        plan, rule, wire = self.plan, self.options.rule, _wire(q, k, v)
        kernel = choose(_call(q, k, v, terms.scale, terms.softcap, rule), self.options.kernel)
        plan._agree(_TOPIC, wire, _facts(wire, kernel, terms, rule))
        jobs = plan._jobs(q, wire, kernel, terms, rule)
        if q.shape[0] == 0:
            out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
            return out, q.new_zeros(q.shape[:-1], dtype=accumulator_dtype(q.dtype)), jobs[0].call
        programs = [ring.forward(job, *rows) for job, rows in zip(jobs, self._rows(q, k, v), strict=True)]
        with torch.autocast(q.device.type, enabled=False):
            results = plan._context.driver.run(programs)
        out, lse = (_joined(parts) for parts in zip(*results, strict=True))
        if rule is not None:
            try:
                rule.check_lse(lse)
            except RingspunError as failure:
                plan._fail(failure)
                raise
        return out, lse, jobs[0].call

    def run_backward(
        self, grads: Grads, q: Tensor, k: Tensor, v: Tensor, terms: Terms, out: Tensor, lse: Tensor, call: int
    ) -> tuple[Tensor, ...]:
        plan, rule, wire = self.plan, self.options.rule, _wire(q, k, v)
        kernel = choose(_call(q, k, v, terms.scale, terms.softcap, rule), self.options.kernel)
        facts = _facts(wire, kernel, terms, rule) | {"gradients of q, k, v, sinks, bias": str(grads.needs)}
        plan._agree(_BACKWARD_TOPIC, wire, facts)
        jobs = plan._jobs(q, wire, kernel, terms, rule, of=call)
        if q.shape[0] == 0:
            shared = (q.new_zeros(0) if x is None else torch.zeros_like(x) for x in (terms.sinks, terms.bias))
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), *shared
        saved = _saved(grads, out, lse)
        here = plan._context.driver.ring_ranks
        q_rows = sharding.slices(plan._sides.queries, here)
        programs = [
            ring.backward(job, *rows, saved.rows(Rows(slice(None), r)))
            for job, rows, r in zip(jobs, self._rows(q, k, v), q_rows, strict=True)
        ]
        with torch.autocast(q.device.type, enabled=False):
            dq, dk, dv, dbias = zip(*plan._context.driver.run(programs), strict=True)
        return _joined(dq), _joined(dk), _joined(dv), _sink_gradients(saved, terms.sinks), sum(dbias[1:], dbias[0])

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The rows of each rank that this process plays."""
        sides, here = self.plan._sides, self.plan._context.driver.ring_ranks
        both = zip(sharding.slices(sides.queries, here), sharding.slices(sides.keys, here), strict=True)
        return [(q[:, :, a], k[:, :, b], v[:, :, b]) for a, b in both]


def _saved(grads: Grads, out: Tensor, lse: Tensor) -> Saved:
    dtype = accumulator_dtype(out.dtype)
    delta = (out.to(dtype) * grads.dout.to(dtype)).sum(-1)
    if grads.dlse is not None:
        delta -= grads.dlse
    return Saved(out, lse, grads.dout, grads.dlse, delta)


def _sink_gradients(saved: Saved, sinks: Tensor | None) -> Tensor:
    """This process's share: a sink is one more key, of value 0, in every row: its weight times (0 - delta)."""
    if sinks is None:
        return saved.delta.new_zeros(0)
    logits = sinks.to(saved.lse.dtype)[:, None]
    weight = torch.exp(logits - saved.lse).masked_fill(logits == -torch.inf, 0.0)
    seen = (saved.out != 0).any(-1)  # in a row without keys dout may hold anything, NaN too: out is 0 whatever happens
    delta = saved.delta.masked_fill(~seen, 0.0) if saved.dlse is None else torch.where(seen, saved.delta, -saved.dlse)
    return -(weight * delta).sum((0, 2))


def _step_tiles(schedule: Schedule) -> tuple[list[StepTiles], list[StepTiles]]:
    one, two = schedule.forward, schedule.backward
    backward = [StepTiles(two.tiles_of(step)) for step in range(len(two))]
    offsets = two.tile_offsets[: len(one.tile_offsets)]  # backward's extra last steps have none
    if np.array_equal(one.tiles, two.tiles) and np.array_equal(one.tile_offsets, offsets):
        return backward, backward
    return [StepTiles(one.tiles_of(step)) for step in range(len(one))], backward


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Ranks' rows joined; a fresh contiguous tensor in any case, because an op's results must not alias its inputs."""
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts), 2)


def _call(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, rule: Rule | None) -> Call:
    kind = "" if rule is None else rule.name
    return Call(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.device.type, scale, softcap, kind)


def _wire(q: Tensor, k: Tensor, v: Tensor) -> Format:
    size = accumulator_dtype(q.dtype).itemsize
    dtype = str(q.dtype).removeprefix("torch.")
    return Format(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3], dtype, q.dtype.itemsize, size)


def _facts(wire: Format, kernel: Kernel, terms: Terms, rule: Rule | None) -> dict[str, str]:
    asked = {"scale": repr(terms.scale), "kernel": kernel.name, "softcap": repr(terms.softcap), "bias": str(rule)}
    shared = {name: _described(x) for name, x in (("sinks", terms.sinks), ("bias tensor", terms.bias))}
    return {**{k: str(v) for k, v in asdict(wire).items()}, **asked, **shared}


def _described(x: Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} {list(x.shape)}"


def check_schedules(
    schedules: Schedule | tuple[Schedule, ...], ring_ranks: tuple[int, ...], inputs: bytes
) -> tuple[Schedule, ...]:
    """Schedules made elsewhere (a loader's worker), as this process needs them.

    Raises:
        PlanError: made for other ranks, or from another length, layout, route or documents.
    """
    many = schedules if isinstance(schedules, tuple) else (schedules,)
    ranks = tuple(s.ring_rank for s in many)
    if ranks != ring_ranks:
        raise PlanError(f"schedules must be those of ring ranks {ring_ranks}; got {ranks}.")
    if any(s.inputs != inputs for s in many):
        raise PlanError("schedule must be made from this partition's length, layout, route and documents; it was not.")
    return many
