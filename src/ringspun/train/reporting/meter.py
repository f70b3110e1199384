"""What a step of a run took: its time and tokens, its share of the ranks' peak (MFU), and how long ranks waited.

MFU (model FLOPs utilization) is that of PaLM (Chowdhery et al., arXiv 2204.02311, section 4.1): the FLOPs that the
model needs for the step's tokens, over what its devices could have done meanwhile. Three times the forward pass; what
is computed again does not count. Unlike there, attention's pairs are those that the mask allows, documents apart, and
not S^2.

It is told only where both are known. The FLOPs: of models whose Hugging Face configuration the planner understands, and
whose weights it counts exactly. The peak: as given, or on a CPU the best of a few large matrix products.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ringspun.errors import ConfigError
from ringspun.planner.flops import packed_flops
from ringspun.planner.models import Model, from_values
from ringspun.torch.gemm import gemm_seconds
from ringspun.train.data.text import PackedSequence
from ringspun.train.parallel.ranks import Mesh

if TYPE_CHECKING:
    from ringspun.torch import ContextParallel

_SIZE, _PRODUCTS = 1024, 3


class StepMeter:
    """Measures steps, one after another: `begin`, the step, `end`. Making it is collective.

    Args:
        model: that is trained, bare.
        context, mesh: whose waits are counted: for the ring's messages, and for sums and checks of all ranks. Those
            inside of DDP and FSDP2 are PyTorch's own and are not seen.
        dtype: of matrix products, "float32" or "bfloat16".
        peak_flops: FLOP/s of a rank at its peak; None: measured on a CPU, elsewhere unknown.
    """

    def __init__(
        self,
        model: nn.Module,
        context: ContextParallel,
        mesh: Mesh,
        *,
        dtype: str = "float32",
        peak_flops: float | None = None,
    ) -> None:
        self._mesh, self._waits = mesh, (context.driver.counts.waits, mesh.waits)
        self._model, self._measured = planned(model), False
        if peak_flops is None and self._model is not None and next(model.parameters()).device.type == "cpu":
            self._measured, peak_flops = True, measured_peak(getattr(torch, dtype), torch.get_num_threads())
        self._peak = sum(row[0] for row in mesh.gather([peak_flops or 0.0]))
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._began, self._waited = time.perf_counter(), self._waits_s

    def end(self, batch: Sequence[PackedSequence]) -> dict[str, Any]:
        """It has ended: the fields of its `StepRecord` that are measured. Collective.

        Args:
            batch: all sequences of the step, other ranks' too.
        """
        seconds = time.perf_counter() - self._began
        tokens = sum(len(packed.ids) for packed in batch)
        told = {"seconds": seconds, "tokens_per_s": tokens / seconds, "seq_len": len(batch[0].ids)}
        if self._model is not None and self._peak:
            flops = sum(packed_flops(self._model, packed.documents.lengths, len(packed.ids)) for packed in batch)
            mfu = flops / seconds / self._peak
            if mfu <= 1 or not self._measured:  # beyond 1 the peak was measured while others had the cores: not known
                told["mfu"] = mfu
        if self._mesh.size > 1:
            shares = [row[0] for row in self._mesh.gather([(self._waits_s - self._waited) / seconds])]
            told |= {"waiting": sum(shares) / len(shares), "waiting_most": max(shares)}
        return told

    @property
    def _waits_s(self) -> float:
        return sum(waits.seconds for waits in self._waits)


def planned(model: nn.Module) -> Model | None:
    """The planner's model of a module with a Hugging Face configuration.

    None: there is no such configuration, or it is of a kind that is not planned for, or the module has other weights
    than it says, or some that are not trained. What its steps compute would be a guess.
    """
    as_values = getattr(getattr(model, "config", None), "to_dict", None)
    parameters = list(model.parameters())
    if as_values is None or not all(parameter.requires_grad for parameter in parameters):
        return None
    try:
        found = from_values(as_values(), "config")
    except ConfigError:
        return None
    return found if found.parameters == sum(parameter.numel() for parameter in parameters) else None


@cache
def measured_peak(dtype: torch.dtype, threads: int) -> float:
    """FLOP/s that this process reaches with a large matrix product: the best of a few.

    Args:
        threads: that it has now; the rate with as many is measured once in a process.
    """
    return 2 * _SIZE**3 / min(gemm_seconds(dtype, _PRODUCTS, _SIZE))
