"""Set parameters of adapters from values that are computed or read elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.transformer.low_rank_adapter import LowRankAdapter, magnitude_adapters
from megatron.core.utils import unwrap_model


def write_parameter(chunk: nn.Module, parameter: nn.Parameter, value: Tensor) -> None:
    """Set a parameter of a chunk, wrapped or not, to `value`, of its full shape."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.write_parameter(parameter, value)
    else:
        parameter.data.copy_(value)


def frozen_row_norms(layer: nn.Module, adapter: LowRankAdapter) -> Tensor:
    """Return the norm of each row of a frozen weight: [o/tp], or [o].

    Communication: a gather of the weight if torch shards it, and the collectives of `row_norms`.
    """
    # Imported only for adapters with magnitudes, because it takes half as long as `import torch`.
    from torch.distributed.tensor import DTensor

    weight: Any = layer.weight
    return adapter.row_norms(weight.full_tensor() if isinstance(weight, DTensor) else weight)


def set_magnitudes(chunks: Sequence[nn.Module]) -> None:
    """Initialise the magnitudes of adapters to the norms of the rows of the frozen weights.

    All ranks call it after the weights are loaded; without magnitudes it does nothing.
    """
    for chunk in chunks:
        found: Iterable[tuple[Any, LowRankAdapter]] = magnitude_adapters(unwrap_model(chunk))
        for layer, adapter in found:
            assert adapter.magnitude is not None
            write_parameter(chunk, adapter.magnitude, frozen_row_norms(layer, adapter))
