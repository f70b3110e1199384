"""Compiles the Triton kernels, with the blocks that they take, for cards that need not be there: a markdown table.

python benchmarks/triton_compile.py            # needs: pip install triton; TRITON_INTERPRET must not be set

Registers per thread, bytes spilled to the stack per thread, shared memory of a program, products on tensor cores in the
code. It says that a kernel fits and how well, not how fast it is. Exits 1 where one does not fit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ringspun.torch.kernels import triton_kernels
from ringspun.torch.kernels.triton import Launch, launches, padded

CARDS = {80: 163, 89: 99, 90: 227, 100: 227}
"""Shared memory of a program (KiB), by compute capability: A100, Ada, Hopper, Blackwell."""
HEAD_SIZES = (64, 128, 256)
STEP = ("i32",) * 3
PRODUCTS = r"wgmma\.mma_async|mma\.sync|tcgen05\.mma"


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of one launch."""

    registers: int
    stack_bytes: int
    shared_bytes: int
    products: int


def signature(kernel: str, dtype: str) -> dict[str, Any]:
    """Types of the arguments of a kernel."""
    x, wide, ints = f"*{dtype}", "*fp32", "*i32"
    operands = {name: kind for n in "qkv" for name, kind in ((n, x), (f"{n}_step", STEP))}
    lists = dict.fromkeys(("tiles", "blocks", "offsets", "order"), ints) | {"tokens": "i32"}
    numbers = dict.fromkeys(("inner", "outer", "scale"), "fp32")
    if kernel == "forward":
        return operands | dict.fromkeys(("acc", "m", "l"), wide) | {"state_step": STEP[:2]} | lists | numbers
    known = {"dout": x} | dict.fromkeys(("lse", "delta", "dq", "dk", "dv"), wide)
    steps = {f"{name}_step": STEP for name in ("dout", "lse", "delta")}
    return operands | known | steps | {"hull_first": "i32", "hull_last": "i32"} | lists | numbers


def compiled(kernel: str, dtype: str, head_size: int, cut: Launch, capability: int, group: int = 4) -> Compiled:
    """One launch: GQA of `group`, causal or any other mask, no softcap; addresses and strides at multiples of 16."""
    code, wide = getattr(triton_kernels, kernel), padded(head_size)
    sizes = {"D": head_size, "E": head_size, "WIDE_D": wide, "WIDE_E": wide, "ROWS": cut.rows, "KEYS": cut.keys}
    fixed = sizes | {"GROUP": group, "SOFTCAP": False, "SIGN": 1}
    names, types, aligned = code.arg_names, signature(kernel, dtype), [["tt.divisibility", 16]]
    places = [(n,) for n, name in enumerate(names) if isinstance(types.get(name), str) and types[name][0] == "*"]
    places += [(names.index(f"{name}_step"), i) for name in "qkv" for i in range(3)]
    source = ASTSource(
        code,
        {name: types.get(name, "constexpr") for name in names},
        constexprs={(n,): fixed[name] for n, name in enumerate(names) if name in fixed},
        attrs=dict.fromkeys(places, aligned),
    )
    options = {"num_warps": cut.warps, "num_stages": cut.stages, "enable_fp_fusion": True}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Compiled(*used(found.asm["cubin"]), found.metadata.shared, len(re.findall(PRODUCTS, found.asm["ptx"])))


def used(binary: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        told = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(told, capture_output=True, text=True, check=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", said)[0]
    return int(registers), int(stack)


def rows() -> Iterator[tuple[str, bool]]:
    """Lines of the table, and whether each fits its card."""
    for capability, kib in CARDS.items():
        for dtype, itemsize in (("bf16", 2), ("fp32", 4)):
            for head_size in HEAD_SIZES:
                if itemsize == 4 and capability != 80:  # the same blocks everywhere
                    continue
                cut = launches(head_size, itemsize, kib << 10)
                for kernel, one in (
                    ("forward", cut.forward), ("backward_of_queries", cut.queries), ("backward_of_keys", cut.keys),
                ):  # fmt: skip
                    found = compiled(kernel, dtype, head_size, one, capability)
                    blocks = f"{one.rows} x {one.keys}, {one.warps} warps, {one.stages} stages"
                    numbers = f"{found.registers} | {found.stack_bytes} | {found.shared_bytes / 1024:.0f} of {kib}"
                    where = f"{capability / 10} | {dtype} | {head_size}"
                    yield f"| {where} | {kernel} | {blocks} | {numbers} | {found.products} |", fits(found, kib)


def fits(found: Compiled, kib: int) -> bool:
    return found.shared_bytes <= kib << 10


def main() -> int:
    print(f"triton {triton.__version__}\n")
    print("| capability | dtype | D | kernel | rows x keys | registers | spilled, bytes | shared, KiB | products |")
    print("|---|---|---|---|---|---|---|---|---|")
    good = True
    for line, all_fits in rows():
        print(line, flush=True)
        good &= all_fits
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
