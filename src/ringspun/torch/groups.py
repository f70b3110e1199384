"""From what a user has, a process group, a mesh, two groups or nothing, to the driver that moves messages and the two
degrees of a hybrid."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ringspun.core.choice_of_degrees import WeighedDegrees, choose_degrees
from ringspun.core.degrees import Degrees, Inner
from ringspun.core.host import is_integer
from ringspun.core.links import Links
from ringspun.errors import PlanError
from ringspun.torch.drivers import Driver, Gloo, GroupDriver, Loopback, Nccl
from ringspun.torch.drivers.base import digest_of
from ringspun.torch.drivers.group import backends, meeting_device
from ringspun.torch.drivers.part import CountsOfPart, Part

AXES = ("ring", "ulysses")


class Place(NamedTuple):
    """Who moves messages, and how its ranks are two degrees; what these were chosen from, if they were."""

    driver: Driver
    degrees: Degrees
    weighed: WeighedDegrees = ()


def place(
    group: Any,
    *,
    ulysses: int | Literal["auto"] | None,
    inner: Inner | None,
    heads: tuple[int, int] | None,
    ring_group: Any,
    ulysses_group: Any,
    links: Links | None,
    backward: str,
    timeout_s: float,
) -> Place:
    """See `ringspun.torch.ContextParallel`.

    Raises:
        PlanError: a group that cannot be used, or degrees that do not fit it.
    """
    if (ulysses == "auto") != (heads is not None):
        raise PlanError(
            f"heads must come with ulysses='auto', which is chosen by them: (query heads, key/value heads); got "
            f"ulysses={ulysses!r} and heads={heads!r}."
        )
    if inner not in (None, "ulysses", "ring"):
        raise PlanError(f"inner must be 'ulysses' or 'ring'; got {inner!r}.")
    if ring_group is not None or ulysses_group is not None:
        if group is not None or ulysses is not None or inner is not None or None in (ring_group, ulysses_group):
            raise PlanError(
                "ring_group and ulysses_group must come together, without group, ulysses and inner; got others."
            )
        return Place(*_of_two(ring_group, ulysses_group, timeout_s))
    if isinstance(group, dist.device_mesh.DeviceMesh) and group.ndim == 2:
        if ulysses is not None or inner is not None:
            raise PlanError("a mesh of two dimensions must come without ulysses and inner; got them. It says both.")
        return Place(*_of_mesh(group, timeout_s))
    driver = _driver(group, timeout_s)
    if ulysses == "auto":
        if not (isinstance(heads, tuple) and len(heads) == 2 and all(map(is_integer, heads))):
            raise PlanError(f"heads must be two integers, query heads and key/value heads; got {heads!r}.")
        weighed = choose_degrees(driver.size, int(heads[0]), int(heads[1]), links=links, backward=backward)
        return Place(driver, replace(weighed[0][0], inner=inner or "ulysses"), weighed)
    degree = 1 if ulysses is None else ulysses
    if not is_integer(degree) or degree < 1 or driver.size % degree:
        raise PlanError(f"ulysses must divide the group's {driver.size} ranks; got {ulysses!r}.")
    if inner is not None and ulysses is None:
        raise PlanError(f"inner must come with ulysses, whose ranks or the ring's it makes neighbours; got {inner!r}.")
    return Place(driver, Degrees(driver.size // int(degree), int(degree), inner or "ulysses"))


def _driver(group: Any, timeout_s: float) -> Driver:
    if isinstance(group, Driver):
        return group
    if isinstance(group, dist.device_mesh.DeviceMesh):
        if group.ndim != 1:
            raise PlanError(
                f"mesh must have one dimension, or the two 'ring' and 'ulysses'; got {group.ndim}. Pass the ring's "
                "own, e.g. mesh['ring'], or mesh['ring', 'ulysses']."
            )
        group = group.get_group()
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Loopback(1)
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise PlanError(
            f"group must be a process group that this rank belongs to, a mesh or a Loopback; got {group!r}."
        )
    if dist.get_world_size(group) == 1:
        return Loopback(1)
    return over_group(group, timeout_s)


def over_group(group: dist.ProcessGroup, timeout_s: float) -> GroupDriver:
    """The driver of a group's backend. Of nccl collective, once for a group.

    Raises:
        PlanError: it has another.
    """
    found = backends(group)
    if found.get("cuda") == "nccl":
        return Nccl(group, timeout_s=timeout_s)
    if found.get("cpu") == "gloo":
        return Gloo(group, timeout_s=timeout_s)
    raise PlanError(f"group must use gloo for CPUs or nccl for CUDA; got {found}.")


def drivers_of_rings(driver: Driver, degrees: Degrees, timeout_s: float) -> tuple[Driver, ...]:
    """A driver for each ring of a hybrid that this process plays. Collective.

    A loopback's are parts of it. Processes get a group for each ring: what the ranks of one agree on, those of another
    need not, and an agreement by messages would meet other messages when a rank alone asks for it.

    Raises:
        PlanMismatchError: ranks ask for other degrees, whose groups would wait for each other.
    """
    columns = sorted({degrees.place(rank)[1] for rank in driver.ring_ranks})
    rings = [degrees.column(u) for u in columns]
    if len(driver.ring_ranks) == driver.size:
        return tuple(Part(driver, ring) for ring in rings)
    order = driver.ranks if isinstance(driver, Part) else tuple(range(driver.size))
    whole = driver.whole if isinstance(driver, Part) else driver
    if not isinstance(whole, GroupDriver):
        raise PlanError(f"ulysses must come with a group, a mesh or a Loopback; got {type(driver).__name__}.")
    driver.agree("two degrees", digest_of(str(degrees)), {"degrees": str(degrees)})
    if degrees.ring == 1:
        return tuple(Part(driver, ring) for ring in rings)
    world, (ring,) = dist.get_process_group_ranks(whole.group), rings

    def most(number: int) -> int:
        return int(whole.all_gather_rows(torch.tensor([number]), [1] * whole.size).max())

    made = _over([world[order[rank]] for rank in ring], whole.group, timeout_s, most)
    of_group = made.whole if isinstance(made, Part) else made
    assert isinstance(of_group, GroupDriver)
    made.counts = of_group.counts = CountsOfPart(driver.counts, ring)
    of_group.breaks, whole.breaks = (whole,), (*whole.breaks, of_group)
    return (made,)


def _of_mesh(mesh: dist.device_mesh.DeviceMesh, timeout_s: float) -> tuple[Driver, Degrees]:
    names = mesh.mesh_dim_names
    if names is None or sorted(names) != sorted(AXES):
        raise PlanError(
            f"mesh must have one dimension, or the two 'ring' and 'ulysses', the inner one last; got {names}. "
            "Pass the ring's own, e.g. mesh['ring'], or mesh['ring', 'ulysses']."
        )
    sizes = dict(zip(names, mesh.mesh.shape, strict=True))
    degrees = Degrees(int(sizes["ring"]), int(sizes["ulysses"]), "ulysses" if names[-1] == "ulysses" else "ring")
    for name, other in (AXES, AXES[::-1]):
        if sizes[other] == 1:
            return _driver(mesh.get_group(name), timeout_s), degrees
    most = partial(_most, [mesh.get_group(name) for name in AXES])
    return _over(mesh.mesh.flatten().tolist(), mesh.get_group("ring"), timeout_s, most), degrees


def _of_two(ring_group: Any, ulysses_group: Any, timeout_s: float) -> tuple[Driver, Degrees]:
    for name, one in (("ring_group", ring_group), ("ulysses_group", ulysses_group)):
        if not isinstance(one, dist.ProcessGroup):
            raise PlanError(f"{name} must be a process group that this rank belongs to; got {one!r}.")
    ring = dist.get_process_group_ranks(ring_group)
    # the groups of all ring ranks, too: a rank that refused alone would leave others waiting
    columns, rows = _ragged(ring, ulysses_group), _ragged(dist.get_process_group_ranks(ulysses_group), ring_group)
    if any(len(column) != len(ring) for column in columns) or rows != [list(row) for row in zip(*columns, strict=True)]:
        raise PlanError(
            "ring_group and ulysses_group must be the columns and rows of a grid of ranks; got rings "
            f"{columns} and the ulysses groups {rows}. Take both from one mesh."
        )
    degrees = Degrees(len(ring), len(columns))
    ranks = [column[r] for r in range(len(ring)) for column in columns]
    for alone, group in ((len(columns) == 1, ring_group), (len(ring) == 1, ulysses_group)):
        if alone:
            return _driver(group, timeout_s), degrees
    return _over(ranks, ring_group, timeout_s, partial(_most, [ring_group, ulysses_group])), degrees


def _gathered(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """As many integers of every rank. Collective."""
    brought = torch.tensor(mine, device=meeting_device(group))
    found = [torch.empty_like(brought) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, brought, group=group)
    return [one.tolist() for one in found]


def _ragged(mine: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """The integers of every rank, as many as it has. Collective."""
    lengths = [n for (n,) in _gathered([len(mine)], group)]
    padded = _gathered(mine + [-1] * (max(lengths) - len(mine)), group)
    return [numbers[:n] for numbers, n in zip(padded, lengths, strict=True)]


def _most(groups: Sequence[dist.ProcessGroup], number: int) -> int:
    """The largest of a grid's ranks, of which each brings a number. Collective.

    Args:
        groups: this rank's ring, and the ranks that split heads with it.
    """
    for group in groups:
        largest = torch.tensor([number], device=meeting_device(group))
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        number = int(largest)
    return number


def _over(
    ranks: Sequence[int], beside: dist.ProcessGroup, timeout_s: float, most: Callable[[int], int]
) -> GroupDriver | Part:
    """A driver over world ranks, in their order, of the kind of a group that is there. Collective among them, at first:
    there is one group for the same ranks beside the same group, however many contexts are made.

    Args:
        most: the largest of the numbers that these ranks bring, or that more ranks bring. Collective.
    """
    backend, ordered = str(dist.get_backend(beside)), tuple(sorted(ranks))
    made = _groups.setdefault(beside, weakref.WeakValueDictionary())
    group = made.get(ordered)
    if group is None:
        bound = dist.distributed_c10d._get_default_group().bound_device_id
        if "nccl" in backends(beside).values() and bound is not None:
            raise PlanError(
                "init_process_group must come without device_id where two degrees over nccl need groups of their own; "
                f"got {bound}. torch would split the bound communicator for them, which "
                "takes every rank of the job at once."
            )
        # torch names such a group by its ranks and by how many groups a rank is in already, and ranks wait for each
        # other under that name, for half an hour: who is in fewer joins groups of its own alone
        mine = len(dist.distributed_c10d._world.pg_names)
        for _ in range(most(mine) - mine):
            dist.new_group([dist.get_rank()], backend=backend, use_local_synchronization=True)
        group = dist.new_group(list(ordered), backend=backend, use_local_synchronization=True)
        made[ordered] = group
    driver = over_group(group, timeout_s)
    return driver if ordered == tuple(ranks) else Part(driver, [ordered.index(rank) for rank in ranks])


_groups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, weakref.WeakValueDictionary[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()
