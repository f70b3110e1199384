"""Hugging Face models with feed-forward in blocks and the loss in chunks: the same model, the same gradients."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import hf_rings as hf
import pytest
import torch
from torch import Tensor, nn

from ringspun import Causal
from ringspun.errors import ShapeError, UnsupportedByRing
from ringspun.integrations.transformers import plans, prepare
from ringspun.torch.memory import peak_memory
from ringspun.train.losses.causal_lm import CausalLMLoss
from ringspun.train.losses.chunked_loss import Terms
from ringspun.train.losses.loss import token_loss
from ringspun.train.memory.decoder_blocks import apply_blockwise, remove_blockwise, wrap_decoder_layer


def loss_and_gradients(model: Any, run: Any, *, wide: bool = True) -> dict[str, Tensor]:
    """`hf.Wide` reaches forward only: what a block computes again in backward is float32 where Transformers says so."""
    model.zero_grad()
    with hf.Wide() if wide else nullcontext():
        loss = run(model)
        loss.backward()
    return {"loss": loss.detach(), **hf.gradients(model)}


def plain(model: Any) -> Tensor:
    ids = hf.token_ids(2)
    targets = hf.targets_of(ids)
    return token_loss(model(input_ids=ids, use_cache=False).logits, targets, total_targets=int((targets >= 0).sum()))


def same(found: dict[str, Tensor], expected: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    worst = {name: float((x - expected[name]).abs().max() / expected[name].abs().max()) for name, x in found.items()}
    assert max(worst.values()) < bound, worst


@pytest.mark.parametrize("family", hf.FAMILIES)
def test_blocks_and_chunks_change_nothing_of_a_family(family: str) -> None:
    """Two rows of 29 tokens in blocks of 7 and chunks of 10, both undone at the end."""
    changes = {"final_logit_softcapping": 3.0} if family == "gemma2" else {}
    expected = loss_and_gradients(model := hf.build(family, **changes), plain)
    ids = hf.token_ids(2)
    targets = hf.targets_of(ids)
    loss = CausalLMLoss(model, terms=Terms(chunk_tokens=10))
    assert loss.softcap == (3.0 if family == "gemma2" else None)

    def chunked(model: Any) -> Tensor:
        return loss(targets, total_targets=int((targets >= 0).sum()), input_ids=ids, use_cache=False)

    with hf.unchanged(model):
        apply_blockwise(model, 7)
        same(loss_and_gradients(model, plain), expected)
        same(loss_and_gradients(model, chunked), expected)
        remove_blockwise(model)
    same(loss_and_gradients(model, plain), expected)


def test_blocks_and_chunks_on_a_ring() -> None:
    expected = hf.alone(hf.build("qwen3"), hf.token_ids(), [hf.S])
    part, model = hf.loopback(3).partition(hf.S), hf.build("qwen3")
    loss = CausalLMLoss(model, terms=Terms(chunk_tokens=10))
    prepare(apply_blockwise(model, 4))
    local = part.shard_batch({"input_ids": hf.token_ids(), "labels": hf.token_ids()})
    with hf.Wide():
        share = loss(
            local["shift_labels"], total_targets=local["num_items_in_batch"], input_ids=local["input_ids"],
            ringspun_plan=plans(model, part, Causal()),
        )  # fmt: skip
        share.backward()
    same({"loss": share.detach(), **hf.gradients(model)}, {"loss": expected.loss, **expected.gradients})


def test_a_mixture_of_experts_in_blocks() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=hf.VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, moe_intermediate_size=8, intermediate_size=24, num_experts=5, num_experts_per_tok=2,
        mlp_only_layers=[0], experts_implementation="eager", attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).double()
    expected = loss_and_gradients(model, plain, wide=False)
    same(loss_and_gradients(apply_blockwise(model, 4), plain, wide=False), expected)
    with pytest.raises(UnsupportedByRing, match="output_router_logits must be False"):
        model(input_ids=hf.token_ids(), output_router_logits=True)
    with torch.no_grad():
        model(input_ids=hf.token_ids(), output_router_logits=True)


def test_copies_and_state_dicts_are_as_before() -> None:
    model = hf.build("llama")
    names, kind = list(model.state_dict()), type(model.model.layers[0].mlp)
    other = copy.deepcopy(apply_blockwise(model, 5))
    assert list(model.state_dict()) == names and isinstance(model.model.layers[0].mlp, kind)
    expected = loss_and_gradients(model, plain)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    same(loss_and_gradients(other, plain), expected)


def test_a_rank_without_tokens() -> None:
    """Fewer tokens than ranks leave some none; the weights' gradients are zeros, for they are summed over ranks."""
    model = hf.build("llama")
    layer = apply_blockwise(model, 4).model.layers[0].mlp
    x = torch.zeros(1, 0, model.config.hidden_size, dtype=next(layer.parameters()).dtype, requires_grad=True)
    out = layer(x)
    assert out.shape == x.shape
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


def test_one_layer_by_itself_and_what_is_refused() -> None:
    model = hf.build("llama")
    layer = wrap_decoder_layer(model.model.layers[1], 5)
    assert type(layer.mlp).__name__ == "BlockwiseLlamaMLP"
    with pytest.raises(UnsupportedByRing, match="must not be over blocks already"):
        wrap_decoder_layer(layer, 5)
    with pytest.raises(UnsupportedByRing, match="must not be over blocks already"):
        apply_blockwise(model, 5)
    assert type(layer.mlp).__name__ == "LlamaMLP"  # as it was: undone
    with pytest.raises(ShapeError, match="block_size must be a number of tokens"):
        apply_blockwise(model, 0)
    with pytest.raises(UnsupportedByRing, match="layer must have attention and a module called"):
        wrap_decoder_layer(nn.Linear(2, 2), 5)
    with pytest.raises(UnsupportedByRing, match="model must have decoder layers"):
        apply_blockwise(nn.Linear(2, 2), 5)
    with pytest.raises(UnsupportedByRing, match="hidden states alone; LlamaMLP got scale"):
        wrap_decoder_layer(layer, 5).mlp(torch.zeros(1, 3, 32), scale=2.0)


class Capacity(nn.Module):
    """Two experts that take 6 tokens each and drop the others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i in range(2):
            chosen = ((x[0, :, 0] > 0) == bool(i)).nonzero()[:6, 0]
            out[:, chosen] = x[:, chosen] @ self.weight[i].to(x.dtype)
        return out


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        return super().forward(x)


class Neighbours(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    ("module", "how"),
    [
        (Capacity(), "gives other rows when cut"),
        (InPlace(32, 32), "changes its input in place"),
        (Neighbours(32, 32, 3, padding=1), "gives other rows when cut"),
        (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)), "has a BatchNorm1d"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_feed_forward_that_mixes_tokens_is_refused(module: nn.Module, how: str) -> None:
    model = hf.build("llama")
    model.model.layers[2].mlp = module.double()
    with pytest.raises(UnsupportedByRing, match=rf"feed-forward of model\.layers\.2 must treat .* it {how}"):
        apply_blockwise(model, 5)
    assert type(model.model.layers[0].mlp).__name__ == "LlamaMLP"


@pytest.mark.parametrize(
    ("name", "own", "scale"),
    [("Cohere", {"logit_scale": 0.25}, 0.25), ("Granite", {"logits_scaling": 4.0}, 0.25)],
)
def test_scaled_logits(name: str, own: dict[str, Any], scale: float) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        vocab_size=hf.VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=None, attn_implementation="eager", **own,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    loss, ids = CausalLMLoss(model), hf.token_ids()
    assert loss.scale == scale
    targets = hf.targets_of(ids)
    with hf.Wide():
        found = loss(targets, total_targets=hf.S - 1, input_ids=ids)
        expected = token_loss(model(input_ids=ids).logits, targets, total_targets=hf.S - 1)
    torch.testing.assert_close(found, expected)


def test_models_with_other_logits_and_calls_with_labels_are_refused() -> None:
    model = hf.build("llama")
    loss = CausalLMLoss(model)
    with pytest.raises(UnsupportedByRing, match="labels must be None"):
        loss(hf.token_ids(), total_targets=1, input_ids=hf.token_ids(), labels=hf.token_ids())
    assert not model.lm_head._forward_pre_hooks
    model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits + 1))
    with pytest.raises(UnsupportedByRing, match="model must make logits by its head, a scale and a cap alone"):
        CausalLMLoss(model)
    with pytest.raises(UnsupportedByRing, match="model must have a linear output embedding; Linear has NoneType"):
        CausalLMLoss(nn.Linear(2, 2))


def test_feed_forward_memory_of_a_model_is_flat_in_tokens() -> None:
    """One layer whose feed-forward is 16 times as wide as the model: a token costs less than 2 rows of it, not 4."""

    def per_token(blocks: bool) -> float:
        model = hf.build("llama", num_hidden_layers=1, intermediate_size=512).float()
        model.set_attn_implementation("sdpa")
        loss = CausalLMLoss(model, terms=Terms(chunk_tokens=32))
        if blocks:
            apply_blockwise(model, 32)
        found = []
        for tokens in (256, 512):
            ids = hf.token_ids(1, tokens)
            with peak_memory() as peak:
                loss(hf.targets_of(ids), total_targets=tokens, input_ids=ids, use_cache=False).backward()
            model.zero_grad()
            found.append(peak.bytes)
        return (found[1] - found[0]) / 256

    row = 512 * 4
    assert per_token(True) < 2 * row
    assert per_token(False) > 4 * row
