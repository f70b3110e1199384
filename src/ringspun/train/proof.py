"""The proof at the end of a run: the ring against one process, on one batch, in float32.

Loss and every parameter's gradient, computed by all ranks on the ring, are compared with those of the same
model in one process, whose attention is PyTorch's own, document by document: no ring code is on that side.
The memory of attention (inputs, output and all gradients of one layer's forward and backward) is measured by
the profiler on both sides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ringspun import Causal
from ringspun.core.host import cores
from ringspun.errors import ProofError
from ringspun.torch.memory import peak_memory
from ringspun.train.checkpoints.shards import is_cut, whole_model
from ringspun.train.config import TrainConfig
from ringspun.train.data.text import PackedSequence
from ringspun.train.loop import Run, TrainState
from ringspun.train.losses.loss import IGNORED, token_loss
from ringspun.train.model import Shard, build_model, shard_loss
from ringspun.train.output import write_whole
from ringspun.train.parallel.gradient import FlatGradient
from ringspun.train.reporting.report import MIB

TOLERANCE = 1e-4  # largest difference over largest value, float32
_PLAIN = "ringspun_plain"


@dataclass(frozen=True)
class GradientProof:
    """One parameter's gradient on the ring against one process."""

    name: str
    largest: float  # largest value of one process's gradient
    difference: float  # largest difference

    @property
    def error(self) -> float:
        """Largest difference over largest value."""
        return self.difference / self.largest if self.largest else self.difference


@dataclass(frozen=True)
class Proof:
    """Everything that was compared and measured."""

    ranks: int
    seq_len: int
    documents: tuple[int, ...]
    loss_ring: float
    loss_one_process: float
    gradients: tuple[GradientProof, ...]
    attention_bytes_one_process: int
    attention_bytes_per_rank: tuple[int, ...]

    @property
    def loss_error(self) -> float:
        """Difference of the losses over the loss."""
        return abs(self.loss_ring - self.loss_one_process) / abs(self.loss_one_process)

    @property
    def error(self) -> float:
        """The worst of loss and gradients; a NaN is the worst of all."""
        errors = [self.loss_error, *(gradient.error for gradient in self.gradients)]
        return math.nan if any(map(math.isnan, errors)) else max(errors)

    @property
    def ok(self) -> bool:
        """Whether the worst error is within `TOLERANCE`."""
        return self.error <= TOLERANCE

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        rows = {g.name: {**asdict(g), "error": g.error} for g in self.gradients}
        summary = {"ok": self.ok, "error": self.error, "loss_error": self.loss_error, "tolerance": TOLERANCE}
        return {**summary, **asdict(self), "gradients": rows}


def prove(run: Run, state: TrainState) -> Proof | None:
    """Compares the ring with one process on the sequence that would come next; the weights are not changed.

    Collective. Rank 0 prints a table and writes `proof.json` into the output folder.

    Returns:
        The proof on rank 0; None on the others.

    Raises:
        ProofError: on rank 0, when the ring and one process differ by more than `TOLERANCE`.
    """
    packed = run.stream.at(state.position)
    on_ring = _whole_on_ring(run, state)
    gradient = FlatGradient(on_ring)
    # rings that read other sequences all read this one now
    share = shard_loss(on_ring, Shard.of(packed, run.context)) / run.config.data_size
    gradient.backward(share, last=True)
    gradient.sum(run.mesh)
    loss = math.fsum(row[0] for row in run.mesh.gather([float(share.detach())]))
    held = tuple(int(row[0]) for row in run.mesh.gather([_ring_attention_bytes(run, packed)]))
    proof = _compare(run, on_ring, packed, loss, held) if run.mesh.rank == 0 else None
    run.mesh.gather([0.0])  # the others wait here, so that a failure above is the whole job's
    if proof is not None:
        _publish(proof, run)
    return proof


def _whole_on_ring(run: Run, state: TrainState) -> nn.Module:
    """The model as the ring computes it, in float32 and with all weights: FSDP's copy holds pieces. Collective then."""
    if not is_cut(state.model):
        return state.model
    whole = build_model(run.config)
    whole.load_state_dict(whole_model(state.model))
    return whole


def _compare(run: Run, trained: nn.Module, packed: PackedSequence, loss: float, held: tuple[int, ...]) -> Proof:
    with _all_cores():
        model = _plain_model(run.config, trained)
        reference = _plain_loss(model, packed)
        reference.backward()  # type: ignore[no-untyped-call]
        needed = _one_process_attention_bytes(run.config)
    on_ring = [(name, p.grad) for name, p in trained.named_parameters()]
    pairs = zip(on_ring, model.parameters(), strict=True)
    return Proof(
        run.context.ring_size,
        len(packed.ids),
        tuple(packed.documents.lengths),
        loss,
        float(reference.detach()),
        tuple(_compare_gradient(name, cast(Tensor, ours), cast(Tensor, p.grad)) for (name, ours), p in pairs),
        needed,
        held,
    )


def _compare_gradient(name: str, ours: Tensor, reference: Tensor) -> GradientProof:
    return GradientProof(name, float(reference.abs().max()), float((ours - reference).abs().max()))


def _plain_model(config: TrainConfig, trained: nn.Module) -> nn.Module:
    """The same weights in an ordinary model, whose attention is PyTorch's, document by document."""
    from transformers import AttentionInterface

    AttentionInterface.register(_PLAIN, _plain_attention)
    model = build_model(config, on_ring=False)
    cast(Any, model).set_attn_implementation(_PLAIN)
    model.load_state_dict(trained.state_dict())
    return model


def _plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention within each document, one document at a time; in the form that Transformers calls."""
    lengths: list[int] = kwargs["document_lengths"]
    parts = zip(*(torch.split(x, lengths, dim=2) for x in (query, key, value)), strict=True)
    outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in parts]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _plain_loss(model: nn.Module, packed: PackedSequence) -> Tensor:
    """The mean loss over all targets; shift and positions are made here, not by the ring's partition."""
    lengths = _runs(packed)
    of = {name: torch.from_numpy(values) for name, values in packed.arrays.items()}
    ids, ends = of["input_ids"], torch.tensor(lengths).cumsum(0) - 1
    targets, weights = of["labels"].roll(-1), of.get("loss_weights", torch.ones(len(ids))).roll(-1)
    targets[ends] = IGNORED
    targets[sum(packed.documents.lengths) :] = IGNORED
    positions = torch.cat([torch.arange(length) for length in lengths])
    logits = cast(Any, model)(
        input_ids=ids[None], position_ids=positions[None], use_cache=False, document_lengths=lengths
    ).logits
    total = float(weights[targets != IGNORED].sum(dtype=torch.float64))
    return token_loss(logits, targets[None], total_targets=total, weights=weights[None])


def _runs(packed: PackedSequence) -> list[int]:
    """Lengths of documents, and of the padding behind them as of one more."""
    lengths = list(packed.documents.lengths)
    padding = len(packed.ids) - sum(lengths)
    return [*lengths, padding] if padding else lengths


def _ring_attention_bytes(run: Run, packed: PackedSequence) -> int:
    plan = run.context.partition(seq_len=len(packed.ids), documents=packed.documents).plan(Causal() & packed.documents)
    return _attention_bytes(run.config, plan.partition.local_tokens, plan.attention)


def _one_process_attention_bytes(config: TrainConfig) -> int:
    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return _attention_bytes(config, config.seq_len, causal)


def _attention_bytes(config: TrainConfig, tokens: int, attention: Callable[..., Tensor]) -> int:
    """Peak of one layer's attention over `tokens` rows, forward and backward, with inputs and gradients."""
    shape = config.model
    assert shape is not None  # a model from elsewhere is refused before any rank starts
    heads = (shape.heads, shape.kv_heads or shape.heads, shape.kv_heads or shape.heads)
    with peak_memory() as peak:
        q, k, v = (torch.ones(1, n, tokens, shape.head_size, requires_grad=True) for n in heads)
        out = attention(q, k, v)
        out.backward(torch.ones_like(out))  # type: ignore[no-untyped-call]
    return peak.bytes


@contextmanager
def _all_cores() -> Iterator[None]:
    """All cores for this process, while the other ranks wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _publish(proof: Proof, run: Run) -> None:
    path = run.config.output / "proof.json"
    console = Console()
    console.print(_gradient_table(proof))
    console.print(_memory_table(proof))
    try:
        write_whole(path, json.dumps(proof.as_dict(), indent=1).encode())
    finally:  # a full disk must not hide it
        if not proof.ok:
            raise ProofError(f"ring and one process must agree to {TOLERANCE:g}; the worst error is {proof.error:.2e}.")
    console.print(
        f"proof: ring of {proof.ranks} = one process, worst error {proof.error:.1e}; written to {path}",
        highlight=False,
        soft_wrap=True,
    )


def _gradient_table(proof: Proof) -> Table:
    table = Table(title=f"ring of {proof.ranks} against one process, {proof.seq_len:,} tokens, float32")
    table.add_column("gradient of", no_wrap=True)
    for title in ("largest", "difference", "relative"):
        table.add_column(title, justify="right")
    difference = abs(proof.loss_ring - proof.loss_one_process)
    table.add_row("loss", f"{proof.loss_one_process:.6f}", f"{difference:.1e}", f"{proof.loss_error:.1e}")
    table.add_section()
    for g in proof.gradients:
        name = g.name.removeprefix("model.").removesuffix(".weight")
        table.add_row(name, f"{g.largest:.2e}", f"{g.difference:.1e}", f"{g.error:.1e}")
    return table


def _memory_table(proof: Proof) -> Table:
    table = Table(title="peak memory of one layer's attention")
    table.add_column("held by")
    table.add_column("MiB", justify="right")
    table.add_column("of one process", justify="right")
    needed = proof.attention_bytes_one_process
    table.add_row("one process, whole sequence", f"{needed / MIB:.1f}", "100 %")
    for rank, held in enumerate(proof.attention_bytes_per_rank):
        table.add_row(f"rank {rank}", f"{held / MIB:.1f}", f"{100 * held / needed:.0f} %")
    return table
