"""`Plan`: one mask over one partition, ready to be called. Checks what it is given; `execution` does the rest."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Float
from torch import Tensor

from ringspun.core.host import is_integer
from ringspun.core.mask import Documents, Mask, RowMasks, documents_of
from ringspun.core.partition import Sides
from ringspun.core.route import Route
from ringspun.core.schedule import Schedule, compile_schedules
from ringspun.core.softmax import checked_softcap
from ringspun.core.text import shown
from ringspun.core.wire import Format, segments
from ringspun.errors import PlanError, RingspunError
from ringspun.torch import inputs, sdpa
from ringspun.torch.bias import Bias, Rule
from ringspun.torch.execution import Calls, Execution, Options, call_of, wire_of
from ringspun.torch.explain import Explanation, explain
from ringspun.torch.kernels import Call, Kernel, choose
from ringspun.torch.ops import REGISTRY, attention_op
from ringspun.torch.partition import Partition
from ringspun.torch.pieces import words_of_blocks

if TYPE_CHECKING:
    from ringspun.pictures.notebook import Pictures
    from ringspun.torch.context import ContextParallel

KEPT_OPTIONS = 64
"""Of the options that calls of one plan named last, how many keep their handle."""
COMPANIONS: dict[str, Callable[[Plan], Any]] = {}
"""What an integration works out once for every plan, when it is made: a traced call of a model could not."""


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
        route: Route,
    ) -> None:
        self._context, self._sides, self._mask, self.schedules = context, sides, mask, schedules
        self._route = route
        self._queries = Partition(context, sides.queries, self._row_documents)
        here = context.driver.ring_ranks
        self._rows = sides.queries.rows_of(here), sides.keys.rows_of(here)  # ints: traced calls guard on them
        self._kept_rows = [rows for s in schedules for rows in s.kept_rows]
        number = context.number.to_bytes(8, "little")
        plan_id = int.from_bytes(hashlib.blake2b(schedules[0].inputs + number, digest_size=7).digest(), "little")
        asked = context.checks, context.sync_steps
        meters = () if context.pieces is None else context.pieces.meters(sides, schedules)
        self._calls = Calls(context.driver, context.pool, sides, schedules, plan_id, *asked, context.backward, meters)
        self._says = sdpa.what_calls_may_say(sides, mask) if context.sdpa_used else None
        self._handles: OrderedDict[Options, tuple[int, Execution]] = OrderedDict()
        for options in (Options(), *context.options):  # here, for a traced call cannot change the registry
            self._handle(options)
        self._companions = {name: make(self) for name, make in COMPANIONS.items()}

    def companion(self, name: str) -> Any:
        """What the integration `name` made of this plan (`COMPANIONS`)."""
        if name not in self._companions:  # an integration that came later than the plan
            self._companions[name] = COMPANIONS[name](self)
        return self._companions[name]

    @property
    def mask(self) -> Mask | tuple[Mask, ...]:
        """What may be seen; one mask per batch row where the plan was made with several."""
        return self._mask.masks if isinstance(self._mask, RowMasks) else self._mask

    @property
    def queries(self) -> Partition:
        """Who holds which query."""
        return self._queries

    @property
    def _row_documents(self) -> tuple[Documents | None, ...] | None:
        """Documents of each batch row, where they are not those of the partition."""
        if not isinstance(self._mask, RowMasks) or self._sides.queries.documents is not None:
            return None
        found = [documents_of(mask) for mask in self._mask.masks]
        return tuple(next(iter(row), None) for row in found) if any(found) else None

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

    @property
    def n_bytes(self) -> int:
        """About what the plan takes in memory (bytes)."""
        return self._calls.n_bytes

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
            self._calls.fail(failure)
            raise
        handle = self._handle(Options(asked.kernel, rule))
        given = q, k, v, asked.sinks, values
        kept_bytes = self._kept_bytes(k, v) if self._kept_rows and _backward_may_come(given) else 0
        out, lse, *_ = attention_op(*given, handle, call.scale, call.softcap, kept_bytes)
        return (out, lse) if return_lse else out

    def _kept_bytes(self, k: Tensor, v: Tensor) -> int:
        """Bytes of the blocks that forward leaves to backward, all ranks' of this process (`Schedule.kept_bytes`)."""
        shapes = [[(*x.shape[:2], rows, x.shape[3]) for x in (k, v)] for rows in self._kept_rows]
        return sum(segments(both, [k.itemsize, v.itemsize])[1] for both in shapes)

    def _checked(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked) -> tuple[Rule | None, Tensor | None, Call]:
        """The rule and tensor of a bias, and the facts of a call; raises what is wrong with its arguments."""
        batch = len(self._mask) if isinstance(self._mask, RowMasks) else None
        inputs.check_tensors(self._context.driver, self._rows, batch, q, k, v)
        scale, softcap = inputs.checked_scale(asked.scale, q.shape[-1]), checked_softcap(asked.softcap)
        rule, values = inputs.check_terms(self._context.driver, q, asked.sinks, asked.bias)
        return rule, values, call_of(q, k, v, scale, softcap, rule, self._calls.grid)

    def as_sdpa(self) -> AbstractContextManager[None]:
        """Within this ``with``, `scaled_dot_product_attention` is `attention`: for models that take no argument more.

            with plan.as_sdpa():
                logits = model(ids_local, positions_local)     # backward may come after the block

        It serves this thread alone, patches nothing, and ends with the block; the innermost block counts. A
        `torch.nn.MultiheadAttention` is served too (``need_weights=False``). What a call asks for is refused unless the
        plan does it: `attn_mask`, `dropout_p` above 0, unequal heads without `enable_gqa`, flex attention, and an
        `is_causal` that the plan's mask contradicts: True where a query looks ahead, False where causality hides pairs.
        A checkpointed block runs again in backward and needs `checkpoint_contexts`; without them it is refused.

        Raises:
            UnsupportedByRing: such a call. Others as `attention`.
        Warns:
            RingspunWarning: no attention was computed: the model's has another name, and stays local.
        """
        return sdpa.as_sdpa(self, self._says_of_causality())

    def checkpoint_contexts(self, others: sdpa.ContextFn | None = None) -> sdpa.Contexts:
        """The `context_fn` of a checkpointed block under `as_sdpa`: it runs on the ring again when it is recomputed.

            checkpoint(block, x, use_reentrant=False, context_fn=plan.checkpoint_contexts)

        Args:
            others: another `context_fn` to keep. See `ringspun.torch.checkpoint_contexts`, which also serves where no
                plan is at hand yet.
        Raises:
            UnsupportedByRing: not inside this plan's `as_sdpa`.
        """
        return sdpa.checkpoint_contexts_of(self, others)

    def _says_of_causality(self) -> tuple[bool, ...]:
        """The values of `is_causal` that agree with the mask, kept (a cached property's lock cannot be traced)."""
        if self._says is None:
            if torch.compiler.is_compiling():
                raise RingspunError(
                    "plan.as_sdpa() must begin once uncompiled before a compiled function can hold it; got its first "
                    "use. Later plans of the context need none."
                )
            self._context.sdpa_used = True
            self._says = sdpa.what_calls_may_say(self._sides, self._mask)
        return self._says

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
            ring_rank: whose part; default this process's (a loopback's first); where heads are split, a rank of the
                whole context, whose ring and exchanges are told. Others as in `attention`.
        """
        asked = Asked(scale, softcap, sinks, bias, kernel)
        q, k, v = inputs.autocast(q, k, v)
        _, _, call = self._checked(q, k, v, asked)
        rank, size = self._context.rank if ring_rank is None else ring_rank, self._context.size
        if not is_integer(rank) or not 0 <= rank < size:
            raise PlanError(f"ring_rank must be from 0 to {size - 1}; got {ring_rank!r}.")
        return self._explained(q, k, v, asked, call, int(rank))

    def show(self, *pictures: str, like: tuple[Tensor, Tensor, Tensor] | None = None) -> Pictures:
        """Pictures of what is computed and sent: in a notebook a page with a slider through the steps, printed text.

            plan.show("balance", "memory", like=(q, k, v)).save(Path("ring.html"))

        Local: nothing is computed or sent. Where heads are split, it is this rank's ring, of some of the heads.

        Args:
            pictures: "schedule", "layout", "mask", "balance", "memory"; default all. like: q, k, v of a call, whose
                heads, sizes and dtype count; default one sequence, 8 heads of 64, bfloat16.
        Raises:
            ConfigError: another name.
        """
        from ringspun.pictures import Scene, notebook  # needed by who looks, not by who trains

        wire = {} if like is None else {"wire": self._ring_wire(*like)}
        scene = Scene(self._sides.of_rings, self._mask, self._route, backward=self._context.backward, **wire)
        return notebook.pictures_of(scene, *pictures)

    def _ring_wire(self, q: Tensor, k: Tensor, v: Tensor) -> Format:
        """What messages of the ring are made of in such a call."""
        return wire_of(q, k, v)

    def _explained(self, q: Tensor, k: Tensor, v: Tensor, asked: Asked, call: Call, rank: int) -> Explanation:
        """`explain`, its arguments checked."""
        speeds = getattr(self._sides.queries.layout, "speeds", None)
        pieces = self._context.pieces
        blocks = words_of_blocks(self.schedule, None if pieces is None else pieces.why(self._route, self._sides))
        asked_of_all = self._everybody, speeds, wire_of(q, k, v)
        return explain(self._words, rank, *asked_of_all, call, asked.kernel, self._context.backward, blocks)

    @property
    def _words(self) -> str:
        """What is computed, in a line."""
        queries, keys = self._sides.queries, self._sides.keys
        words = f"{shown(self._mask, 60)} over {queries.seq_len:,} tokens, {queries.layout}"
        words += "" if self.schedule.route == "ring" else f", {self.schedule.route}"
        if self._sides.same:
            return words
        start = f" from {queries.start:,}" if queries.start else ""
        return f"{words}{start}, and {keys.seq_len:,} keys, {keys.layout}"

    @cached_property
    def _everybody(self) -> tuple[Schedule, ...]:
        """The schedules of all ranks."""
        ranks = range(self._context.ring_size)
        return compile_schedules(self._sides, self._mask, self._route, ranks)

    def _handle(self, options: Options) -> int:
        if options not in self._handles:
            if torch.compiler.is_compiling():
                raise RingspunError(
                    "attention must be called once uncompiled with this kernel or bias before a whole compiled graph "
                    "(fullgraph=True) can hold it; got its first call. Later plans of the context need none."
                )
            execution = Execution(self._calls, options)
            self._handles[options] = REGISTRY.add(self._context.key, execution), execution
            if len(self._handles) > KEPT_OPTIONS:  # a new bias function in every call, say
                del self._handles[next(o for o in self._handles if o != Options())]  # compiled calls count on that one
            self._context.remember(options)
        return self._handles[options][0]

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        return self  # a frozen value; models that hold one are copied

    def __reduce__(self) -> str:
        raise TypeError(
            "plan must not be pickled: it belongs to this process's ring. "
            "Send context.geometry, or its schedules, and plan again where they arrive."
        )

    def __repr__(self) -> str:
        return f"Plan({self._words}, tokens={self._sides.queries.tokens.tolist()})"


def _backward_may_come(given: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


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
