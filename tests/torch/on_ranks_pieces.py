"""What the ranks of a pool do for the tests of blocks smaller than a shard; they import this file."""

from __future__ import annotations

import numpy as np
from torch import distributed as dist

from ringspun.core.pace import Choice
from ringspun.testing.cases import Case, inputs
from ringspun.testing.torch import plan_of, run_ring
from ringspun.torch import ContextParallel
from ringspun.torch.pieces import CALLS, pieces_of

PATIENCE_S = 20.0


def choose_together(
    rank: int, case: Case, given: list[int]
) -> tuple[list[int], list[Choice], list[dict[str, np.ndarray]]]:
    """Plans by a choice that is set to each number `given`; what each was, what was chosen by its calls, and the case
    by all of them, once the last was made."""
    context = ContextParallel(dist.group.WORLD, layout=case.layout, timeout_s=PATIENCE_S, block_size="auto")
    assert context.pieces is not None
    plans, chosen = [], []
    for pieces in given:
        context.pieces.choice = Choice(pieces)
        plans.append(plan_of(case, context))
        for _ in range(CALLS):
            run_ring(case, inputs(case), context, plan=plans[-1])
        plan_of(case, context)
        chosen.append(context.pieces.choice)
    found = [run_ring(case, inputs(case), context, plan=plan) for plan in plans]
    return [pieces_of(plan.schedule) for plan in plans], chosen, found
