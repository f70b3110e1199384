"""A job ends cleanly: nothing of ours keeps a destroyed group alive, for gloo's threads would then abort the exit."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import sys, weakref
import torch
import torch.distributed as dist
from ringspun import Causal
from ringspun.torch import ContextParallel, ring_attention
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
group = weakref.ref(dist.group.WORLD)
context = ContextParallel(timeout_s=20)
plan = context.plan(12, Causal())
x = torch.randn(1, 1, plan.partition.local_tokens, 2, requires_grad=True)
plan.attention(x, x, x).sum().backward()
ring_attention(x, x, x).sum().backward()
plan.partition.gather(x, dim=2)
dist.destroy_process_group()
assert group() is None, "the group outlives its destruction"
try:
    plan.attention(x, x, x)
except Exception as error:
    assert type(error).__name__ == "RingBroken" and "group must be alive" in str(error), error
else:
    raise AssertionError("a destroyed group was used")
print("ended well")
"""


@pytest.mark.processes
@pytest.mark.timeout(90)
def test_the_group_dies_when_it_is_destroyed():
    from torch import distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(store.port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=80)
        assert rank.returncode == 0 and "ended well" in said, said
