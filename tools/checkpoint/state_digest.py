"""Hash a state independently of the layout that stored it: equal state, equal digest.

The digest hashes, in key order, each tensor's name, dtype, shape and full contents, and the plain
state. Two checkpoints of the same state saved in different layouts have the same digest; one
differing bit anywhere gives another.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.loader import Contents, SliceReader, read_box
from megatron.core.dist_checkpointing.manifest import StoredTensor
from megatron.core.dist_checkpointing.object_store import ObjectDirectory
from megatron.core.dist_checkpointing.shard_file import DTYPES, as_bytes, hash_of
from megatron.core.dist_checkpointing.shard_plan import ShardIndex
from megatron.core.dist_checkpointing.typed_json import dump_bytes
from megatron.core.transport.object_collectives import SingleProcess

_ROWS_BYTES = 64 << 20
"""Tensors are assembled in groups of rows of about this size."""

LAYOUT_DEPENDENT = ("args", "generators")
"""Plain entries and objects that describe the run or belong to a rank rather than to the state."""


def checkpoint_digest(
    directory: str | os.PathLike[str] | ObjectDirectory,
    *,
    only: Callable[[str], bool] = lambda key: True,
    with_plain_state: bool = True,
) -> str:
    """Return the digest of a checkpoint; this process alone. Every byte read is verified.

    Args:
        only: which tensor keys take part.
        with_plain_state: include the plain values, other than `LAYOUT_DEPENDENT`.
    """
    contents = open_any(directory, peers=SingleProcess())
    total = hashlib.sha256()
    for key, digest in tensor_digests(contents):
        if only(key):
            total.update(f"{key}\0{digest}\0".encode())
    if with_plain_state:
        total.update(hash_of(dump_bytes(_plain_state(contents))).encode())
    return total.hexdigest()


def tensor_digests(contents: Contents) -> Iterator[tuple[str, str]]:
    """Yield (key, digest) of every tensor in key order."""
    rows = _rows_of_padded(contents)
    with contents.open_reader() as reader:
        for key, tensor in sorted(contents.manifest.tensors.items()):
            limit = rows if tensor.is_padded else None
            yield key, _tensor_digest(tensor, reader, limit)


def _tensor_digest(tensor: StoredTensor, reader: SliceReader, num_rows: int | None) -> str:
    """Hash dtype, shape and row-major contents; a padded tensor counts to `num_rows`."""
    shape = list(tensor.shape)
    if shape and num_rows is not None:
        shape[0] = min(shape[0], num_rows)
    state = hashlib.sha256(f"{tensor.dtype}{shape}".encode())
    index = ShardIndex(tensor)
    row_bytes = max(1, tensor.num_bytes // max(1, tensor.shape[0])) if shape else 1
    step = max(1, _ROWS_BYTES // row_bytes)
    for begin in range(0, shape[0] if shape else 1, step):
        offset, size = [0] * len(shape), list(shape)
        if shape:
            offset[0], size[0] = begin, min(step, shape[0] - begin)
        full = torch.empty(size, dtype=DTYPES[tensor.dtype])
        read_box(index, (tuple(offset), tuple(size)), reader, full)
        state.update(as_bytes(full))
    return state.hexdigest()


def _rows_of_padded(contents: Contents) -> int | None:
    layout = contents.manifest.info.get("layout")
    rows = layout.get("unpadded_vocab_size") if isinstance(layout, dict) else None
    return rows if isinstance(rows, int) and rows > 0 else None


def _plain_state(contents: Contents) -> Any:
    """JSON forms without what depends on the run, with dict keys in order."""
    common = contents.common
    if isinstance(common, dict):
        common = {key: form for key, form in common.items() if key not in LAYOUT_DEPENDENT}
    objects = {
        unique: form
        for unique, form in contents.objects.items()
        if unique.rsplit("/shard_", 1)[0] not in LAYOUT_DEPENDENT
    }
    return _sorted([common, objects])


def _sorted(form: Any) -> Any:
    if isinstance(form, dict):
        return {key: _sorted(form[key]) for key in sorted(form)}
    if isinstance(form, list):
        return [_sorted(item) for item in form]
    return form
