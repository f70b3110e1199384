"""What the ranks of a pool do in tests of meshes with other axes beside a ring's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from on_ranks import PATIENCE_S
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ringspun import Causal
from ringspun.testing.strategies import Model, made, plain, tensor_parallel
from ringspun.torch import ContextParallel, reduce_gradients

MODEL = Model(seq_len=37, heads=8, kv_heads=4, head_size=4, hidden_size=16, dtype="float64")

Gradients = dict[str, Tensor]


def alone() -> tuple[float, Gradients]:
    """Loss and gradients in one process."""
    block, x = made(MODEL, plain)
    return _trained(block, block(x))


def with_tensor_parallel(rank: int, names: tuple[str, ...]) -> tuple[float, Gradients, list[int]]:
    """tp 2 x ring 2 x ulysses 2: this rank's share of the loss, whole gradients, and who shares its sequence."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    cp = ContextParallel(mesh[tuple(name for name in names if name != "tp")], timeout_s=PATIENCE_S)
    plan = cp.plan(MODEL.seq_len, Causal())
    block, x = made(MODEL, plan.attention)
    tensor_parallel(block, mesh["tp"], cut=False)
    loss, _ = _trained(block, block(plan.partition.shard(x, dim=1)))
    whole = {}
    for name, weight in block.named_parameters():
        grad = weight.grad
        if isinstance(grad, torch.distributed.tensor.DTensor):
            summed = cp.driver.all_reduce(grad.to_local())
            grad = torch.distributed.tensor.DTensor.from_local(summed, grad.device_mesh, grad.placements).full_tensor()
        else:
            grad = cp.driver.all_reduce(grad)
        whole[name] = grad
    return loss, whole, dist.get_process_group_ranks(cp.driver.group)


class Stage(nn.Module):
    """A block of a pipeline's stage, whose attention is its ring's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def two_stages_alone() -> tuple[float, Gradients]:
    """Two blocks, one after the other, in one process; two rows."""
    first, x = made(MODEL, plain)
    second, _ = made(MODEL, plain)
    both = nn.ModuleList([first, second])
    return _trained(both, second(first(torch.cat([x, 2 * x]))))


def in_a_pipeline(rank: int) -> tuple[float, Gradients, int]:
    """2 stages x ring 2, two microbatches: this rank's share of the loss (0 in the first stage), its gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ring"))
    stage_number = mesh.get_local_rank("pp")
    cp = ContextParallel(mesh["ring"], timeout_s=PATIENCE_S)
    plan = cp.plan(MODEL.seq_len, Causal())
    block, x = made(MODEL, plan.attention)
    local = plan.partition.shard(torch.cat([x, 2 * x]), dim=1)
    stage = PipelineStage(Stage(block), stage_number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: y.square().sum(), scale_grads=False)
    if stage_number == 0:
        schedule.step(local)
    else:
        schedule.step(target=local, losses=losses)
    reduce_gradients(block, cp)
    return float(sum(losses)), {name: w.grad for name, w in block.named_parameters()}, stage_number


def _trained(model: nn.Module, y: Tensor) -> tuple[float, Gradients]:
    loss = y.square().sum()
    loss.backward()
    return float(loss.detach()), {name: w.grad for name, w in model.named_parameters()}
