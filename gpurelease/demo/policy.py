"""The policy: a decoder-only transformer, small enough for a CPU."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from gpurelease.demo.task import DIGITS, LENGTH

WIDTH = 64
HEADS = 4
BLOCKS = 2
SEPARATOR = DIGITS  # the token between prompt and answer


class Block(nn.Module):
    """Attention and a feed-forward layer. Works with all heads, or with the share of them that a TP rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.before_feed_forward = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream after this block, of the same shape, ``[batch, tokens, WIDTH]``."""
        normed = self.before_attention(x)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.before_feed_forward(x))))


class Policy(nn.Module):
    """Says, for every token of a row, how likely each digit is to be the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIGITS + 1, WIDTH)
        self.positions = nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, DIGITS)
        nn.init.normal_(self.head.weight, std=0.01)  # starts by guessing evenly, and so explores

    def forward(self, tokens: Tensor) -> Tensor:
        """Return log-probabilities of the next digit, of shape ``[batch, tokens, DIGITS]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).log_softmax(dim=-1)
