"""Megatron's module of random streams and recomputation; the parts live beside it.

The framework's own draws are keyed by what they are for (`megatron.core.parameters.rng`)
and have no state. Third-party modules that draw from torch's default generator find here
Megatron's tracker of named streams, among them one that differs between tensor-parallel ranks.
"""

from __future__ import annotations

from megatron.core.tensor_parallel.activation_recompute import (
    CheckpointWithoutOutput,
    checkpoint,
)
from megatron.core.tensor_parallel.rng_tracker import (
    CudaRNGStatesTracker,
    get_all_rng_states,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    initialize_rng_tracker,
    model_parallel_cuda_manual_seed,
)

__all__ = [
    "CheckpointWithoutOutput",
    "CudaRNGStatesTracker",
    "checkpoint",
    "get_all_rng_states",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "initialize_rng_tracker",
    "model_parallel_cuda_manual_seed",
]
