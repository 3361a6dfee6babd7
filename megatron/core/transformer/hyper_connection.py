"""Hyper-connections: a residual stream made of n parallel streams.

Z. Xie et al., "mHC: Manifold-Constrained Hyper-Connections", section 4, arXiv 2512.24880.
A branch F reads a weighted sum of the streams x; its output is added to each stream with another
weight, and the streams are mixed: x becomes M x + post F(pre x). The weights of a token are
computed from its streams; M is doubly stochastic, so that the streams keep their mean.

A tensor [s, b, n*h] holds the streams of a token one after the other. All operations are local to a
token: tensor-parallel ranks repeat them (under sequence parallelism each for its own tokens), and
pipeline stages exchange all streams.

Legend: s local tokens of the sequence, b micro batch, h hidden, n streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig


class StreamWeights(ParallelLayer):
    """Weights of the streams of each token: logits alpha * (W norm(x)) + bias, in fp32 or wider.

    The norm is the RMS norm without a scale, over all streams.

    Args:
        sizes: numbers of weights of a token, of each kind; each kind has its own factor alpha.
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, tp_group: Group, sizes: tuple[int, ...]) -> None:
        super().__init__(config, tp_group=tp_group)
        self.sizes = sizes
        self.num_streams = config.mhc_num_residual_streams
        axes: tuple[str, ...] = ("tp",) if config.sequence_parallel else ()
        new = partial(self.new_parameter, split_dim=None, partial_grad_axes=axes)
        width = self.num_streams * config.hidden_size
        alpha = partial(nn.init.constant_, val=config.mhc_init_gating_factor)
        self.weight = new(sum(sizes), width, init_method=config.init_method)
        self.alpha = new(len(sizes), init_method=alpha)
        self.bias = new(sum(sizes), init_method=None)

    def streams_and_logits(self, streams: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the streams as [s, b, n, h], and the logits [s, b, size] of each kind."""
        dtype = torch.promote_types(streams.dtype, torch.float32)
        x = streams.to(dtype)
        normed = F.rms_norm(x, x.shape[-1:], eps=self.config.layernorm_epsilon)
        products = F.linear(normed, self.weight.to(dtype)).split(self.sizes, -1)
        biases = self.bias.to(dtype).split(self.sizes)
        parts = zip(products, self.alpha.to(dtype), biases, strict=True)
        logits = [product * alpha + bias for product, alpha, bias in parts]
        return x.unflatten(-1, (self.num_streams, -1)), logits

    def weighted_sum(self, x: Tensor, logits: Tensor) -> Tensor:
        """Return the sum [s, b, h] of streams [s, b, n, h] with weights sigmoid(logits) + eps."""
        weights = torch.sigmoid(logits) + self.config.mhc_epsilon
        return torch.matmul(weights.unsqueeze(-2), x).squeeze(-2)


class LearnedContraction(StreamWeights):
    """Weighted sum of the streams before the final norm (DeepSeek-V4)."""

    def __init__(self, config: TransformerConfig, tp_group: Group) -> None:
        super().__init__(config, tp_group, (config.mhc_num_residual_streams,))

    def forward(self, streams: Tensor) -> Tensor:
        """Return [s, b, h] of streams [s, b, n*h], in their dtype."""
        x, (logits,) = self.streams_and_logits(streams)
        return self.weighted_sum(x, logits).to(streams.dtype)


@dataclass(frozen=True)
class Residual:
    """The streams x [s, b, n, h] of a branch, in the dtype of the weights.

    Attributes:
        post: [s, b, n], weights of the branch's output. mixing: [s, b, n, n] or None; stream k
            becomes the sum over j of mixing[j, k] x[j].
        dtype: dtype of the residual stream.
    """

    x: Tensor
    post: Tensor
    mixing: Tensor | None
    dtype: torch.dtype

    def plus(self, output: Tensor) -> Tensor:
        """Return the streams [s, b, n*h] with the output [s, b, h] of the branch added."""
        mixed = self.x if self.mixing is None else self.mixing.transpose(-1, -2) @ self.x
        added = self.post.unsqueeze(-1) * output.to(self.post.dtype).unsqueeze(-2)
        # A sum is no view: stages free the data of their outputs, and FSDP2 hooks them.
        return (mixed.flatten(-2) + added.flatten(-2)).to(self.dtype)


class HyperConnection(StreamWeights):
    """The connection of one branch (attention or MLP) to the streams.

    With 0 Sinkhorn iterations the streams are not mixed, and the weights of the output have the
    smallest value `mhc_epsilon` (the independent hyper-connections of Hunyuan 4).
    """

    def __init__(self, config: TransformerConfig, tp_group: Group) -> None:
        n = config.mhc_num_residual_streams
        mixing = (n * n,) if config.mhc_sinkhorn_iterations else ()
        super().__init__(config, tp_group, (n, n, *mixing))

    def forward(self, streams: Tensor) -> tuple[Tensor, Residual]:
        """Return the branch's input [s, b, h] and what adds its output to streams [s, b, n*h]."""
        x, (pre, post, *mixing) = self.streams_and_logits(streams)
        branch = self.weighted_sum(x, pre).to(streams.dtype)
        weights = self.config.mhc_post_magnitude * torch.sigmoid(post)
        if not mixing:
            return branch, Residual(x, weights + self.config.mhc_epsilon, None, streams.dtype)
        n = self.num_streams
        mixed = self._doubly_stochastic(mixing[0].unflatten(-1, (n, n)))
        return branch, Residual(x, weights, mixed, streams.dtype)

    def _doubly_stochastic(self, logits: Tensor) -> Tensor:
        """Return exp(logits) [..., n, n] with rows and columns scaled in turn to the sum 1.

        Sinkhorn and Knopp's iteration (mHC, section 4.2); each starts with the rows.
        """
        eps = self.config.mhc_epsilon
        matrix = torch.softmax(logits, -1) + eps
        matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.mhc_sinkhorn_iterations - 1):
            matrix = matrix / (matrix.sum(-1, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(-2, keepdim=True) + eps)
        return matrix
