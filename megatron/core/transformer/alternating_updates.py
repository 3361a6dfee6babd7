"""AltUp: n parallel residual streams. A layer computes one of them and predicts the others.

C. Baykal et al., "Alternating Updates for Efficient Transformers", section 3, arXiv 2301.13310, as
in Gemma 3n. A layer predicts all streams by mixing them, runs its branches on the prediction of the
active stream, and corrects every stream by the difference between its output and this prediction.

A tensor [s, b, n*h] holds the streams of a token one after the other, as with hyper-connections.
All operations are local to a token: tensor-parallel ranks repeat them (under sequence parallelism
each for its own tokens), and pipeline stages exchange all streams.

Legend: s local tokens of the sequence, b micro batch, h hidden, n streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

_LEAST_SQUARE = 1e-5
"""Least mean square of a projected stream that is scaled to the length of another one."""


def replicated_weight(
    layer: ParallelLayer, *shape: int, init_method: Callable[[Tensor], object] | None
) -> nn.Parameter:
    """Return a parameter that all tensor-parallel ranks hold. Under sequence parallelism its
    gradient is a partial sum on each rank."""
    axes: tuple[str, ...] = ("tp",) if layer.config.sequence_parallel else ()
    return layer.new_parameter(
        *shape, init_method=init_method, split_dim=None, partial_grad_axes=axes
    )


class AlternatingUpdates(ParallelLayer):
    """The prediction and the correction of the streams in one layer, in fp32 or wider."""

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, tp_group: Group) -> None:
        super().__init__(config, tp_group=tp_group)
        n, new = config.altup_num_inputs, partial(replicated_weight, self)
        self.router = new(n, config.hidden_size, init_method=config.init_method)
        self.prediction = new(n * n, n, init_method=config.init_method)
        self.correction = new(n, n, init_method=config.init_method)
        self.norm: Any = WrappedTorchNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return the predictions [s, b, n*h] of the streams [s, b, n*h] after the layer, and the
        active one [s, b, h]."""
        x, n = self._streams(streams), self.config.altup_num_inputs
        weights = self._weights(x[..., self.config.altup_active_idx, :], self.prediction)
        predicted = (x + weights.unflatten(-1, (n, n)) @ x).to(streams.dtype)
        return predicted.flatten(-2), predicted[..., self.config.altup_active_idx, :].contiguous()

    def corrected(self, predicted: Tensor, output: Tensor) -> Tensor:
        """Return the streams [s, b, n*h] after a layer.

        Args:
            predicted: [s, b, n*h], from `forward`.
            output: [s, b, h], the layer's output for the active stream.
        """
        x = self._streams(predicted)
        exact = output.to(x.dtype)
        weights = self._weights(exact, self.correction) + 1
        difference = exact - x[..., self.config.altup_active_idx, :]
        added = weights.unsqueeze(-1) * difference.unsqueeze(-2)
        # A sum is no view: stages free the data of their outputs, and FSDP2 hooks them.
        return (x.flatten(-2) + added.flatten(-2)).to(predicted.dtype)

    def _streams(self, streams: Tensor) -> Tensor:
        exact = streams.to(torch.promote_types(streams.dtype, torch.float32))
        return exact.unflatten(-1, (self.config.altup_num_inputs, -1))

    def _weights(self, x: Tensor, matrix: Tensor) -> Tensor:
        """Return weights of the streams of each token [s, b, m], by a matrix [m, n] of the router's
        output for x [s, b, h]."""
        routed = F.linear(self.norm(x) / x.shape[-1], self.router.to(x.dtype))
        if self.training and self.config.altup_coef_clip is not None:
            matrix = matrix.clamp(-self.config.altup_coef_clip, self.config.altup_coef_clip)
        return F.linear(torch.tanh(routed), matrix.to(x.dtype))


class StreamProjections(ParallelLayer):
    """A matrix [h, h] for each stream but the first. A projected stream is scaled to the root mean
    square of the first stream.

    Args:
        joins: the streams are joined after the last layer; without it they are made before the
            first one.
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig, tp_group: Group, *, joins: bool) -> None:
        super().__init__(config, tp_group=tp_group)
        self.joins = joins
        self.num_added, width = config.altup_num_inputs - 1, config.hidden_size
        shape = self.num_added * width, width
        self.weight = replicated_weight(self, *shape, init_method=config.init_method)

    def forward(self, x: Tensor) -> Tensor:
        """Return streams [s, b, n*h] of hidden states [s, b, h]; to join them, the mean [s, b, h]
        of the streams [s, b, n*h]."""
        n, weight = self.num_added, self.weight.to(x.dtype)
        if self.joins:
            first, *others = x.chunk(n + 1, -1)
            parts = list(map(F.linear, others, weight.chunk(n)))
        else:
            first, parts = x, list(F.linear(x, weight).chunk(n, -1))
        exact = partial(torch.Tensor.to, dtype=torch.promote_types(x.dtype, torch.float32))
        # The bound keeps the derivative of the root finite where a token is zero.
        length = _mean_square(exact(first)).clamp(min=1e-30).sqrt()
        scaled = [
            exact(part) * length / _mean_square(exact(part)).clamp(min=_LEAST_SQUARE).sqrt()
            for part in parts
        ]
        streams = [exact(first), *scaled]
        joined = torch.stack(streams).mean(0) if self.joins else torch.cat(streams, -1)
        return joined.to(x.dtype)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)
