"""A shard of a parameter, and the fp32 tensor that the optimizer updates for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.distributed.parameter_shard import ParameterShard


@dataclass(frozen=True, eq=False)
class MainParamShard:
    """A shard of a parameter and the fp32 tensor that the optimizer updates for it."""

    shard: ParameterShard
    main_param: nn.Parameter
    """The model's own values if they are fp32 (a view if the rank owns a part only), else a copy.
    With chunked state always the model's own values, because the state includes main weights."""
    param_index: tuple[int, int]
    """(model chunk, number of the parameter in it)."""

    @property
    def is_copy(self) -> bool:
        """Whether the model's values must be written from `main_param` after an update."""
        return self.main_param.data_ptr() != self.shard.values.data_ptr()


def main_param_of(shard: ParameterShard, *, is_chunked: bool = False) -> nn.Parameter:
    """Return the tensor that the optimizer updates for a shard."""
    if shard.values.dtype != torch.float32 and not is_chunked:
        return nn.Parameter(shard.values.detach().float())
    if shard.values is shard.parameter:
        return shard.parameter
    return nn.Parameter(shard.values.detach())
