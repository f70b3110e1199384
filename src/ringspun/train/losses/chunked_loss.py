"""The cross-entropy of a linear head in chunks of tokens, and of the vocabulary: logits of all tokens never exist.

    share = linear_token_loss(hidden, Head(lm_head.weight), targets, total_targets=count.total)
    each  = linear_cross_entropy(hidden, Head(embedding.weight, softcap=30.0), targets, reduction="none")

What must live is one chunk of logits, t x V, or t x v of a chunk of the vocabulary. Of a sum or mean the gradients are
made with it, in forward: three products as without chunks, no fourth. Of single losses, whose upstream gradients are
not known yet, backward makes the logits again. Gradients of weights are summed in float32 (float64) and rounded once.

Nothing is read of hidden states without a target. Source: Wijmans et al. 2024 (arXiv 2411.09009) and Hsu et al. 2024
(2410.10989) for GPUs. PyTorch's own `linear_cross_entropy` (2.13) knows neither soft caps nor smoothing nor z-loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ringspun.errors import DtypeError, NotDifferentiable, ShapeError
from ringspun.train.losses.loss import IGNORED, check_alike

Reduction = Literal["none", "sum", "mean"]


@dataclass(frozen=True)
class Head:
    """What makes logits ``[..., V]`` of hidden states: ``cap(scale * (hidden @ weight.T + bias))``.

    Args:
        weight: ``[V, C]``; tied or not. bias: ``[V]``.
        scale: of logits (Cohere's `logit_scale`; Granite's `logits_scaling` divides: 1 / it).
        softcap: logits are ``softcap * tanh(logits / softcap)`` (Gemma 2: 30).
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class Terms:
    """What is summed for each target besides its cross-entropy, and in which chunks.

    Args:
        label_smoothing: this share of each target is spread over all of the vocabulary, as in `F.cross_entropy`.
        z_loss: times the square of the log of the sum of exponentials (PaLM: 1e-4).
        chunk_tokens: tokens whose logits are alive at once.
        chunk_vocab: entries of the vocabulary whose logits are; default all. Fewer cost one more product.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk_tokens: int = 1024
    chunk_vocab: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("chunk_tokens", self.chunk_tokens), ("chunk_vocab", self.chunk_vocab)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ShapeError(f"{name} must be at least 1; got {size!r}.")
        if not 0 <= self.label_smoothing <= 1:
            raise ShapeError(f"label_smoothing must be from 0 to 1; got {self.label_smoothing}.")
        if not self.z_loss >= 0:
            raise ShapeError(f"z_loss must be at least 0; got {self.z_loss}.")


PLAIN = Terms()


def linear_token_loss(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    total_targets: float,
    weights: Tensor | None = None,
    terms: Terms = PLAIN,
) -> Tensor:
    """`token_loss` of the head's logits, this rank's share of the mean, without the logits.

    Args:
        hidden: ``[..., C]``, the last hidden states of this rank's tokens. head: what makes logits of them.
        targets, total_targets, weights: as for `token_loss`. terms: what else counts, and the chunks.
    """
    summed: Tensor = linear_cross_entropy(hidden, head, targets, weights=weights, reduction="sum", terms=terms)
    return summed / (total_targets or 1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def linear_cross_entropy(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = IGNORED,
    terms: Terms = PLAIN,
) -> Tensor:
    """The cross-entropy of the head's logits, which never exist for all tokens.

    Args:
        hidden: ``[..., C]``. Under autocast products are of its dtype, as a linear layer's.
        head: what makes logits of them.
        targets: ``[...]``, indices of the vocabulary, already shifted, or `ignore_index`.
        weights: ``[...]``, what each target counts; constants. Where there is no target they are not read.
        reduction: "none": ``[...]``, weighted, 0 where there is no target; "sum"; "mean": over the targets, or over the
            sum of their weights; 0 where there are none.
        ignore_index: the target that is none. terms: what else counts, and the chunks.
    Returns:
        float32 (float64 for float64), whatever the dtype of the hidden states.
    Raises:
        ShapeError: tensors that do not fit, a target outside of the vocabulary. DtypeError: targets that are no
            integers. NotDifferentiable: a second derivative is asked for.
    """
    check_alike(hidden, targets, weights)
    _check_head(hidden, head)
    if reduction not in ("none", "sum", "mean"):
        raise ShapeError(f"reduction must be none, sum or mean; got {reduction!r}.")
    labels = targets.reshape(-1).long()
    chosen = (labels != ignore_index).nonzero()[:, 0]
    labels = labels[chosen]
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(head.weight):
        raise ShapeError(
            f"targets must be from 0 to {len(head.weight) - 1}, or {ignore_index} for none; got "
            f"{int(labels.min())} to {int(labels.max())}."
        )
    wide = torch.promote_types(hidden.dtype, torch.float32)
    factors = torch.ones(1, dtype=wide, device=hidden.device).expand(len(labels))
    if weights is not None:
        factors = weights.reshape(-1)[chosen].detach().to(wide)
    one_by_one = reduction == "none"
    rows = hidden.reshape(-1, hidden.shape[-1])
    work = _Work(head.scale, head.softcap, terms, _product_dtype(rows, head.weight), wide)
    found: Tensor = _Chunked.apply(rows, head.weight, head.bias, work, chosen, labels, factors, one_by_one)  # type: ignore[no-untyped-call]
    if reduction == "mean":  # divided last: slopes over a total are too small for float16, and no scaler sees them
        total = factors.sum()
        return found / torch.where(total == 0, 1, total)
    if not one_by_one:
        return found
    return found.new_zeros(len(rows)).index_put((chosen,), found).view(targets.shape)


def _check_head(hidden: Tensor, head: Head) -> None:
    if head.weight.ndim != 2 or head.weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(f"head.weight must be [V, {hidden.shape[-1]}]; got shape {tuple(head.weight.shape)}.")
    if head.bias is not None and head.bias.shape != head.weight.shape[:1]:
        raise ShapeError(f"head.bias must be [{len(head.weight)}]; got shape {tuple(head.bias.shape)}.")
    if head.softcap is not None and not head.softcap > 0:
        raise ShapeError(f"head.softcap must be above 0, or None; got {head.softcap}.")
    if not hidden.is_floating_point() or not head.weight.is_floating_point():
        raise DtypeError(f"hidden and head.weight must be floating; got {hidden.dtype} and {head.weight.dtype}.")


def _product_dtype(rows: Tensor, weight: Tensor) -> torch.dtype:
    kind = rows.device.type
    if torch.is_autocast_enabled(kind) and rows.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(rows.dtype, weight.dtype)


@dataclass(frozen=True)
class _Work:
    """The arithmetic of one chunk.

    Args:
        dtype: of the factors of products. wide: of logits, losses and sums.
    """

    scale: float
    softcap: float | None
    terms: Terms
    dtype: torch.dtype
    wide: torch.dtype

    def vocab(self, weight: Tensor) -> Iterator[slice]:
        """The chunks of the vocabulary."""
        size = self.terms.chunk_vocab or len(weight)
        return (slice(at, min(at + size, len(weight))) for at in range(0, len(weight), size))

    def logits(self, h: Tensor, weight: Tensor, bias: Tensor | None, some: slice) -> Tensor:
        """Of one chunk, ``[t, v]``, wide."""
        x = (h @ weight[some].to(self.dtype).T).to(self.wide)
        if bias is not None:
            x += bias[some]
        if self.scale != 1:
            x *= self.scale
        if self.softcap is not None:
            x.div_(self.softcap).tanh_().mul_(self.softcap)
        return x

    def statistics(self, x: Tensor, labels: Tensor, some: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Of one chunk of logits, per token: log of the sum of exponentials, the target's logit, sum of logits."""
        here, inside = self._inside(labels, some)
        hit = x.gather(1, here[:, None])[:, 0].where(inside, 0)
        return x.logsumexp(dim=1), hit, x.sum(dim=1) if self.terms.label_smoothing else torch.zeros_like(hit)

    def losses(self, lse: Tensor, hit: Tensor, total: Tensor, size: int) -> Tensor:
        """Of each token, from sums over the whole vocabulary."""
        e = self.terms.label_smoothing
        return lse - (1 - e) * hit - (e / size) * total + self.terms.z_loss * lse.square()

    def slopes_(self, x: Tensor, lse: Tensor, labels: Tensor, factors: Tensor, some: slice, size: int) -> Tensor:
        """Gradient of the weighted losses by what the product gave; overwrites the logits."""
        bend = None if self.softcap is None else (x / self.softcap).square_().neg_().add_(1)
        d = x.sub_(lse[:, None]).exp_()
        if self.terms.z_loss:
            d *= (1 + 2 * self.terms.z_loss * lse)[:, None]
        e = self.terms.label_smoothing
        if e:
            d -= e / size
        here, inside = self._inside(labels, some)
        d.scatter_add_(1, here[:, None], (inside.to(d.dtype) * (e - 1))[:, None])
        d *= factors[:, None] if self.scale == 1 else self.scale * factors[:, None]
        return d if bend is None else d.mul_(bend)

    def _inside(self, labels: Tensor, some: slice) -> tuple[Tensor, Tensor]:
        inside = (labels >= some.start) & (labels < some.stop)
        return (labels - some.start).where(inside, 0), inside


class _Sums:
    """Gradients under way, for those of hidden states, weight and bias that need them."""

    def __init__(self, rows: Tensor, weight: Tensor, bias: Tensor | None, needs: tuple[bool, ...], work: _Work) -> None:
        self.work = work
        self.rows = torch.zeros_like(rows) if needs[0] else None
        self.weight = torch.zeros_like(weight, dtype=work.wide) if needs[1] else None
        self.bias = torch.zeros_like(bias, dtype=work.wide) if bias is not None and needs[2] else None

    def add(self, d: Tensor, h: Tensor, weight: Tensor, some: slice) -> Tensor | None:
        """One chunk's; returns its part of the gradient of the hidden states."""
        if self.bias is not None:
            self.bias[some] += d.sum(dim=0)
        d = d.to(self.work.dtype)
        if self.weight is not None:
            if d.dtype == self.work.wide:
                self.weight[some].addmm_(d.T, h)
            else:
                self.weight[some] += d.T @ h
        return None if self.rows is None else d @ weight[some].to(self.work.dtype)


class _Chunked(torch.autograd.Function):
    """Losses of the chosen rows, one by one or their weighted sum."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, work: _Work,
        chosen: Tensor, labels: Tensor, factors: Tensor, one_by_one: bool,
    ) -> Tensor:  # fmt: skip
        needs = ctx.needs_input_grad[:3]
        ctx.work, ctx.one_by_one, ctx.sums = work, one_by_one, None
        at_once = any(needs) and not one_by_one
        sums = _Sums(rows, weight, bias, needs if at_once else (False,) * 3, work)
        losses, lses = (torch.empty_like(labels, dtype=work.wide) for _ in range(2))
        with torch.autocast(rows.device.type, enabled=False):
            for part in _parts(labels, work.terms.chunk_tokens):
                index, label, factor = chosen[part], labels[part], factors[part]
                h = rows[index].to(work.dtype)
                lses[part], losses[part], logits = _of_chunk(work, h, weight, bias, label)
                if at_once:
                    _gradients(work, sums, h, weight, bias, label, factor, lses[part], index, logits)
                del logits
        ctx.save_for_backward(rows, weight, bias, chosen, labels, factors, lses)
        ctx.sums = sums if at_once else None
        return losses * factors if one_by_one else (losses * factors).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise NotDifferentiable(
                "second derivatives of linear_cross_entropy must not be asked for; they are not defined. Use "
                "create_graph=False."
            )
        rows, weight, bias, chosen, labels, factors, lses = ctx.saved_tensors
        sums, ctx.sums = ctx.sums, None
        if sums is not None:
            for total in (sums.rows, sums.weight, sums.bias):
                if total is not None:
                    total.mul_(grad)
        else:  # single losses; or a second backward of a sum
            sums, factors = _Sums(rows, weight, bias, ctx.needs_input_grad[:3], ctx.work), factors * grad
            with torch.autocast(rows.device.type, enabled=False):
                for part in _parts(labels, ctx.work.terms.chunk_tokens):
                    index, h = chosen[part], rows[chosen[part]].to(ctx.work.dtype)
                    _gradients(ctx.work, sums, h, weight, bias, labels[part], factors[part], lses[part], index, None)
        narrow = (None if x is None else x.to(y.dtype) for x, y in ((sums.weight, weight), (sums.bias, bias)))
        return sums.rows, *narrow, None, None, None, None, None


def _parts(labels: Tensor, size: int) -> Iterator[slice]:
    return (slice(at, at + size) for at in range(0, len(labels), size))


def _of_chunk(
    work: _Work, h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sums and losses of some tokens; and their logits, where the vocabulary is in one chunk."""
    lse = hit = total = x = None
    for some in work.vocab(weight):
        del x
        x = work.logits(h, weight, bias, some)
        one, two, three = work.statistics(x, labels, some)
        lse = one if lse is None else torch.logaddexp(lse, one)
        hit, total = two if hit is None else hit + two, three if total is None else total + three
    assert lse is not None and hit is not None and total is not None
    return lse, work.losses(lse, hit, total, len(weight)), x if work.terms.chunk_vocab is None else None


def _gradients(
    work: _Work, sums: _Sums, h: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
    factors: Tensor, lse: Tensor, index: Tensor, logits: Tensor | None,
) -> None:  # fmt: skip
    """Adds those of some tokens, from their logits or with new ones."""
    of_rows: Tensor | None = None
    for some in work.vocab(weight):
        x = work.logits(h, weight, bias, some) if logits is None else logits
        part = sums.add(work.slopes_(x, lse, labels, factors, some, len(weight)), h, weight, some)
        if part is not None:
            of_rows = part if of_rows is None else of_rows.to(work.wide).add_(part)
    if sums.rows is not None and of_rows is not None:
        sums.rows[index] = of_rows.to(sums.rows.dtype)
