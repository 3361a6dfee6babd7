"""Save and load sharded state dicts, with Megatron's names and arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import commit, typed_json
from megatron.core.dist_checkpointing.async_save import AsyncSave
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.loader import Contents, Loaded, load_state
from megatron.core.dist_checkpointing.manifest import BACKEND, METADATA_NAME
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, storage_path
from megatron.core.dist_checkpointing.save_in_progress import prepare_save
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_handling
from megatron.core.foundation.errors import CheckpointError, ConfigError
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import ControlGroup, SingleProcess, control_group

_CONTENT_METADATA = "content_metadata"


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str] | ObjectDirectory,
    sharded_strategy: object = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: object = None,
    content_metadata: Mapping[str, object] | None = None,
    async_strategy: str | None = None,
    verify_integrity: bool = True,
    *,
    process_group: Group | ControlGroup | None = None,
    info: Mapping[str, object] | None = None,
    spread_over_replicas: bool = True,
) -> AsyncSave | None:
    """Save the state of all ranks as one checkpoint: collective.

    The directory appears complete or not at all (see `commit`). Plain values are taken from the
    first rank.

    Args:
        sharded_state_dict: nested dicts and lists of `ShardedTensor`, `ShardedObject`, factories
            and plain values.
        checkpoint_dir: the checkpoint itself, or its URL in an object store; replaced if it exists.
        sharded_strategy: None or "lattice": the only format that is written.
        async_sharded_save: copy this rank's tensors, write the copies in a thread, and return a
            handle; its `finish` (collective) commits the checkpoint.
        content_metadata: metadata for the loader, read by `load_content_metadata`.
        info: JSON metadata for people and tools, kept in the manifest.
        process_group: the ranks that save together; None is all.
        spread_over_replicas: distribute the writing of a shard over all of its replicas.

    Hashes are always written, and shards that do not make up every tensor exactly once are always
    refused; `validate_access_integrity`, `verify_integrity`, `async_strategy` and
    `preprocess_common_before_consistancy_check` are accepted for callers of Megatron's function.
    """

    def metadata() -> dict[str, Any]:
        _check_strategy(sharded_strategy)
        if content_metadata is None:
            return dict(info or {})
        encoded = typed_json.encode(content_metadata, where=_CONTENT_METADATA)
        return dict(info or {}) | {_CONTENT_METADATA: encoded}

    saving = prepare_save(
        sharded_state_dict,
        checkpoint_dir,
        peers=_peers(process_group),
        info=metadata,
        spread_over_replicas=spread_over_replicas,
    )
    if async_sharded_save:
        return AsyncSave.start(saving)
    saving.write()
    saving.finish()
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str] | ObjectDirectory,
    sharded_strategy: object = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    verify_integrity: bool = True,
    process_group: Group | None = None,
) -> Any:
    """Fill a sharded state dict from a checkpoint of any layout: collective.

    Returns:
        the state dict with tensors and values in place of declarations, merged into the stored
        plain values; with a `RETURN_*` policy (state dict, missing keys, unexpected keys).

    Tensors given in the declarations are filled in place. Every block read is verified against its
    recorded hash, also without `verify_integrity`.
    """
    _check_strategy(sharded_strategy)
    loaded = load_with_report(
        sharded_state_dict,
        checkpoint_dir,
        strict=parse_strict_handling(strict),
        process_group=process_group,
    )
    if parse_strict_handling(strict).returns_keys:
        return loaded.state, loaded.missing, loaded.unexpected
    return loaded.state


def load_with_report(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | os.PathLike[str] | ObjectDirectory,
    *,
    strict: StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    process_group: Group | ControlGroup | None = None,
) -> Loaded:
    """Do as `load`, and also report keys that did not match and the bytes read."""
    peers = _peers(process_group)
    contents = open_any(checkpoint_dir, peers=peers)
    return load_state(sharded_state_dict, contents, peers=peers, strict=strict)


def _peers(process_group: Group | ControlGroup | None) -> ControlGroup:
    return control_group(torch_collectives.world() if process_group is None else process_group)


def load_common_state_dict(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the plain values of a checkpoint; this process alone."""
    return _open_alone(checkpoint_dir).common_state()


def load_content_metadata(
    checkpoint_dir: str | os.PathLike[str] | None = None, **_: object
) -> dict[str, Any] | None:
    """Return the `content_metadata` given to `save`, or None; this process alone."""
    if checkpoint_dir is None:
        raise ConfigError("load_content_metadata needs checkpoint_dir.")
    form = _open_alone(checkpoint_dir).manifest.info.get(_CONTENT_METADATA)
    return None if form is None else typed_json.decode(form)


def load_tensors_metadata(
    checkpoint_dir: str | os.PathLike[str], _: object = None
) -> dict[str, Any]:
    """Return key -> declaration of the full tensor, without data; this process alone."""
    manifest = _open_alone(checkpoint_dir).manifest
    return {
        key: ShardedTensor(
            key=key,
            data=None,
            dtype=DTYPES[stored.dtype],
            local_shape=stored.shape,
            global_shape=stored.shape,
            global_offset=(0,) * len(stored.shape),
            axis_fragmentations=(1,) * len(stored.shape),
        )
        for key, stored in manifest.tensors.items()
    }


def load_plain_tensors(checkpoint_dir: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, whole, on the CPU; this process alone."""
    contents = _open_alone(checkpoint_dir)
    template = load_tensors_metadata(checkpoint_dir)
    for declared in template.values():
        declared.data = torch.empty(declared.global_shape, dtype=declared.dtype)
    state = load_state(template, contents, peers=SingleProcess()).state
    return {key: state[key] for key in template}


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the metadata file of the directory names this format."""
    path = storage_path(checkpoint_dir)
    if isinstance(path, Path) and not (path / METADATA_NAME).is_file():
        return False
    try:
        commit.open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _open_alone(checkpoint_dir: str | os.PathLike[str]) -> Contents:
    return open_any(checkpoint_dir, peers=SingleProcess())


def _check_strategy(strategy: Any) -> None:
    name = strategy[0] if isinstance(strategy, tuple) else strategy
    if name not in (None, BACKEND):
        raise ConfigError(
            f"sharded_strategy={strategy!r} is not available.",
            rule=f"checkpoints are written and read in the format {BACKEND!r}",
            fix="pass sharded_strategy=None",
        )
