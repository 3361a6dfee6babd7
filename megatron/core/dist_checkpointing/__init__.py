"""Sharded checkpoints: declarations of shards, saved and loaded in any layout."""

from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
    make_sharded_optimizer_tensor,
    sharded_tensor_for_parameter,
)

__all__ = [
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "is_main_replica",
    "make_sharded_optimizer_tensor",
    "sharded_tensor_for_parameter",
]
