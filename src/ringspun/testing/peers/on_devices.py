"""Peers in JAX: a ring of the devices of one process, which torch's clock, judge and tensors see as one rank.

Tensors are handed over without copies where that can be, and laid out on devices within the time that is measured: what
a call gets and gives is on one device, as with the peers in torch. What XLA allocates and sends torch does not see.
"""

from __future__ import annotations

import importlib.util
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringspun.core.layout import Contiguous, Layout
from ringspun.core.mask import Causal
from ringspun.testing.peers.base import Peer, Ready, dealt, only_plain, uneven
from ringspun.testing.timing import Work

MOST_DEVICES = 8
"""Devices of a process: a CPU makes them once, for rows of any ring size up to this."""
CHUNK = 256
"""Tokens that the published ring attends at a time, at most."""

Attend = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class OfDevices(Peer):
    """A peer that is a ring of devices; `layout` deals tokens to them."""

    def ranks(self, work: Work) -> int:
        return 1

    def remark(self, work: Work) -> str:
        return f"JAX, {work.ranks} devices of one process, which share its cores"

    def refuses(self, work: Work) -> str | None:
        if work.ranks > MOST_DEVICES:
            return f"at most {MOST_DEVICES} devices of a process; got {work.ranks}"
        return self.cannot(work)

    @abstractmethod
    def cannot(self, work: Work) -> str | None:
        """Why it cannot do this work on that many devices; None where it can."""

    @abstractmethod
    def on_mesh(self, work: Work, mesh: Any) -> Attend:
        """out of q, k, v ``[B, N, H, D]``, in the order of the mesh's devices."""

    def layout(self, work: Work) -> Layout:
        """How tokens are dealt to devices."""
        return Contiguous()

    def prepare(self, ring_rank: int, work: Work) -> Ready:
        from ringspun.testing.jax import make_devices, ring_mesh

        make_devices(MOST_DEVICES)
        mesh, layout = ring_mesh(work.ranks), self.layout(work)
        positions = np.concatenate([dealt(layout, work, rank) for rank in range(work.ranks)])
        return Ready(positions, as_torch(self.on_mesh(work, mesh), mesh), by_token=True, seen_by_torch=False)


@dataclass(frozen=True)
class JaxRing(OfDevices):
    """Ours."""

    name: str = "ringspun.jax, ring"
    module: str = "ringspun"
    distribution: str = "ringspun"

    @property
    def version(self) -> str | None:
        return super().version if importlib.util.find_spec("jax") else None

    @property
    def missing(self) -> str:
        return "jax is not installed: pip install 'ringspun[jax]'"

    def cannot(self, work: Work) -> str | None:
        return None

    def layout(self, work: Work) -> Layout:
        return work.layout

    def on_mesh(self, work: Work, mesh: Any) -> Attend:
        from jax.sharding import PartitionSpec

        from ringspun.jax import sharded_attention
        from ringspun.testing.jax import AXIS

        spec = PartitionSpec(None, AXIS)
        return partial(sharded_attention, mesh=mesh, spec=spec, layout=work.layout, mask=work.mask)


@dataclass(frozen=True)
class Published(OfDevices):
    """The ring of arXiv 2310.01889, restated: `jax_published`."""

    name: str = "published JAX ring, restated"
    module: str = "jax"
    distribution: str = "jax"

    def remark(self, work: Work) -> str:
        return f"{super().remark(work)}; its algorithm, written here"

    def cannot(self, work: Work) -> str | None:
        if not isinstance(work.mask, Causal):
            return "it is restated for the causal mask"
        if work.heads != work.kv_heads:
            return "it knows no grouped heads"
        return uneven(work, work.ranks)

    def on_mesh(self, work: Work, mesh: Any) -> Attend:
        from ringspun.testing.peers.jax_published import published

        rows = work.seq_len // work.ranks
        chunk = next(c for c in range(max(1, min(CHUNK, rows // 2)), 0, -1) if rows % c == 0)
        return _on_shards(mesh, lambda q, k, v: published(q, k, v, chunk))


@dataclass(frozen=True)
class Ejkernel(OfDevices):
    """ejkernel's ring on its XLA path, the one that runs on a CPU."""

    name: str = "ejkernel ring"
    module: str = "ejkernel"
    distribution: str = "ejkernel"

    def remark(self, work: Work) -> str:
        lost = "; under jax.vjp its causal mask is dropped, forward alone keeps it" * isinstance(work.mask, Causal)
        return super().remark(work) + lost

    def cannot(self, work: Work) -> str | None:
        if work.heads != work.kv_heads:
            return "its XLA ring knows no grouped heads"
        return only_plain(work) or uneven(work, work.ranks)

    def on_mesh(self, work: Work, mesh: Any) -> Attend:
        from ejkernel.kernels._xla.ring_attention import ring_attention

        from ringspun.testing.jax import AXIS

        ring = partial(ring_attention, axis_name=AXIS, causal=isinstance(work.mask, Causal))
        return _on_shards(mesh, lambda q, k, v: ring(q, k, v).astype(q.dtype), check=False)


def _on_shards(mesh: Any, attend: Attend, *, check: bool = True) -> Attend:
    import jax
    from jax.sharding import PartitionSpec

    from ringspun.testing.jax import AXIS

    spec = PartitionSpec(None, AXIS)
    mapped: Attend = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check)
    return mapped


def as_torch(attend: Attend, mesh: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of jax arrays as one of tensors, through which autograd goes; both directions are compiled."""
    import jax

    run, run_back = jax.jit(partial(jax.vjp, attend)), jax.jit(lambda pull, dout: pull(dout))

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            out, ctx.pull = run(*(_to_jax(x, mesh) for x in inputs))
            return _to_torch(out)

        @staticmethod
        def backward(ctx: Any, *incoming: Tensor) -> Any:
            return tuple(map(_to_torch, run_back(ctx.pull, _to_jax(incoming[0], mesh))))

    def of_tensors(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = Both.apply(q, k, v)  # type: ignore[no-untyped-call]
        return out

    return of_tensors


def _to_jax(x: Tensor, mesh: Any) -> Any:
    """On the mesh: cut along tokens, or whole on every device where that leaves a rest."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    spec = PartitionSpec(None, mesh.axis_names) if x.shape[1] % mesh.size == 0 else PartitionSpec()
    return jax.device_put(jax.dlpack.from_dlpack(x.detach().contiguous()), NamedSharding(mesh, spec))


def _to_torch(x: Any) -> Tensor:
    import jax

    whole = jax.block_until_ready(jax.device_put(x, jax.devices()[0]))
    return torch.utils.dlpack.from_dlpack(whole).clone()  # torch may write into what it owns
