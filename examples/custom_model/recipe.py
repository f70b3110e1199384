"""A model of one's own: short convolutions and attention in turn, both exact over a sequence that ranks share.

ringspun train examples/custom_model/run.toml --data PATH
"""

import torch.nn.functional as F
from torch import nn

from ringspun.train.rope import Default
from ringspun.train.rope.rotary import cos_sin, rotate

WIDTH, HEADS, LAYERS, VOCAB = 64, 2, 2, 257  # bytes, and the end of a document


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.RMSNorm(WIDTH), nn.Conv1d(WIDTH, WIDTH, kernel_size=4, groups=WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x, plan, cos, sin):
        h = self.norm(x)
        h = h + plan.partition.causal_conv1d(h, self.conv.weight, self.conv.bias)  # looks at neighbours' tokens too
        q, k, v = self.qkv(h).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        h = plan.attention(rotate(q, cos, sin), rotate(k, cos, sin), v)  # of all tokens, whoever holds them
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    _no_split_modules = ("Layer",)  # what shard = "fsdp" gathers at a time

    def __init__(self, rope):
        super().__init__()
        self.rope = rope
        self.token, self.layers = nn.Embedding(VOCAB, WIDTH), nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        nn.init.normal_(self.token.weight, std=0.02)  # it is the head too: logits begin small

    def forward(self, ids, plan, positions):
        """Logits [B, T, V] of this rank's tokens."""
        x = self.token(ids)
        cos, sin = cos_sin(positions, self.rope, head_size=WIDTH // HEADS, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, plan, cos, sin)
        return F.linear(self.norm(x), self.token.weight)


def build_model(config):
    """The same on every rank, for random numbers are seeded; with the rotations of the stage."""
    return Model(config.rope or Default())


def evaluate(model, context, config, stage, step):
    """At each switch of stages and at the end: into log.jsonl and the report."""
    return {"embedding norm": model.token.weight.norm().item()}
