"""Accelerators and the links between them, as data: `hardware.toml`, a file of one's own, or a measured profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, Strict, model_validator

from ringspun.core.links import Link, Links
from ringspun.errors import ConfigError
from ringspun.planner.reading import Entry, checked, read, squeezed, unknown

GIB = 1 << 30
MOST_DEVICES = 1 << 20
"""Of a cluster; nobody has more, and all their divisors are looked at."""
SIZES = tuple(1 << n for n in range(10, 35))
"""Lengths at which a link's curve is tabulated: 1 KiB to 16 GiB."""
OF_MATMUL = 0.7
"""Attention's rate over that of large matrix products, where nobody published it: A100 0.72, H100 0.68."""
OF_PEAK = 0.8
"""The rate of large matrix products over the peak, where nobody published it: A100 0.87, H100 0.80, B200 0.78."""

Curve = tuple[Annotated[tuple[int, float], Strict(False)], ...]


class LinkSpec(Entry):
    """One kind of link, from one device to another."""

    bytes_per_s: float = Field(ge=1e3, le=1e21, allow_inf_nan=False, description="Nominal, one way, of one link.")
    latency_s: float = Field(ge=0, le=1e3, allow_inf_nan=False, description="Of an empty message, its launch included.")
    efficiency: Curve = Field(
        default=((1, 1.0),), strict=False, min_length=1, description="(message bytes, fraction of nominal), ascending."
    )
    collective: Curve | None = Field(
        default=None, strict=False, description="The same for all-gathers and their like; default: as `efficiency`."
    )
    links: int = Field(default=1, gt=0, description="A device's links of this kind; a ring uses one of them.")
    shared_by: int = Field(default=1, gt=0, description="Devices that send over it together; each gets its part.")
    both_ways: bool = Field(default=True, description="Whether it carries `bytes_per_s` each way at once.")
    source: str = Field(min_length=1, description="Where the figures come from.")
    date: str = Field(min_length=4, description="When they were read.")
    assumed: str = Field(default="", description="What nobody published.")

    @model_validator(mode="after")
    def _ascends(self) -> Self:
        for curve in (self.efficiency, self.collective or self.efficiency):
            sizes = [n for n, _ in curve]
            if sizes != sorted(set(sizes)) or not all(n > 0 and 0 < e <= 1 for n, e in curve):
                raise ValueError(f"efficiency must ascend in bytes, with fractions in (0, 1]; got {curve}.")
        return self

    def link(self, *, collective: bool = False) -> Link:
        """Its times as `ringspun bench links` would measure them: one table of seconds by message length.

        Args:
            collective: of all-gathers and their like instead of messages to a neighbour.
        """
        sizes, fractions = np.array((collective and self.collective) or self.efficiency, np.float64).T
        n = np.array(SIZES, np.float64)
        nominal = self.bytes_per_s * np.interp(np.log(n), np.log(sizes), fractions)
        each_way = 1 if self.both_ways else 2
        together = self.latency_s + each_way * self.shared_by * n / nominal
        alone = self.latency_s + n / nominal
        return Link(SIZES, tuple(alone.tolist()), tuple(together.tolist()))


class Device(Entry):
    """One accelerator as a framework sees it."""

    name: str = ""
    aliases: tuple[str, ...] = Field(default=(), strict=False)
    flops: float = Field(ge=1e3, le=1e21, allow_inf_nan=False, description="Peak FLOP/s, dense bfloat16.")
    matmul_flops: float | None = Field(
        default=None, ge=1e3, allow_inf_nan=False, description="FLOP/s that large matrix products reach."
    )
    attention_flops: float | None = Field(
        default=None, ge=1e3, allow_inf_nan=False, description="FLOP/s that attention reaches on long slices."
    )
    memory_gib: float = Field(gt=0, le=1e6, allow_inf_nan=False, description="Its memory (GiB).")
    memory_bytes_per_s: float = Field(ge=1e3, le=1e21, allow_inf_nan=False, description="How fast its memory is read.")
    units: int = Field(default=1, gt=0, description="Parts that compute tiles side by side (SMs, CUs, MXUs).")
    near: str = Field(description="Name of the link inside a node.")
    far: str | None = Field(default=None, description="Name of the link between nodes.")
    node: int = Field(gt=0, description="Devices that `near` joins.")
    source: str = Field(min_length=1, description="Where the figures come from.")
    date: str = Field(min_length=4, description="When they were read.")
    assumed: str = Field(default="", description="What nobody published.")

    @model_validator(mode="after")
    def _peaks(self) -> Self:
        for name in ("matmul_flops", "attention_flops"):
            if (getattr(self, name) or 0) > self.flops:
                raise ValueError(f"{name} must be at most flops, the peak; got {getattr(self, name)} and {self.flops}.")
        return self

    @property
    def memory_bytes(self) -> float:
        """All of its memory."""
        return self.memory_gib * GIB

    @property
    def matmul(self) -> float:
        """FLOP/s of large matrix products, as published or by the rule of thumb."""
        return self.matmul_flops or OF_PEAK * self.flops

    @property
    def attention(self) -> float:
        """FLOP/s of attention on long slices, as published or by the rule of thumb."""
        return self.attention_flops or OF_MATMUL * self.matmul


@dataclass(frozen=True)
class Hardware:
    """Devices and links by name."""

    devices: Mapping[str, Device]
    links: Mapping[str, LinkSpec]

    @staticmethod
    def load(device_file: Path | None = None) -> Hardware:
        """What is known, and what `device_file` (tables `[devices.NAME]` and `[links.NAME]`) adds or replaces.

        Raises:
            ConfigError: a file that cannot be read, or an entry that is wrong.
        """
        known = _built_in()
        if device_file is None:
            return known
        own = _hardware(read(device_file, "device-file"), str(device_file))
        both = Hardware({**known.devices, **own.devices}, {**known.links, **own.links})
        for device in own.devices.values():
            for link in filter(None, (device.near, device.far)):
                both.link(link)
        return both

    def device(self, name: str) -> Device:
        """The device of that name or alias.

        Raises:
            ConfigError: nobody knows it; with the nearest names.
        """
        names = {squeezed(alias): d for d in self.devices.values() for alias in (d.name, *d.aliases)}
        if squeezed(name) not in names:
            raise ConfigError(unknown("device", name, self.devices) + " A device-file adds your own.")
        return names[squeezed(name)]

    def link(self, name: str) -> LinkSpec:
        """The link of that name.

        Raises:
            ConfigError: nobody knows it; with the nearest names.
        """
        names = {squeezed(n): spec for n, spec in self.links.items()}
        if squeezed(name) not in names:
            raise ConfigError(unknown("link", name, self.links) + " A device-file adds your own.")
        return names[squeezed(name)]


def _hardware(tables: Mapping[str, Any], where: str) -> Hardware:
    if not set(tables) <= {"devices", "links"}:
        other = next(name for name in tables if name not in ("devices", "links"))
        raise ConfigError(f"{where}: {unknown('table', other, ('devices', 'links'))}")
    return Hardware(
        {
            name: checked(Device, {**entry, "name": name}, place)
            for name, entry, place in _entries(tables, "devices", where)
        },
        {name: checked(LinkSpec, entry, place) for name, entry, place in _entries(tables, "links", where)},
    )


def _entries(tables: Mapping[str, Any], kind: str, where: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    entries = tables.get(kind, {})
    for name, entry in entries.items() if isinstance(entries, dict) else [("", entries)]:
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: {kind} must be tables [{kind}.NAME]; got {entry!r}.")
        yield name, entry, f"{where}: {kind}.{name}"


@cache
def _built_in() -> Hardware:
    path = files("ringspun.planner") / "hardware.toml"
    return _hardware(read(Path(str(path)), "hardware"), "hardware.toml")


@dataclass(frozen=True)
class Cluster:
    """Equal devices in nodes.

    Args:
        device: of every rank. count: devices. node: of a node. near: link in a node. far: between nodes.
        near_collective, far_collective: the same links under all-gathers and their like. apart: each neighbour in a
            node has a link of its own (tori); else all share a device's one.
    """

    device: Device
    count: int
    node: int
    near: Link
    far: Link
    near_collective: Link
    far_collective: Link
    apart: bool = False

    @cached_property
    def nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.count // self.node)

    def link(self, ranks: int, *, collective: bool = False) -> Link:
        """The slowest link among `ranks` neighbouring devices."""
        if ranks <= self.node:
            return self.near_collective if collective else self.near
        return self.far_collective if collective else self.far


def cluster(
    device: str,
    count: int,
    *,
    node: int | None = None,
    near: str | None = None,
    far: str | None = None,
    measured: Links | None = None,
    hardware: Hardware | None = None,
) -> Cluster:
    """`count` devices of a kind.

    Args:
        node: devices of a node; default: the device's. near, far: names of links; default: the device's.
        measured: a profile of `ringspun bench links` instead of both. hardware: where names are looked up.
    Raises:
        ConfigError: names that nobody knows, or a count that is none.
    """
    known = Hardware.load() if hardware is None else hardware
    found = known.device(device)
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(f"devices must be at least 1 and at most {MOST_DEVICES:,}; got {count:,}.")
    if node is not None and node < 1:
        raise ConfigError(f"node must be at least 1 device; got {node}.")
    if measured is not None:
        inside, outside = measured.near, measured.far or measured.near
        size = node or measured.node or max(found.node, count)
        return Cluster(found, count, size, inside, outside, inside, outside)
    size = found.node if node is None else node
    inside_spec = known.link(near or found.near)
    outside_spec = known.link(far or found.far or near or found.near)
    if count > size and found.far is None and far is None:
        raise ConfigError(f"far must name the link between nodes; got {count} devices in nodes of {size} and none.")
    return Cluster(
        found, count, size, inside_spec.link(), outside_spec.link(),
        inside_spec.link(collective=True), outside_spec.link(collective=True), inside_spec.links > 1,
    )  # fmt: skip
