"""Adam's state as Megatron-LM's distributed optimizer stores it by default: by internal buffer.

    optimizer.distributed.dp_group_idx_I.gbuf_idx_G.dtype_D.bucket_idx_B.{param,exp_avg,exp_avg_sq}

A buffer holds the parameters of one model-parallel rank I (tensor rank fastest) and virtual stage
G in reverse order, each beginning at a multiple of 64 elements; buckets cut it between parameters
and are padded at their end. Names are not stored. They follow from the order of parameters in the
model. There are two orders (local layers and Transformer Engine's). The right order and each name
are verified by content: the rounded main weight must equal the weight that the model stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron.core.dist_checkpointing.interop.contents import (
    ContentsBuilder,
    InteropReader,
    InteropShard,
    SavedPart,
    SavedTensor,
)
from megatron.core.dist_checkpointing.interop.rank_state import Split, split_of
from megatron.core.dist_checkpointing.loader import read_box
from megatron.core.dist_checkpointing.manifest import StoredTensor
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.shard_plan import ShardIndex

ALIGNMENT = 64
"""A parameter of a buffer begins at a multiple of so many elements."""
MAX_LAYERS = 1 << 14
KEY = re.compile(
    r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_(.+)"
    r"\.bucket_idx_(\d+)\.(param|exp_avg|exp_avg_sq)",
    re.ASCII,
)
_KINDS = {"param": "fp32_param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_NORM_1 = tuple(f"self_attention.linear_qkv.layer_norm_{p}" for p in ("weight", "bias"))
_NORM_2 = ("mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.layer_norm_bias")
_PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias")
_QK_NORMS = tuple(f"self_attention.{n}_layernorm.{p}" for n in "qk" for p in ("weight", "bias"))
_MLP_1 = ("mlp.linear_fc1.weight", "mlp.linear_fc1.bias")
_MLP_2 = ("mlp.linear_fc2.weight", "mlp.linear_fc2.bias")
ORDERS = (
    (*_NORM_1, *_PROJ, *_QKV, *_QK_NORMS, *_NORM_2, *_MLP_1, *_MLP_2),
    (*_PROJ, *_NORM_1, *_QKV, *_QK_NORMS, *_NORM_2, *_MLP_1, *_MLP_2),
)
"""Parameters of a layer as its modules hold them: local spec, Transformer Engine spec."""
_BEFORE = ("embedding.word_embeddings.weight", "embedding.position_embeddings.weight")
_AFTER = ("decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight")
_STACK = "decoder.layers."

Buckets = dict[int, dict[str, list[tuple[int, SavedTensor]]]]
"""bucket -> kind -> (first element, chunk) in order."""


@dataclass(frozen=True)
class Layout:
    """The parallel layout of the run that saved the checkpoint."""

    tp: int = 1
    pp: int = 1
    vp: int = 1


@dataclass(frozen=True)
class _Parameter:
    """A parameter of one rank."""

    key: str
    """Key of the stored tensor: a stack for layers."""
    layer: int | None
    shape: tuple[int, ...]
    split: Split
    is_copy: bool = False
    """The buffer contains it, but it is stored elsewhere (a tied head on the last stage)."""


def add_buffers(
    builder: ContentsBuilder, buffers: Mapping[tuple[int, int], Buckets], layout: Layout
) -> str | None:
    """Add the moments and main weights of all buffers to the draft.

    Args:
        buffers: (model-parallel rank, buffer) -> its buckets.
    Returns:
        None, or the reason why the parameters' names are unknown; then nothing was added.
    """
    if len(buffers) != layout.tp * layout.pp * layout.vp:
        return f"it has {len(buffers)} buffers for tp {layout.tp}, pp {layout.pp}, vp {layout.vp}"
    tensors = builder.stored()
    stacks = {k: t for k, t in tensors.items() if k.startswith(_STACK)}
    num_layers = {t.shape[0] for t in stacks.values()}
    if max(num_layers, default=0) > MAX_LAYERS:
        return f"it would have {max(num_layers)} layers"
    if len(num_layers) != 1 or next(iter(num_layers)) % (layout.pp * layout.vp):
        return "its layers are not all equal, or are spread unevenly"
    for order in ORDERS:
        if any(k.removeprefix(_STACK) not in order for k in stacks):
            return "it has parameters whose offset in the buffer is not known"
        found = list(_pieces(tensors, buffers, layout, order))
        if found and None not in found and _is_confirmed(tensors, found):
            for piece in found:
                assert piece is not None
                _declare(builder, tensors, piece)
            return None
    return "the main weights in its buffers are not the weights of its model"


@dataclass(frozen=True)
class _Piece:
    """A box of a parameter's state."""

    kind: str
    key: str
    offset: tuple[int, ...]
    source: SavedPart


def _pieces(
    tensors: Mapping[str, StoredTensor],
    buffers: Mapping[tuple[int, int], Buckets],
    layout: Layout,
    order: Sequence[str],
) -> Iterator[_Piece | None]:
    """Yield all pieces; None for a buffer whose shape differs from the model's parameters."""
    for (rank, chunk), buckets in buffers.items():
        t, p = rank % layout.tp, rank // layout.tp
        position, bucket = 0, 0
        for parameter in reversed(_parameters(tensors, layout, order, p, chunk)):
            count = math.prod(parameter.shape)
            begin = -(-position // ALIGNMENT) * ALIGNMENT
            if begin + count > _length(buckets, bucket):
                begin, bucket = 0, bucket + 1
            if begin + count > _length(buckets, bucket):
                yield None
                return
            position = begin + count
            if parameter.is_copy:
                continue
            for kind in _KINDS:
                yield from _cut(buckets[bucket].get(kind, []), kind, begin, parameter, t, layout.tp)
        if bucket + 1 != len(buckets):
            yield None


def _parameters(
    tensors: Mapping[str, StoredTensor], layout: Layout, order: Sequence[str], p: int, chunk: int
) -> list[_Parameter]:
    """Return the parameters of a virtual stage in the order of the model."""
    is_gated = _is_gated(tensors)

    def local(key: str, layer: int | None, is_copy: bool = False) -> _Parameter:
        shape = tensors[key].shape[0 if layer is None else 1 :]
        split = split_of(key, is_gated=is_gated, size=layout.tp) or Split(None)
        cut = tuple(n // layout.tp if d == split.dim else n for d, n in enumerate(shape))
        return _Parameter(key, layer, cut, split, is_copy)

    is_first = p == 0 and chunk == 0
    is_last = p == layout.pp - 1 and chunk == layout.vp - 1
    found = [local(key, None) for key in _BEFORE if is_first and key in tensors]
    num_layers = next(t.shape[0] for k, t in tensors.items() if k.startswith(_STACK))
    per_stage = num_layers // (layout.pp * layout.vp)
    first = (chunk * layout.pp + p) * per_stage
    for layer in range(first, first + per_stage):
        found += [local(_STACK + n, layer) for n in order if _STACK + n in tensors]
    if is_last:
        found += [local(key, None) for key in _AFTER if key in tensors]
        if _AFTER[-1] not in tensors and layout.pp > 1:
            found.append(local(_BEFORE[0], None, is_copy=True))
    return found


def _is_gated(tensors: Mapping[str, StoredTensor]) -> bool:
    first, second = (tensors.get(f"{_STACK}mlp.linear_fc{i}.weight") for i in (1, 2))
    return first is not None and second is not None and first.shape[1] == 2 * second.shape[2]


def _length(buckets: Buckets, bucket: int) -> int:
    rows = buckets.get(bucket, {}).get("param", [])
    return max((first + saved.shape[0] for first, saved in rows), default=0)


def _cut(
    rows: Sequence[tuple[int, SavedTensor]],
    kind: str,
    begin: int,
    parameter: _Parameter,
    rank: int,
    size: int,
) -> Iterator[_Piece | None]:
    """Yield the boxes that chunks of a bucket hold of the parameter at element `begin`."""
    shape, split = parameter.shape, parameter.split
    count = math.prod(shape)
    held = 0
    for first, saved in rows:
        low, high = max(begin, first), min(begin + count, first + saved.shape[0])
        if low >= high:
            continue
        held += high - low
        lead = () if parameter.layer is None else (parameter.layer,)
        # The first rank stores parameters that ranks do not split.
        if split.dim is not None or rank == 0:
            for box, offset in split.boxes(shape, rank, size, (low - begin, high - begin)):
                part = SavedPart(saved, begin - first, shape, box)
                yield _Piece(kind, parameter.key, (*lead, *offset), part)
    if held != count:
        yield None


def _is_confirmed(tensors: Mapping[str, StoredTensor], pieces: Sequence[_Piece | None]) -> bool:
    """Compare the beginning of every piece of main weights with the model's weights."""
    indices: dict[str, ShardIndex] = {}
    with InteropReader() as reader:
        for piece in pieces:
            if piece is None or piece.kind != "param":
                continue
            tensor = tensors[piece.key]
            shard = InteropShard.of(piece.offset, piece.source)
            # One row is enough, and cheap.
            size = tuple(n if d == len(shard.shape) - 1 else 1 for d, n in enumerate(shard.shape))
            main = torch.empty(size, dtype=torch.float32)
            reader.read_box(shard, ((0,) * len(size), size), main)
            weight = torch.empty(size, dtype=DTYPES[tensor.dtype])
            index = indices.setdefault(piece.key, ShardIndex(tensor))
            read_box(index, (piece.offset, size), reader, weight)
            if not torch.equal(main.to(weight.dtype), weight):
                return False
    return True


def _declare(builder: ContentsBuilder, tensors: Mapping[str, StoredTensor], piece: _Piece) -> None:
    key = f"optimizer.state.{_KINDS[piece.kind]}.{piece.key}"
    builder.declare(key, piece.source.saved.dtype, tensors[piece.key].shape)
    builder.add(key, piece.offset, piece.source)
