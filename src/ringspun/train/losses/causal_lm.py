"""The chunked loss of any Hugging Face causal language model, without editing it and without its logits.

    loss  = CausalLMLoss(model)                                        # looks at the model once; before `prepare`
    share = loss(batch["shift_labels"], total_targets=count.total, input_ids=batch["input_ids"], ringspun_plan=plan)

The model runs as it is. A hook at its head takes the hidden states, computes the loss of them there, where wrappers
hold the head's weight whole, and lets the head have one token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ringspun.errors import UnsupportedByRing
from ringspun.train.losses.chunked_loss import PLAIN, Head, Terms, linear_cross_entropy, linear_token_loss

_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier_scale")
"""What configs call a factor, or a divisor, of the logits."""


class CausalLMLoss(nn.Module):
    """This rank's share of the mean loss of a causal language model; a module, to be wrapped for DDP.

        loss = wrap(CausalLMLoss(model), mesh, shard="ddp")    # not the model: DDP acts where it is called

    Args:
        model: has an output embedding that is a linear layer, whose logits may be scaled and capped. Give it before
            `prepare`, before `fully_shard`: it is run over two tokens.
        terms: label smoothing, z-loss, chunks.
    Raises:
        UnsupportedByRing: it makes its logits otherwise.
    """

    def __init__(self, model: nn.Module, *, terms: Terms = PLAIN) -> None:
        super().__init__()
        self.model, self.terms = model, terms
        find: Any = getattr(model, "get_output_embeddings", None)
        found = find() if find is not None else None
        if type(found) is not nn.Linear:
            raise UnsupportedByRing(
                f"model must have a linear output embedding; {type(model).__name__} has {type(found).__name__}. Use "
                "chunked_token_loss with a head of your own."
            )
        self._head: tuple[nn.Linear] = (found,)  # no child: its weight has its name in the model
        self.scale, self.softcap = _look(model, found)

    def forward(self, targets: Tensor, *, total_targets: float, weights: Tensor | None = None, **inputs: Any) -> Tensor:
        """This rank's share: a scalar. The sum over the ranks is the mean loss.

        Args:
            targets, total_targets, weights: as for `token_loss`.
            inputs: keywords of the model's call; no labels.
        Raises:
            UnsupportedByRing: labels, or a model that calls its head another number of times than once.
        """

        def share(hidden: Tensor, head: Head) -> Tensor:
            return linear_token_loss(
                hidden, head, targets, total_targets=total_targets, weights=weights, terms=self.terms
            )

        return self._at_head(share, inputs)

    def token_losses(self, targets: Tensor, **inputs: Any) -> Tensor:
        """The loss of each of this rank's tokens, 0 where there is no target: a tensor as `targets`.

        Args and Raises: as `forward`.
        """

        def each(hidden: Tensor, head: Head) -> Tensor:
            found: Tensor = linear_cross_entropy(hidden, head, targets, reduction="none", terms=self.terms)
            return found

        return self._at_head(each, inputs)

    def _at_head(self, compute: Callable[[Tensor, Head], Tensor], inputs: dict[str, Any]) -> Tensor:
        """What is computed of the hidden states that come to the model's head."""
        if inputs.get("labels") is not None:
            raise UnsupportedByRing("labels must be None; give targets, already shifted: shard_batch's shift_labels.")
        found: list[Tensor] = []

        def at_head(module: nn.Linear, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            found.append(compute(args[0], Head(module.weight, module.bias, self.scale, self.softcap)))
            return (args[0][..., :1, :].detach(), *args[1:])

        handle = self._head[0].register_forward_pre_hook(at_head)
        try:
            self.model(**inputs)
        finally:
            handle.remove()
        if len(found) != 1:
            raise UnsupportedByRing(
                f"model must call its head once; {type(self.model).__name__} did {len(found)} times."
            )
        return found[0]


@torch.no_grad()
def _look(model: nn.Module, head: nn.Linear) -> tuple[float, float | None]:
    """Scale and cap of the logits, as the config names them and the model shows them."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if callable(getattr(config, "get_text_config", None)) else config
    raw: list[Tensor] = []
    handle = head.register_forward_hook(lambda module, args, out: raw.append(out))
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(input_ids=torch.tensor([[0, 1]], device=head.weight.device)).logits
    finally:
        handle.remove()
        for module, was in training:
            module.training = was
    cap = getattr(config, "final_logit_softcapping", None)
    named = [float(x) for name in _SCALES if isinstance(x := getattr(config, name, None), int | float) and x]
    for scale in (1.0, *named, *(1 / x for x in named)):
        for softcap in {None, cap}:
            x = raw[0].double() * scale if raw else torch.empty(0)
            x = x if softcap is None else softcap * torch.tanh(x / softcap)
            near = 4 * torch.finfo(logits.dtype).eps * float(x.abs().max()) if len(raw) == 1 else 0.0
            if len(raw) == 1 and x.shape == logits.shape and torch.allclose(x, logits.double(), rtol=1e-2, atol=near):
                return scale, softcap
    raise UnsupportedByRing(
        f"model must make logits by its head, a scale and a cap alone; {type(model).__name__} makes others. Use "
        "chunked_token_loss with a head of your own."
    )
