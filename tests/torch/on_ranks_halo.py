"""What the ranks of a pool do in tests of halos."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from on_ranks import PATIENCE_S, caught
from torch import Tensor

from ringspun import Causal, Documents, DocumentZigzag, Striped, Zigzag
from ringspun.torch import ContextParallel

ASKED = {
    "zigzag": ({"layout": Zigzag()}, 23, Documents([9, 12])),
    "striped": ({"layout": Striped()}, 22, None),
    "documents": ({"layout": DocumentZigzag()}, 21, Documents([2, 13], [1, 5])),
    "hybrid": ({"layout": Zigzag(), "ulysses": 2}, 25, Documents([25])),
    "empty": ({"layout": Zigzag(), "ulysses": 2, "inner": "ring"}, 3, None),
}


def layers(x: Tensor, weight: Tensor, convolved: Any, shifted: Any, attended: Any) -> Tensor:
    """A convolution, attention and a shift."""
    x = x + convolved(x, weight)
    return x + attended(x) * shifted(x)


def on_ranks(rank: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """What the ring computes, gathered, and what one process does, of each document by itself."""
    found = {}
    for name, (asked, length, documents) in ASKED.items():
        torch.manual_seed(7)  # on every rank
        x, weight, upstream = (torch.randn(*shape).double() for shape in ((2, length, 4), (4, 9), (2, length, 4)))
        table = [(0, length)] if documents is None else documents.table().tolist()
        whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
        right = torch.zeros_like(x)
        for a, b in table:
            right = torch.cat([right[:, :a], _alone(whole[0][:, a:b], whole[1]), right[:, b:]], 1)
        wanted = right, *torch.autograd.grad(right, whole, upstream)

        context = ContextParallel(dist.group.WORLD, timeout_s=PATIENCE_S, **asked)
        part = context.partition(length, documents=documents)
        plan = part.plan(Causal() if documents is None else Causal() & documents)
        mine = part.shard(x, dim=1).requires_grad_(), weight.clone().requires_grad_()

        def attended(x: Tensor, plan: Any = plan) -> Tensor:
            heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
            return plan.attention(heads, heads, heads).transpose(1, 2).flatten(2)  # type: ignore[no-any-return]

        out = layers(*mine, part.causal_conv1d, lambda x, part=part: part.shift(x, 2), attended)
        dx, dw = torch.autograd.grad(out, mine, part.shard(upstream, dim=1))
        real = torch.zeros(length, dtype=torch.bool)
        for a, b in table:
            real[a:b] = True
        gathered = part.gather(out.detach(), dim=1)[:, real], part.gather(dx, dim=1)[:, real]
        whole_of = wanted[0].detach()[:, real], wanted[1][:, real], wanted[2]
        for what, a, b in zip(("out", "dx", "dw"), (*gathered, context.driver.all_reduce(dw)), whole_of, strict=True):
            found[f"{what} of {name}"] = a.numpy(), b.numpy()
    return found


def _alone(x: Tensor, weight: Tensor) -> Tensor:
    """The layers over one document in one process."""

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        wide = F.pad(x, (0, 0, weight.shape[1] - 1, 0)).transpose(1, 2)
        return F.conv1d(wide, weight[:, None], groups=weight.shape[0]).transpose(1, 2)

    def attended(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 2)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(2)

    return layers(x, weight, convolved, lambda x: F.pad(x, (0, 0, 2, 0))[:, : x.shape[1]], attended)


def in_trouble(rank: int, trouble: str, at: int) -> tuple[str, str, float]:
    """A call in which rank `at` alone asks for something else; on a group of its own. What came of it, and when (s)."""
    later = trouble == "tokens later"
    part = ContextParallel(dist.new_group(), layout=Striped(), timeout_s=2 if later else PATIENCE_S).partition(12)
    if later:
        part.halo(torch.zeros(1, 4, 2), before=1)
    odd, start = rank == at, time.monotonic()
    tokens, channels = 5 if odd and trouble.startswith("tokens") else 4, 3 if odd and trouble == "channels" else 2
    before = {"before": 2, "number": -1}.get(trouble, 1) if odd else 1
    return *caught(lambda: part.halo(torch.zeros(1, tokens, channels), before=before)), time.monotonic() - start
