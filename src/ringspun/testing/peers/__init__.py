"""Attentions over ranks, of others and ours, side by side: `ringspun bench peers`.

    base.py        `Peer`: what each says of itself, and what is made ready on a rank
    own.py         this package: its ring, and its split of heads
    torch_ring.py  torch's private ring templates, both ways to rotate
    exchanges.py   DeepSpeed's Ulysses and yunchang's all-to-all, around torch's attention
    lucidrains.py  ring_attention_pytorch
    on_devices.py  in JAX, each a ring of one process's devices: ours, the published ring (jax_published.py), ejkernel's
    whole.py       torch's attention in one process
    absent.py      what cannot run here, by name
    rows.py        the table of what is compared
    on_ranks.py    what runs on ranks: judging, the first call (memory, bytes), the clock
    traffic.py     bytes sent, counted from collectives
    judging.py     errors against float64, and where wrong begins
    comparing.py   a row of the table over all peers
    record.py      all rows as a value and a file; report.py, picture.py: as tables, as a picture

No peer is needed by this package; `benchmarks/peers.txt` has their versions.
"""

from __future__ import annotations

from ringspun.testing.peers.absent import Absent
from ringspun.testing.peers.base import Peer
from ringspun.testing.peers.exchanges import DeepSpeed, Yunchang
from ringspun.testing.peers.lucidrains import Lucidrains
from ringspun.testing.peers.on_devices import Ejkernel, JaxRing, Published
from ringspun.testing.peers.own import Heads, Ring
from ringspun.testing.peers.torch_ring import TorchRing
from ringspun.testing.peers.whole import Alone

__all__ = ["PEERS", "Peer"]

PEERS: tuple[Peer, ...] = (
    Ring(),
    Heads(),
    TorchRing("torch ring, all-gather", rotate="allgather"),
    TorchRing("torch ring, all-to-all", rotate="alltoall"),
    DeepSpeed(),
    Yunchang(),
    Lucidrains(),
    Absent(
        "picotron ring", why="on no package index; its ring calls torch.cuda.synchronize, so a CPU needs it patched"
    ),
    Alone(),
    JaxRing(),
    Published(),
    Ejkernel(),
)
"""In the order of the tables; the first is what the others are held against."""
