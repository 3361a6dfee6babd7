"""The weights of a running model as a stream of Hugging Face's tensors, without a file.

What a generator in another process is given after each update of a policy. The tensors are those of
an export (`writing`), to the bit, gathered from any layout: each is read from the ranks that hold
parts of it when its turn comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.live_contents import open_live
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import Group
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport import torch_collectives
from megatron.core.utils import as_list
from megatron.hugging_face.families import family_of_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.stored import stored_adapters
from megatron.hugging_face.writing import described, num_bytes, plan, tensors

MOST_TRANSFER_BYTES = 1 << 26
"""A larger message is not faster."""


def stream_weights(
    model: nn.Module | Sequence[nn.Module],
    settings: Mapping[str, Any],
    *,
    bucket_bytes: int = 1 << 30,
    dtype: torch.dtype | None = None,
    process_group: Group | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield the model's weights under Hugging Face's names, in buckets; the same on all ranks.

    All ranks of `process_group` take all buckets, and change no weight in between. Besides the
    bucket that the caller has, at most `bucket_bytes` are held: release a bucket before you ask for
    the one after the next. A tensor that is larger than a bucket is a bucket of its own.

    Args:
        model: this rank's model chunk, or its list of chunks, as trained. Adapters are merged, for
            which copies of the one parameter are held besides.
        settings: of the run, by Megatron's names: `vars(get_args())`.
        bucket_bytes: size of a bucket, with what is on its way into it.
        dtype: of the tensors; None keeps that of the weights.
        process_group: ranks that hold the whole model together; None is all.
        pg_collection: None is the current collection.
    Communication:
        a gather and a broadcast of declarations; then broadcasts on `process_group`, of an eighth
        of a bucket at most.
    Raises:
        ConfigError: no family of Hugging Face can express the model.
        CheckpointError: weights are missing.
    """
    if bucket_bytes < 1:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} holds nothing.",
            rule="a bucket is a number of bytes",
            fix="leave it out for 1 GiB",
        )
    groups, group = resolve_groups(pg_collection), process_group or torch_collectives.world()
    state = {
        f"model{number}": sharded_state_dict_of(chunk, pg_collection=groups)
        for number, chunk in enumerate(as_list(model))
    }
    transfer_bytes = min(max(bucket_bytes // 8, 1), MOST_TRANSFER_BYTES)
    contents = open_live(state, settings, group=group, transfer_bytes=transfer_bytes)
    description = ModelDescription.from_values(settings)
    planned = plan(contents, family_of_settings(description), description)
    adapters = stored_adapters(contents) if settings.get("lora_rank") else None
    found = tensors(contents, planned, adapters, dtype)
    bucket: dict[str, Tensor] = {}
    size = 0
    for entry in described(planned, dtype):
        length = num_bytes(entry)
        if bucket and size + length > bucket_bytes - transfer_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[entry[0]] = next(found)
        size += length
    yield bucket
