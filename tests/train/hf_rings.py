"""Small Hugging Face models of six families, in one process and on a ring. Started processes import this file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringspun import Causal, Documents, Layout, Zigzag
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch import ContextParallel, Loopback, Partition
from ringspun.train.losses.loss import IGNORED, token_loss

S, VOCAB, LAYERS = 29, 61, 4
ALTERNATE = ["sliding_attention", "full_attention"] * (LAYERS // 2)
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt_oss")
SLIDING = FAMILIES[1:]


def build(family: str, *, window: int = 5, **changes: Any) -> Any:
    """Four layers of width 32 in float64, the same weights each time; scores far from uniform.

    Args:
        family: one of `FAMILIES`. window: of its sliding layers, where it has some (tokens).
    """
    import transformers as hf

    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "pad_token_id": None,
        "sliding_window": window,
        "layer_types": ALTERNATE,
    }
    config, model = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "gemma2": (hf.Gemma2Config, hf.Gemma2ForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
        "gpt_oss": (hf.GptOssConfig, hf.GptOssForCausalLM),
    }[family]
    own: dict[str, Any] = {
        "qwen3": {"use_sliding_window": True},
        "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 11},  # low enough to bend most scores
        "gemma3": {"query_pre_attn_scalar": 11},
        "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2},
    }.get(family, {})
    for name in {"llama": ("sliding_window", "layer_types"), "mistral": ("layer_types",)}.get(family, ()):
        del values[name]
    torch.manual_seed(1)
    made = model(config(**values | own | changes, attn_implementation="eager", experts_implementation="eager"))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim == 1:  # norms begin at 1 or 0, sinks and biases near 0
                parameter.add_(torch.randn_like(parameter) * (1.0 if "sinks" in name else 0.2))
            else:
                parameter.mul_(6.0)
    return made.double()


class Wide(TorchFunctionMode):
    """Transformers goes to float32 in softmax and norms whatever the dtype; here float64 stays float64.

    Else the gradient of a norm is a float32 sum over tokens, and its last bits depend on their order.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        x = args[0] if args else None
        if isinstance(x, Tensor) and x.dtype == torch.float64 and x.requires_grad:  # rotations stay as they are
            if function is Tensor.float or (function is Tensor.to and torch.float32 in args):
                return x
            if function is nn.functional.softmax:
                kwargs.pop("dtype", None)
        return function(*args, **kwargs)


@dataclass
class Result:
    """What is compared: all logits ``[B, S, V]``, the mean loss, the gradient of every parameter."""

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]

    def worst(self, expected: Result, real: Tensor | None = None) -> dict[str, float]:
        """Largest differences relative to the largest value.

        Args:
            real: ``[B, S]``, the tokens whose logits count.
        """
        assert self.gradients.keys() == expected.gradients.keys()
        real = torch.ones(self.logits.shape[:2], dtype=torch.bool) if real is None else real
        found = {"logits": (self.logits[real], expected.logits[real]), "loss": (self.loss, expected.loss)}
        found |= {name: (x, expected.gradients[name]) for name, x in self.gradients.items()}
        return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in found.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of every parameter; all must have one."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(x is not None for x in found.values()), [name for name, x in found.items() if x is None]
    return {name: x.clone() for name, x in found.items() if x is not None}


def token_ids(rows: int = 1, seq_len: int = S) -> Tensor:
    return torch.randint(0, VOCAB, (rows, seq_len), generator=torch.manual_seed(0))


def targets_of(labels: Tensor) -> Tensor:
    """The next label of every token; none for the last."""
    return torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORED)], dim=1)


def alone(model: Any, ids: Tensor, lengths: list[int]) -> Result:
    """One process, each document by itself, with the model's own masks and positions."""
    count = sum(n - 1 for n in lengths)
    logits, loss = [], torch.zeros((), dtype=torch.float64)
    with Wide():
        for piece in ids.split(lengths, dim=1):
            logits.append(model(input_ids=piece, use_cache=False).logits)
            loss = loss + token_loss(logits[-1], targets_of(piece), total_targets=count)
    loss.backward()
    return Result(torch.cat(logits, dim=1).detach(), loss.detach(), gradients(model))


def padded(model: Any, ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Result:
    """One process, rows with padding, as one calls a Transformers model."""
    targets = targets_of(labels)
    with Wide():
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits
    loss = token_loss(logits, targets, total_targets=int((targets != IGNORED).sum()))
    loss.backward()
    return Result(logits.detach(), loss.detach(), gradients(model))


def on_ring(part: Partition, model: Any, ids: Tensor, labels: Tensor, mask: Any) -> Result:
    """The same on a ring: each rank its shard; loss and gradients summed, logits gathered."""
    prepare(model)
    local = part.shard_batch({"input_ids": ids, "labels": labels})
    count, targets = local["num_items_in_batch"], local["shift_labels"]
    with Wide():
        logits = model(input_ids=local["input_ids"], ringspun_plan=plans(model, part, mask)).logits
    loss = token_loss(logits, targets, total_targets=count)
    loss.backward()
    summed = part.context.driver.all_reduce  # does nothing on a loopback, which holds all shards
    found = {name: summed(x) for name, x in gradients(model).items()}
    return Result(part.gather(logits.detach(), dim=1), summed(loss.detach()), found)


def packed_on_ring(part: Partition, family: str, window: int) -> Result:
    """A model over one packed sequence."""
    mask = Causal() if part.documents is None else Causal() & part.documents
    return on_ring(part, build(family, window=window), token_ids(), token_ids(), mask)


def packed_on_processes(ring_rank: int, family: str, window: int, documents: Documents | None) -> Result:
    """`packed_on_ring` in a process of a gloo ring."""
    torch.set_num_threads(1)
    return packed_on_ring(ContextParallel().partition(S, documents=documents), family, window)


def rotated(rope_parameters: dict[str, Any], seq_len: int, **changes: Any) -> Any:
    """A Llama whose frequencies depend on the length beyond 8 tokens, fixed for one."""
    from ringspun.train.rope.fixed_rope import fix_rope

    return fix_rope(
        build("llama", rope_parameters=rope_parameters, max_position_embeddings=8, **changes), seq_len=seq_len
    )


def rotated_on_processes(ring_rank: int, rope_parameters: dict[str, Any], documents: Documents | None) -> Result:
    """That model over one sequence, in a process of a gloo ring: each rank sees its own positions alone."""
    torch.set_num_threads(1)
    part = ContextParallel().partition(S, documents=documents)
    mask = Causal() if documents is None else Causal() & documents
    model = rotated(rope_parameters, part.position_count())
    return on_ring(part, model, token_ids(), token_ids(), mask)


def loopback(size: int, layout: Layout | None = None) -> ContextParallel:
    return ContextParallel(Loopback(size, seed=0), layout=layout or Zigzag())


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What is in a model stays as it was: tensors, hooks, modes, attributes."""

    def state() -> list[Any]:
        parts = [
            (vars(m).keys(), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()
        ]
        return [parts, {name: x.clone() for name, x in model.state_dict().items()}]

    before = state()
    yield
    after = state()
    assert [(set(p[0]), *p[1:]) for p in before[0]] == [(set(p[0]), *p[1:]) for p in after[0]]
    assert all(torch.equal(x, after[1][name]) for name, x in before[1].items())
