"""A loop of one's own on Accelerate, on a ring in this process."""

from __future__ import annotations

import hf_accelerate
import hf_trainers as hf

from ringspun.integrations.accelerate import RingBatches, evaluate, on_ring, steps
from ringspun.torch import ContextParallel, Loopback


def test_losses_norms_gradients_and_evaluation_are_those_of_one_process() -> None:
    hf_accelerate.on_loopback(2).close_to(hf.alone(max_steps=hf_accelerate.STEPS))


def test_the_last_step_may_have_fewer_micro_batches() -> None:
    assert [len(group) for group in steps([{"x": i} for i in range(7)], 3)] == [3, 3, 1]


def test_evaluation_leaves_every_module_in_its_mode() -> None:
    """A frozen layer that was in evaluation mode stays there."""
    model, ring = on_ring(hf.build(layers=1)).train(), RingBatches(ContextParallel(Loopback(2)))
    model.model.layers[0].eval()
    evaluate(model, ring, ring.loader(hf.ROWS[:1], hf.collate, batch_size=1))
    assert model.training and not model.model.layers[0].training
