"""Every split of up to 8 ranks into rings and heads, against the float64 oracle: out, lse and all gradients.

python benchmarks/hybrids.py               # a markdown table of the largest differences; some minutes

(ring, ulysses) in {1, 2, 3, 4} x {1, 2, 3, 4} with at most 8 ranks, either inside, six kinds of heads, six layouts, a
full and a causal mask, packed documents and a window, 37 tokens (which nothing divides), two batch rows.
"""

from __future__ import annotations

import time
from itertools import product

import torch

from ringspun import Causal, Documents, Full, Window
from ringspun.testing.cases import LAYOUTS, Case, Shape, inputs, reference
from ringspun.testing.comparison import errors
from ringspun.testing.torch import run_ring
from ringspun.torch import ContextParallel, Loopback

TOKENS, BAR = 37, 1e-12
DEGREES = [(r, u) for r, u in product(range(1, 5), repeat=2) if r * u <= 8]
HEADS = [(8, 8), (8, 2), (6, 3), (7, 7), (28, 7), (8, 1)]
MASKS = [Full(), Causal(), Causal() & Documents([9, 20, 8]), Causal() & Window(11)]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    start, count, worst = time.monotonic(), 0, 0.0
    print("| ring x ulysses | cases | largest difference | of |\n|---|---|---|---|")
    for ring, ulysses in DEGREES:
        here, of, cases = 0.0, "", 0
        for (heads, kv_heads), layout, mask in product(HEADS, LAYOUTS, MASKS):
            case = Case(ring, TOKENS, mask, layout, shape=Shape(2, heads, kv_heads, 8, 5))
            given = inputs(case)
            ref = reference(case, given)
            for inner in ("ulysses", "ring") if min(ring, ulysses) > 1 else ("ulysses",):
                context = ContextParallel(Loopback(ring * ulysses), layout=layout, ulysses=ulysses, inner=inner)
                found = max(errors(run_ring(case, given, context), ref).worst.values())
                cases += 1
                if found > here:
                    here, of = found, f"{heads}:{kv_heads}, {layout}, {mask}, inner {inner}"
        print(f"| {ring} x {ulysses} | {cases} | {here:.1e} | {of} |", flush=True)
        count, worst = count + cases, max(worst, here)
    print(f"\n{count} cases in {time.monotonic() - start:.0f} s; largest difference {worst:.1e}, bar {BAR:.0e}")


if __name__ == "__main__":
    main()
