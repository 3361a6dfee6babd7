"""Sharded checkpoints: declarations of shards, saved and loaded in any layout."""

from megatron.core.dist_checkpointing.async_save import AsyncSave
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.parameter_shards import (
    make_sharded_optimizer_tensor,
    sharded_tensor_for_parameter,
)
from megatron.core.dist_checkpointing.serialization import (
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    load_with_report,
    save,
)
from megatron.core.dist_checkpointing.validation import StrictHandling

__all__ = [
    "AsyncSave",
    "LocalNonpersistentObject",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "check_is_distributed_checkpoint",
    "is_main_replica",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "load_with_report",
    "make_sharded_optimizer_tensor",
    "save",
    "sharded_tensor_for_parameter",
]
