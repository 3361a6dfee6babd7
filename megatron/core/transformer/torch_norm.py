"""The norm of a config, alone, before a branch, or in one module with the linear layer after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parallel_parameters import device_of_parameters
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.topology.group import Group
from megatron.core.transformer.norm import NORMS, Norm, RMSNorm
from megatron.core.transformer.transformer_config import TransformerConfig


class WrappedTorchNorm:
    """Factory with the call of Megatron's norms; building it gives a `Norm`."""

    def __new__(  # type: ignore[misc]
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Norm:
        """Build the norm named by `config.normalization`.

        Args:
            hidden_size: size of the normalised dimension.
            persist_layer_norm, zero_centered_gamma, normalization: accepted for compatibility; the
                config decides.
        """
        kind = getattr(config, "normalization", None) or normalization
        if kind not in NORMS:
            raise ConfigError(
                f"normalization={kind!r} is unknown.",
                rule=f"known norms are {', '.join(NORMS)}",
                flags=["--normalization"],
                fix="use --normalization RMSNorm",
            )
        return NORMS[kind](
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma or zero_centered_gamma,
            is_exact=getattr(config, "layout_invariant_mode", False),
            dtype=config.params_dtype,
            device=device_of_parameters(config),
        )


class L2Norm(nn.Module):
    """Divide vectors by the root of their mean square; there is no weight.

    Args:
        hidden_size: size of the vectors; ignored.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6, **options: object) -> None:
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., h] in fp32 or wider, and return it in its own dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).type_as(x)


class RMSNormAcrossHeads(RMSNorm):
    """RMSNorm over all heads of a token [s, b, n/tp, d], split over the tensor-parallel ranks.

    Every rank holds the weight [n * d] of all heads. If several ranks have the same heads (keys of
    a group that the ranks share), each rank adds their squares, and the mean divides by the copies.
    """

    def __init__(
        self, hidden_size: int, eps: float, *, config: TransformerConfig, tp_group: Group
    ) -> None:
        """
        Args:
            hidden_size: n * d.
        """
        super().__init__(
            hidden_size,
            eps,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
            device=device_of_parameters(config),
        )
        self.tp_group = tp_group

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Normalise this rank's heads [s, b, n/tp, d].

        Communication: in forward and in backward a sum of s * b numbers over the ranks.
        """
        tp, (_, _, num_heads, width) = self.tp_group, x.shape
        num_all = self.hidden_size // width
        weight = self.scale(self.weight).view(num_all, width)
        weight = weight.narrow(0, tp.rank() * num_all // tp.size(), num_heads)
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = exact.square().sum((2, 3), keepdim=True)
        # The gradients of the sum are partial on each rank, so backward adds them up as well.
        squares = reduce_from_tensor_model_parallel_region(squares, group=tp)
        squares = copy_to_tensor_model_parallel_region(squares, group=tp)
        mean = squares / (num_heads * width * tp.size())
        return ((exact * torch.rsqrt(mean + self.eps)) * weight).to(x.dtype)


class NormColumnParallelLinear(ColumnParallelLinear):
    """y = norm(x) A^T + b, with A split, and called, as in `ColumnParallelLinear`.

    Libraries fuse the two in one kernel, and code that reads a model's parameters uses the names of
    that module: `linear_qkv.layer_norm_weight`, not `input_layernorm.weight`. Here the two parts
    run as separate kernels, with the same numbers as separate modules.

    The parameters of the config's norm belong to this module, as `layer_norm_weight` and so on;
    under sequence parallelism their gradients are partial over the ranks.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm: Norm = WrappedTorchNorm(config, input_size, config.layernorm_epsilon)
        for name in norm.initial:
            parameter = norm._parameters.pop(name)
            self.register_parameter(f"layer_norm_{name}", parameter)
        self._norm = (norm,)  # in a tuple, so that torch does not register it as a child

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Norm [s, b, i] ([s/tp, b, i] with sequence parallelism) and apply the layer to it."""
        (norm,) = self._norm
        norm.training = self.training
        parameters = [getattr(self, f"layer_norm_{name}") for name in norm.initial]
        return super().forward(norm.normalize(input_, *parameters), weight, runtime_gather_output)


@dataclass(frozen=True)
class Normed:
    """The norm of a branch's input.

    `branch` is in the compute dtype; `output` is the norm's own output, None if it may be dropped.
    """

    branch: Tensor
    output: Tensor | None
    dropped: CheckpointWithoutOutput | None

    def drop_after(self, used: Tensor) -> None:
        """Free the norm's output, if it may be dropped, after `used` was computed from it."""
        if self.dropped is not None:
            self.dropped.discard_output_and_register_recompute(used)


def normed_branch(norm: Any, output: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
    """Return the norm of a branch's output [s, b, h], its bias [h] included."""
    return norm(output if bias is None else output + bias), None
