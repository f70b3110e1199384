"""`ContextParallel`, `Partition` and `Plan`: what a user holds.

cp   = ContextParallel(group, layout=Zigzag())        # the ring
part = cp.partition(seq_len=S, documents=docs)        # who holds which token
plan = part.plan(Causal() & docs)                     # what to compute
out  = plan.attention(q, k, v)                        # [B, H, T, D]
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.utils.data

from ringspun.core.checks import Checks
from ringspun.core.choice_of_degrees import of_ring
from ringspun.core.degrees import Inner
from ringspun.core.geometry import Geometry
from ringspun.core.layout import Layout, Zigzag
from ringspun.core.links import Links
from ringspun.core.mask import Documents, Mask, RowMasks
from ringspun.core.partition import Sides
from ringspun.core.route import Ring, Route
from ringspun.core.schedule import Schedule, compile_schedules, input_digest, mask_of
from ringspun.core.text import parse_route, shown
from ringspun.core.ways import WANTED
from ringspun.core.wire import Side
from ringspun.errors import PlanError
from ringspun.steplog import FOLDER_VARIABLE
from ringspun.torch import doubts
from ringspun.torch.buffers import BufferPool
from ringspun.torch.drivers import Driver
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.execution import Options
from ringspun.torch.groups import drivers_of_rings, place
from ringspun.torch.halo import Halos
from ringspun.torch.ops import KEPT_PER_CONTEXT
from ringspun.torch.partition import Partition
from ringspun.torch.pieces import Pieces
from ringspun.torch.plan import Plan, check_schedules
from ringspun.torch.recent import Recent
from ringspun.torch.routing import may_turn, route_of
from ringspun.torch.ulysses import hybrid_plan

KEPT_READY = 4
"""Of the last new options of calls, how many a new plan is ready for."""


class ContextParallel:
    """A ring of ranks that together hold one sequence (context parallelism; its size is what others call `cp_size`).

    Args:
        group: a process group of gloo or nccl (any world ranks; its order is the ring's order), a `DeviceMesh` of one
            dimension or of two, ``("ring", "ulysses")`` in either order, a `Loopback`, or None: the default group, or
            this process alone where torch.distributed is not initialised.
        layout: the rule that deals tokens to ranks. route: how blocks travel: a `Route` or its string (``"ring"``,
            ``"direct"``, ``"bidirectional"``, ``"double_ring(4)"``; see docs/routes.md); "auto": the ring, or what is
            over soonest on `links`.
        links: a profile of `ringspun bench links` of the whole group, or its file; the same on every rank.
        block_size: most tokens of a block on its way round the ring: hops go in pieces, one behind the other. None:
            whole shards. "auto": chosen when a plan is made, by how long earlier calls computed and waited, on
            all ranks alike; bits change with the number of pieces, so the same inputs may give others later on. See
            docs/routes.md.
        checks: "header": the receiver compares each message's header and end mark with its own schedule. "checksum":
            and every byte between them with the sender's checksum; "checksum/16": in one call of 16. See docs/trust.md.
        timeout_s: longest wait for a peer (seconds).
        log_dir: folder for this process's step log when a call fails; default: the environment's ``RINGSPUN_LOG_DIR``;
            neither: none is written. The group's last context decides. See `ringspun.steplog`.
        sync_steps: have all ranks finish each step before the next, so that an error or a hang names its step exactly.
            For debugging: the same bits, much slower.
        deterministic: None: the same inputs on the same ring give the same bits. "across_rings": on rings of every
            size, a single process too, given the same kernel and number of threads. Tokens are dealt in units of 512,
            so that ranks may hold unequal numbers (of a short sequence none), and the route is
            `ringspun.core.route.InOrder`; see docs/trust.md for what it costs.
        backward: what travels in backward: "keys" (k, v, and their gradients behind them), "queries" (q, the gradient
            of out and what belongs to them, and dq behind), or "auto": what is fewer bytes, counted for each plan and
            kind of tensors. The same gradients up to rounding; see docs/routes.md.
        ulysses: of the group's ranks, how many split the heads of one share of the sequence (a divisor; at most the
            number of query heads); the others are rings. "auto": what sends the fewest bytes, or takes the shortest
            time on `links`. See docs/hybrid.md. Default 1, or what the mesh says.
        inner: whose ranks are neighbours in the group, "ulysses" (the default) or "ring"; a mesh's last axis.
        heads: for "auto": numbers of query and of key/value heads.
        ring_group, ulysses_group: instead of `group`: this rank's ring, and the ranks that split heads with it.
    Raises:
        PlanError: a group that cannot be used, a route beside `deterministic`, a `block_size` without the ring, or
            queries in backward by a route that moves none.
        LayoutError: with `deterministic`, a layout other than `Contiguous` and `Zigzag`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | Driver | None = None,
        *,
        layout: Layout | None = None,
        route: Route | str = "auto",
        links: Links | str | os.PathLike[str] | None = None,
        block_size: int | Literal["auto"] | None = None,
        checks: str = "header",
        timeout_s: float = 600.0,
        log_dir: str | os.PathLike[str] | None = None,
        sync_steps: bool = False,
        deterministic: Literal["across_rings", False] | None = None,
        backward: Literal["auto", "keys", "queries"] = "keys",
        ulysses: int | Literal["auto"] | None = None,
        inner: Inner | None = None,
        heads: tuple[int, int] | None = None,
        ring_group: dist.ProcessGroup | None = None,
        ulysses_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.checks = Checks.parse(checks)
        if not isinstance(route, Route | str):
            raise PlanError(f"route must be 'auto', a Route or its string; got {route!r}.")
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 1e-3 <= timeout_s <= 1e7:
            raise PlanError(f"timeout_s must be a number of seconds from 0.001 to 10 million; got {timeout_s!r}.")
        if not isinstance(sync_steps, bool):
            raise PlanError(f"sync_steps must be True or False; got {sync_steps!r}.")
        self.sync_steps = sync_steps
        if backward not in WANTED:
            raise PlanError(f"backward must be one of {', '.join(map(repr, WANTED))}; got {backward!r}.")
        self.backward = backward
        links = Links.load(Path(links)) if isinstance(links, str | os.PathLike) else links
        self.driver, degrees, self.weighed_degrees = place(
            group, ulysses=ulysses, inner=inner, heads=heads, ring_group=ring_group, ulysses_group=ulysses_group,
            links=links, backward=backward if may_turn(route, deterministic) else Side.KEYS.value, timeout_s=timeout_s,
        )  # fmt: skip
        self.degrees = degrees
        folder = os.environ.get(FOLDER_VARIABLE) or None if log_dir is None else log_dir
        if folder is not None:
            if not isinstance(folder, str | os.PathLike):
                raise PlanError(f"log_dir must be a path; got {folder!r}.")
            self.driver.state.log_dir = os.path.abspath(folder)
        self.pool = BufferPool()
        self.key = next(_keys)  # of this process; an id() would be given again to a later context
        self._number: int | None = None
        layout = Zigzag() if layout is None else layout
        if not isinstance(layout, Layout):
            raise PlanError(f"layout must be a Layout, e.g. Zigzag(); got {layout!r}.")
        if links is not None:  # of the group: a ring has its own; with degrees to choose, they need not choose a route
            links = None if ulysses == "auto" and route != "auto" else of_ring(links, degrees)
        chosen = route_of(route, deterministic, links, block_size)
        self.pieces = Pieces(self.driver) if block_size == "auto" else None
        self.deterministic = "across_rings" if deterministic else None
        if backward == Side.QUERIES.value and not chosen.turns:
            given = "deterministic='across_rings'" if chosen.grid else f"route {chosen}"
            raise PlanError(
                f"backward must be 'auto' or 'keys' with {given}, by which no queries travel; got 'queries'. Leave one "
                "out."
            )
        chosen.layout(layout)
        split = degrees if degrees.ulysses > 1 else None
        here = tuple(sorted({degrees.place(rank)[0] for rank in self.driver.ring_ranks}))
        self.geometry = Geometry(degrees.ring, here, layout, chosen, split)
        asked: dict[str, Any] = {"layout": layout, "route": route, "links": links, "checks": checks}
        asked |= {"block_size": block_size, "backward": backward}
        asked |= {"sync_steps": sync_steps, "deterministic": deterministic}
        rings = drivers_of_rings(self.driver, degrees, timeout_s) if split else ()
        self.rings = tuple(ContextParallel(ring, **asked) for ring in rings)
        for ring in self.rings:
            ring.pieces = self.pieces  # chosen by all of the group's ranks, for all of its rings
        self._plans: Recent[bytes, Plan] = Recent(KEPT_PER_CONTEXT)
        self.halos = Halos(self)
        self.options: tuple[Options, ...] = ()
        self.sdpa_used = False  # whether a plan stood for scaled_dot_product_attention: later ones are then ready to

    @property
    def ring_size(self) -> int:
        """Ranks of a ring R."""
        return self.degrees.ring

    @property
    def ring_rank(self) -> int:
        """This process's place in its ring; 0 for a loopback, which plays all of them."""
        return self.degrees.place(self.driver.ring_ranks[0])[0]

    @property
    def ulysses_size(self) -> int:
        """Ranks among which heads are split U; 1: they are not."""
        return self.degrees.ulysses

    @property
    def ulysses_rank(self) -> int:
        """This process's place among them; 0 for a loopback."""
        return self.degrees.place(self.driver.ring_ranks[0])[1]

    @property
    def rank(self) -> int:
        """This process's place among all ranks of the context; 0 for a loopback."""
        return self.driver.ring_ranks[0]

    @property
    def size(self) -> int:
        """All ranks that hold the sequence together: R times U."""
        return self.driver.size

    @property
    def number(self) -> int:
        """Which context of its group this is, counted when they make their first plan: alike on every rank."""
        if self._number is None:
            state = self.driver.state
            self._number, state.contexts = state.contexts, state.contexts + 1
        return self._number

    def remember(self, options: Options) -> None:
        """Options of a call that later plans shall be ready for before a compiled call asks for them."""
        if options != Options():
            self.options = (*(o for o in self.options if o != options), options)[-KEPT_READY:]

    def partition(
        self, seq_len: int, *, documents: Documents | None = None, layout: Layout | None = None, start: int = 0
    ) -> Partition:
        """Who holds which of `seq_len` tokens. Local: no communication.

        Args:
            documents: for layouts that read them, labels and restarting positions. layout: default that of the ring.
            start: position of the first token, for queries that stand elsewhere among the keys.
        Raises:
            LayoutError, MaskError: a length or documents that do not fit.
        """
        return Partition(self, self.geometry.partition(seq_len, documents, layout=layout, start=start))

    def plan(
        self,
        seq_len: int,
        mask: Mask | Sequence[Mask],
        *,
        documents: Documents | None = None,
        key_len: int | None = None,
        key_layout: Layout | None = None,
        query_start: int = 0,
    ) -> Plan:
        """Partition and plan in one. Collective: every rank of the ring must call it, with equal arguments.

        Args:
            seq_len: global length S of the queries (tokens). mask: what may be seen; a list: one mask per batch row.
            documents: of the partition; default: those of the mask, where it is ``... & Documents(...)``.
            key_len: global length of the keys (tokens), where they are others than the queries' (cross-attention).
            key_layout: the rule that deals the keys; default: that of the ring.
            query_start: position of the first query among the keys (a decoder's last 5 of 100: 95); may be negative.
                Masks compare positions, so it decides what `Causal()` shows; shapes decide nothing.
        Raises:
            PlanMismatchError: the ranks' arguments differ. PeerError: another rank's own plan failed, or it is late.
            PlanError, LayoutError, MaskError: arguments that do not go together; raised on every rank.
        """
        try:
            sides = self.geometry.sides(
                seq_len, documents, mask=mask, key_len=key_len, key_layout=key_layout, query_start=query_start
            )
        except Exception as failure:
            self._agree_on_plan(bytes(32), {}, failure)
            raise
        return self._plan(sides, mask)

    def _plan(self, sides: Sides, what: Mask | Sequence[Mask] | Schedule | Sequence[Schedule]) -> Plan:
        """A plan for two sides, from the cache where there is one; collective every time, cached or not."""
        if torch.utils.data.get_worker_info() is not None:  # a forked worker would talk over its parent's connections
            raise PlanError(
                "plan must be made in the main process; this is a loader's worker. "
                "Call context.geometry.schedule(mask, seq_len) here, and give its result to partition.plan there."
            )
        made = _schedules(what)
        failure: Exception | None = None
        route = self.geometry.route
        digest, key, plan, mask = bytes(32), b"", None, None
        try:
            mask = mask_of(made[0].mask if made else what)
            doubts.check(sides, mask)
            route = self._route_now(sides, made)
            digest = input_digest(sides, mask, route)
            key = b"".join(s.digest for s in made) or digest  # not by their inputs alone: somebody may have edited them
            plan = self._plans.get(key)
            # two classes of masks may write themselves alike; a schedule may be given to another partition than its own
            if plan is None or plan._mask != mask or plan._sides != sides:
                plan = self._compile(sides, mask, made, digest, route)
        except Exception as problem:
            failure = problem
        self._agree_on_plan(digest, _fields(sides, mask) | {"route": str(route)}, failure)
        assert plan is not None
        if self.pieces is not None:  # for the next plan, now that every rank has made this one
            self.pieces.choose()
        self._plans.use(key, plan, plan.n_bytes)
        return plan

    def _route_now(self, sides: Sides, made: tuple[Schedule, ...]) -> Route:
        """The route of a plan made now; of schedules made elsewhere, which know no choice, their own ring."""
        if self.pieces is None:
            return self.geometry.route
        if not made:
            return self.pieces.route(sides.of_rings)
        theirs = parse_route(made[0].route)
        return theirs if isinstance(theirs, Ring) else self.geometry.route

    def _compile(
        self, sides: Sides, mask: Mask | RowMasks, made: tuple[Schedule, ...], inputs: bytes, route: Route
    ) -> Plan:
        ranks, rings = self.geometry.ring_ranks, sides.of_rings
        if made:
            schedules = check_schedules(made, ranks, inputs if rings == sides else input_digest(rings, mask, route))
        else:
            schedules = compile_schedules(rings, mask, route, ranks)
        if self.rings:
            return hybrid_plan(self, sides, mask, schedules, route)
        return Plan(self, sides, mask, schedules, route)

    def _agree_on_plan(self, inputs: bytes, fields: dict[str, str], failure: Exception | None) -> None:
        shared = {"context of the group": str(self.number), "checks": str(self.checks)}
        shared |= {"sync_steps": str(self.sync_steps), "deterministic": str(self.deterministic)}
        shared |= {"backward": self.backward}
        self.driver.agree("the plan", digest_of((inputs, shared)), {**fields, **shared}, failure)

    def __copy__(self) -> ContextParallel:
        return self

    def __reduce__(self) -> str:
        raise TypeError(
            "context must not be pickled: it is this process's place in a ring. Send context.geometry, and make a "
            "context where it arrives."
        )

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # a place in a ring cannot be doubled; models that hold one are copied

    def __repr__(self) -> str:
        name = type(self.driver).__name__.lower()
        ulysses = f", ulysses_size={self.ulysses_size}" if self.rings else ""
        return f"ContextParallel(ring_size={self.ring_size}{ulysses}, layout={self.geometry.layout}, driver={name})"


_keys = itertools.count()


def _schedules(what: Any) -> tuple[Schedule, ...]:
    """`what` as schedules made elsewhere (loaders turn tuples into lists), or none where it is a mask."""
    many = tuple(what) if isinstance(what, list | tuple) else (what,)
    return many if many and all(isinstance(s, Schedule) for s in many) else ()


def _fields(sides: Sides, mask: Mask | RowMasks | None) -> dict[str, str]:
    """What a disagreement is explained by."""
    queries, keys = sides.queries, sides.keys
    fields = {"seq_len": queries.seq_len, "mask": mask, "layout": queries.layout, "documents": queries.documents}
    fields |= {"key_len": keys.seq_len, "key_layout": keys.layout, "query_start": queries.start}
    return {name: shown(value) for name, value in fields.items()}
