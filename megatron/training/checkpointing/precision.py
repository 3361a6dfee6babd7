"""Loading into another precision: every weight comes from its most precise stored form.

A half-precision run stores weights twice, as the model computes with them and as the fp32 main
weights of the optimizer; an fp32 run stores them once. So an fp32 run reads main weights where
there are any, and main weights are read from the weights of an fp32 run.
"""

from __future__ import annotations

import torch

from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES

MAIN_WEIGHT_PREFIX = "optimizer.state.fp32_param."


def most_precise_source(wanted: ShardedTensor, manifest: Manifest) -> str:
    """Return the key of the stored tensor that fills `wanted`."""
    key, stored = wanted.key, manifest.tensors
    if key.startswith(MAIN_WEIGHT_PREFIX):
        weight = key.removeprefix(MAIN_WEIGHT_PREFIX)
        return weight if key not in stored and weight in stored else key
    main = MAIN_WEIGHT_PREFIX + key
    if not (key in stored and main in stored and wanted.dtype == torch.float32):
        return key
    return main if DTYPES[stored[key].dtype].itemsize < wanted.dtype.itemsize else key
