"""The built-in tasks: a linear layer, an MLP, and a small byte-level transformer. Names match ``builtin.BUILTINS``."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from clusterrun.train.task import Batch, DataSpec, Sums


class Classifier:
    """Cross entropy over classes; the metric is the share classified right."""

    metric = "accuracy"
    context = 0

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        inputs, labels = batch
        scores = model(inputs)
        loss = F.cross_entropy(scores.float(), labels, reduction="none").double().sum()
        return Sums(loss, (scores.argmax(dim=1) == labels).sum(), len(labels))


class Linear(Classifier):
    def build_model(self, data: DataSpec) -> nn.Module:
        return nn.Linear(data.features, data.classes)


class Mlp(Classifier):
    def __init__(self, hidden: int, depth: int, dropout: float) -> None:
        self.hidden, self.depth, self.dropout = hidden, depth, dropout

    def build_model(self, data: DataSpec) -> nn.Module:
        layers: list[nn.Module] = []
        width = data.features
        for _ in range(self.depth):
            layers += [nn.Linear(width, self.hidden), nn.ReLU()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            width = self.hidden
        return nn.Sequential(*layers, nn.Linear(width, data.classes))


class Gpt:
    """Predicts the next byte. The metric is bits per byte: the mean loss over ln 2."""

    metric = "bits_per_byte"

    def __init__(self, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        self.layers, self.heads, self.width, self.dropout = layers, heads, width, dropout
        self.context = context

    def build_model(self, data: DataSpec) -> nn.Module:
        return Transformer(data.classes, self.layers, self.heads, self.width, self.context, self.dropout)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())

    def evaluate(self, model: nn.Module, batch: Batch) -> Sums:
        tokens, following = batch
        scores = model(tokens).flatten(0, 1).float()
        loss = F.cross_entropy(scores, following.flatten(), reduction="none").double().sum()
        return Sums(loss, loss / math.log(2), following.numel())


class Transformer(nn.Module):
    """Decoder-only, pre-norm, learned positions, output weights tied to the embedding."""

    def __init__(self, vocabulary: int, layers: int, heads: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.02)
        self.output.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte, [batch, context, vocabulary], for tokens [batch, context]."""
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.output(self.norm(x)))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a residual path; x is [batch, context, width]."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.drop(self.mix(attended.transpose(1, 2).reshape(batch, length, width)))
        return x + cast(Tensor, self.drop(self.feed(self.norm2(x))))
