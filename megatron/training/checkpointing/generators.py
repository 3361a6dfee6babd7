"""The states of ordinary random generators, for modules that do not use keyed randomness.

The framework's own draws need no state beyond the seed. A custom module may draw from torch's,
numpy's or Python's generator, or from the tensor-parallel tracker; their states belong to a rank,
so they are restored only where the layout is the one that was saved.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from megatron.core import device
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import get_pg_rank, get_pg_size


def declare_generators(groups: ProcessGroupCollection) -> ShardedObject:
    """Declare this rank's generator states in the grid of (pipeline, tensor) ranks.

    Data-parallel copies are taken to hold the same states, as in Megatron.
    """
    return ShardedObject(
        "generators",
        generator_states(),
        global_shape=(get_pg_size(groups.pp), get_pg_size(groups.tp)),
        global_offset=(get_pg_rank(groups.pp), get_pg_rank(groups.tp)),
        replica_id=get_pg_rank(groups.dp_cp),
    )


def generator_states() -> dict[str, Any]:
    """Return the states of all generators of this process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    if device.device_type() != "cpu":
        states["device"] = torch.get_device_module(device.device_type()).get_rng_state()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Set all generators of this process."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if "device" in states and device.device_type() != "cpu":
        torch.get_device_module(device.device_type()).set_rng_state(states["device"])
