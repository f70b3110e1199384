"""What the literature measured and printed: the figures that the planner's answers are held against.

Printed values as printed; K is 1,024 tokens. `consistent` is False where a figure cannot be right beside its
neighbours. Sources are named once for each table.
"""

from __future__ import annotations

from dataclasses import dataclass

K = 1024


@dataclass(frozen=True)
class MaxContext:
    """A row of arXiv 2310.01889 table 3: longest context of end-to-end training, full gradient checkpointing, FSDP.

    Args:
        group: of hardware. model: its name. memory_gib: of one device as JAX sees it. shards: devices over which
            parameters are sharded. ring: devices of the ring. printed: K tokens of vanilla, memory-efficient,
            blockwise, ring.
        consistent: False for 32 A100: 4 times the blockwise length of 8, where sharding frees a fifth of the memory.
    GPUs compute in float32, TPUs in bfloat16 products of float32 tensors (its appendix B.1): memory is float32 alike.
    """

    group: str
    model: str
    memory_gib: float
    shards: int
    ring: int
    printed: tuple[int, int, int, int]
    consistent: bool = True


MAX_CONTEXT = (
    MaxContext("8x A100", "llama-3b", 80, 8, 8, (4, 32, 64, 512)),
    MaxContext("8x A100", "llama-7b", 80, 8, 8, (2, 16, 32, 256)),
    MaxContext("8x A100", "llama-13b", 80, 8, 8, (2, 4, 16, 128)),
    MaxContext("32x A100", "llama-7b", 80, 32, 32, (4, 64, 128, 4096), consistent=False),
    MaxContext("TPUv3-512", "llama-13b", 16, 512, 256, (1, 2, 8, 1024)),
    MaxContext("TPUv4-1024", "llama-3b", 32, 512, 512, (8, 16, 32, 16384)),
    MaxContext("TPUv4-1024", "llama-7b", 32, 512, 512, (4, 8, 16, 8192)),
    MaxContext("TPUv4-1024", "llama-30b", 32, 512, 512, (2, 4, 8, 2048)),
    MaxContext("TPUv5e-256", "llama-7b", 16, 256, 256, (2, 8, 16, 2048)),
)

FLOPS_RATIO_LENGTHS = tuple(n * 4 * K for n in (2, 4, 8, 16, 32, 64, 256, 3072, 32768))
"""8K to 100M: the multiples of 4K that arXiv 2310.01889 figure 5 labels 1M, 10M and 100M."""
FLOPS_RATIO = {
    4096: (1.1, 1.4, 2.0, 3.1, 5.4, 10.0, 37.4, 439.7, 4682.0),
    5120: (1.1, 1.4, 1.8, 2.8, 4.6, 8.4, 31.0, 362.3, 3855.9),  # the text's 5140 is a misprint
    8192: (1.1, 1.2, 1.5, 2.2, 3.4, 5.8, 20.6, 237.2, 2521.5),
    36864: (1.0, 1.1, 1.1, 1.3, 1.6, 2.1, 5.6, 56.8, 596.8),
}
"""By hidden size: FLOPs of training on the same tokens over those at 4K. arXiv 2310.01889 figure 5."""


@dataclass(frozen=True)
class LeastBlock:
    """A row of arXiv 2310.01889 table 2: the shortest block, and sequence of a device, that hides its transfer.

    Args:
        flops: peak. bytes_per_s: one way. block, seq_len: printed, in thousands of tokens.
        consistent: False where 24.5 is printed beside 149.5 = 6 x 24.9.
    """

    name: str
    flops: float
    bytes_per_s: float
    block: float
    seq_len: float
    consistent: bool = True


LEAST_BLOCKS = (
    LeastBlock("A100 NVLink", 312e12, 300e9, 1.0, 6.2),
    LeastBlock("A100 InfiniBand", 312e12, 12.5e9, 24.5, 149.5, consistent=False),
    LeastBlock("TPU v3", 123e12, 112e9, 1.1, 6.6),
    LeastBlock("TPU v4", 275e12, 268e9, 1.0, 6.2),
    LeastBlock("TPU v5e", 196e12, 186e9, 1.1, 6.3),
)


@dataclass(frozen=True)
class Mfu:
    """A bar group of arXiv 2310.01889 figure 4, read off the picture (percent, +-0.1).

    Args:
        hidden: of the model. short, long: tokens with blockwise and ring attention. blockwise, expected, actual:
            percent.
    """

    name: str
    hidden: int
    short: int
    long: int
    blockwise: float
    expected: float
    actual: float


MFU = (
    Mfu("7B, 8x A100", 4096, 32 * K, 256 * K, 33.0, 32.5, 32.3),
    Mfu("13B, 32x A100", 5120, 64 * K, 2048 * K, 32.3, 31.9, 31.1),
    Mfu("65B, TPUv4-1024", 8192, 8 * K, 1024 * K, 37.5, 37.2, 36.6),
)

STRIPED_MODELS = ("llama-1b", "llama-3b", "llama-7b")
STRIPED_A100 = {
    16: (1.46, 1.38, 1.34),
    32: (1.57, 1.51, 1.47),
    64: (1.65, 1.61, 1.58),
    96: (1.68, 1.65, 1.62),
    128: (1.70, 1.67, 1.65),
    192: (1.71, 1.69, 1.68),
    256: (1.72, 1.71, 1.70),
}
"""Theoretical speed-up by K tokens, rings of 4, attention in TF32 (weight 2). arXiv 2311.09431 table 3."""
STRIPED_TPU = {
    32: (1.54, 1.45, 1.40),
    128: (1.76, 1.71, 1.67),
    256: (1.81, 1.78, 1.76),
    384: (1.83, 1.81, 1.80),
    512: (1.84, 1.83, 1.81),
    640: (1.85, 1.84, 1.83),
    786: (1.85, 1.84),
}
"""The same on rings of 8 TPU v4. arXiv 2311.09431 table 4; no 7B in the last row."""


@dataclass(frozen=True)
class Prefill:
    """Time to first token of Llama 3 405B, everything new. arXiv 2411.01783 tables 6 and 7 and its text.

    Args:
        nodes: of 8 H100 each; tensor parallel inside, context parallel between. tokens: of the prompt. seconds:
            printed.
    """

    nodes: int
    tokens: int
    seconds: float


PREFILL = (
    Prefill(1, 8 * K, 1.740),
    Prefill(2, 8 * K, 0.999),
    Prefill(1, 32 * K, 7.658),
    Prefill(2, 32 * K, 4.015),
    Prefill(1, 128 * K, 42.010),
    Prefill(2, 128 * K, 21.042),
    Prefill(4, 128 * K, 10.950),
    Prefill(8, 128 * K, 5.85),
    Prefill(16, 128 * K, 3.8),
    Prefill(16, 1024 * K, 77.0),
)
PREFILL_PARAMETERS = 405e9
PREFILL_FLOPS = 502e12
"""FLOP/s of one H100 that the paper works out for 1M tokens on 16 nodes."""

PASS_KV_OR_Q = (
    (1.0, 1023, 899),
    (2.5, 1110, 1046),
    (3.25, 1299, 1280),
    (5, 1306, 1302),
    (10, 2081, 2205),
    (20, 3353, 3617),
    (30, 4629, 4923),
    (40, 5745, 6218),
    (50, 6845, 7368),
    (60, 7890, 8469),
    (70, 8697, 9667),
    (80, 10106, 10652),
    (90, 11136, 11572),
    (100, 11462, 12361),
)
"""Percent of 128,000 tokens that are new, and milliseconds to the first token when keys or queries travel, on 4 nodes.
arXiv 2411.01783 table 4."""


@dataclass(frozen=True)
class Alst:
    """A recipe's maximum length: H100 of 80 GB in nodes of 8, ZeRO-3, optimizer and activation checkpoints in 1.9 TB of
    each node's memory, tiled MLP and loss. snowflakedb/ArcticTraining, projects/sequence-parallelism; arXiv 2506.13996.

    Args:
        model: its name. devices: of the ring (Ulysses). tokens: printed. weights_offloaded: on one device.
        activations_offloaded: checkpoints in host memory. calibrates: a constant is fitted to this cell.
    """

    model: str
    devices: int
    tokens: float
    weights_offloaded: bool = False
    activations_offloaded: bool = True
    calibrates: str = ""


ALST = (
    Alst("llama-3-8b", 1, 0.5e6, weights_offloaded=True),
    Alst("llama-3-8b", 8, 3.8e6, calibrates="live_tensors"),
    Alst("llama-3-8b", 16, 8.0e6),
    Alst("llama-3-8b", 32, 15.5e6),
    Alst("llama-3-70b", 8, 0.2e6, activations_offloaded=False),
    Alst("llama-3-70b", 16, 1.2e6),
    Alst("llama-3-70b", 32, 4.0e6),
    Alst("llama-3-70b", 64, 10.0e6, calibrates="host_bytes_per_parameter"),
    Alst("qwen3-32b", 1, 0.23e6, weights_offloaded=True),
    Alst("qwen3-32b", 8, 1.55e6),
    Alst("qwen3-32b", 16, 4.0e6),
    Alst("qwen3-32b", 32, 7.0e6),
    Alst("qwen3-32b", 64, 15.0e6),
)
