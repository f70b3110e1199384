"""Colours that people with any colour vision tell apart (Okabe and Ito, 2008), and what each stands for."""

from __future__ import annotations

from ringspun.pictures.figures.base import Kind

BLUE, ORANGE, GREEN, PURPLE, SKY, RED, YELLOW, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#8A8A8A",
)
KIND_COLOURS = {
    Kind.IDLE: GREY,
    Kind.FULL: BLUE,
    Kind.CAUSAL: ORANGE,
    Kind.ANTICAUSAL: GREEN,
    Kind.BAND: PURPLE,
    Kind.MIXED: SKY,
}
ITEM_COLOURS = {"inputs": BLUE, "out": SKY, "leased": ORANGE, "gradients": GREEN, "outputs": PURPLE, "kept": RED}
"""Of what a rank holds, by the names of `ringspun.core.accounting.Memory`."""
ITEM_WORDS = {
    "inputs": "q, k, v, dout",
    "out": "out, lse",
    "leased": "blocks and sums in flight",
    "gradients": "gradients so far",
    "outputs": "one kernel call",
    "kept": "blocks kept for backward",
}
COMPUTE, WAIT, MOVE = BLUE, GREY, ORANGE
