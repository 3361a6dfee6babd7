"""GPT-2-like and Llama-like models in plain PyTorch, without a framework.

They are the reference of `single_device.py` and the independent oracle of the model tests: they
compute the same functions and share no code with `megatron.core`. Activations are [batch, sequence,
hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; the defaults are the sizes of the benchmark."""

    num_layers: int = 4
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int = 8
    ffn_size: int = 2048
    vocab_size: int = 32000
    sequence: int = 512
    epsilon: float = 1e-5


class GPT2Block(nn.Module):
    """LayerNorm, attention, LayerNorm, GELU MLP; biases everywhere."""

    def __init__(self, z: Sizes) -> None:
        super().__init__()
        h = z.hidden_size
        self.num_heads = z.num_heads
        self.norm1 = nn.LayerNorm(h, eps=z.epsilon)
        self.qkv = nn.Linear(h, 3 * h)
        self.proj = nn.Linear(h, h)
        self.norm2 = nn.LayerNorm(h, eps=z.epsilon)
        self.up = nn.Linear(h, z.ffn_size)
        self.down = nn.Linear(z.ffn_size, h)

    def forward(self, x: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.num_heads, h // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT2(nn.Module):
    """Word and position embedding, blocks, final norm, tied head."""

    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(z.vocab_size, z.hidden_size)
        self.positions = nn.Embedding(z.sequence, z.hidden_size)
        self.blocks = nn.ModuleList(GPT2Block(z) for _ in range(z.num_layers))
        self.norm = nn.LayerNorm(z.hidden_size, eps=z.epsilon)

    def logits(self, tokens: Tensor) -> Tensor:
        """Map ids [b, s] to logits [b, s, v]."""
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [b, n, s, d] by the angles with these cos and sin [s, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class LlamaBlock(nn.Module):
    """RMSNorm, grouped-query attention with rotary positions, RMSNorm, SwiGLU; no biases."""

    def __init__(self, z: Sizes) -> None:
        super().__init__()
        h, self.d = z.hidden_size, z.hidden_size // z.num_heads
        self.n, self.g = z.num_heads, z.num_kv_heads
        self.norm1 = nn.RMSNorm(h, eps=z.epsilon)
        self.q = nn.Linear(h, self.n * self.d, bias=False)
        self.k = nn.Linear(h, self.g * self.d, bias=False)
        self.v = nn.Linear(h, self.g * self.d, bias=False)
        self.proj = nn.Linear(self.n * self.d, h, bias=False)
        self.norm2 = nn.RMSNorm(h, eps=z.epsilon)
        self.gate = nn.Linear(h, z.ffn_size, bias=False)
        self.up = nn.Linear(h, z.ffn_size, bias=False)
        self.down = nn.Linear(z.ffn_size, h, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map [b, s, h] to [b, s, h]."""
        b, s, _ = x.shape
        y = self.norm1(x)
        q = rotate_half(self.q(y).view(b, s, self.n, self.d).transpose(1, 2), cos, sin)
        k = rotate_half(self.k(y).view(b, s, self.g, self.d).transpose(1, 2), cos, sin)
        v = self.v(y).view(b, s, self.g, self.d).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.n != self.g
        )
        x = x + self.proj(attended.transpose(1, 2).reshape(b, s, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class PlainLlama(nn.Module):
    """Word embedding, blocks, final norm, separate head."""

    def __init__(self, z: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(z.vocab_size, z.hidden_size)
        self.blocks = nn.ModuleList(LlamaBlock(z) for _ in range(z.num_layers))
        self.norm = nn.RMSNorm(z.hidden_size, eps=z.epsilon)
        self.head = nn.Linear(z.hidden_size, z.vocab_size, bias=False)
        d = z.hidden_size // z.num_heads
        inverse = 10000.0 ** (-torch.arange(0, d, 2).float() / d)
        angles = torch.outer(torch.arange(z.sequence).float(), inverse)
        self.angles = torch.cat((angles, angles), dim=-1)  # a plain attribute: stays fp32

    def logits(self, tokens: Tensor) -> Tensor:
        """Map ids [b, s] to logits [b, s, v]."""
        x = self.words(tokens)
        angles = self.angles[: tokens.shape[1]]
        cos, sin = angles.cos().to(x), angles.sin().to(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss."""
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())
