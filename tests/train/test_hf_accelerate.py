"""A loop of one's own on Accelerate, on a ring in this process."""

from __future__ import annotations

import hf_accelerate
import hf_trainers as hf

from ringspun.integrations.accelerate import steps


def test_losses_norms_gradients_and_evaluation_are_those_of_one_process() -> None:
    hf_accelerate.on_loopback(2).close_to(hf.alone(max_steps=hf_accelerate.STEPS))


def test_the_last_step_may_have_fewer_micro_batches() -> None:
    assert [len(group) for group in steps([{"x": i} for i in range(7)], 3)] == [3, 3, 1]
