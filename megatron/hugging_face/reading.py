"""Open a Hugging Face model as a checkpoint.

The loader reads the slices that a rank needs in its layout; the family's rules locate each slice in
the safetensors files. Nothing is converted in advance, and at most one tensor is held in memory.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.interop.contents import (
    ContentsBuilder,
    InteropContents,
    InteropReader,
    InteropShard,
)
from megatron.core.dist_checkpointing.interop.stored_view import (
    StoredBytes,
    StoredView,
)
from megatron.core.dist_checkpointing.manifest import StoredTensor
from megatron.core.dist_checkpointing.shard_plan import ReadItem
from megatron.core.foundation.errors import CheckpointError
from megatron.hugging_face.families.family import full_name
from megatron.hugging_face.model_directory import (
    ModelDirectory,
    are_equal,
    both_forms,
    read_model_directory,
    repeated,
    stored_tensors,
)
from megatron.hugging_face.quantized import QuantizedView, dequantized, stated_quantization
from megatron.hugging_face.weight_map import WeightRule


class ModelContents(InteropContents):
    """An opened Hugging Face model."""

    def open_reader(self) -> InteropReader:
        """Return a reader of its tensors."""
        return _Reader()


class _Reader(InteropReader):
    """Read a transposed tensor once as a whole, because its rows are scattered over the file."""

    def __init__(self) -> None:
        super().__init__()
        self._held: tuple[StoredBytes, Tensor] | None = None

    def __exit__(self, *details: Any) -> None:
        self._held = None
        super().__exit__(*details)

    def start(self, tensor: StoredTensor, read: ReadItem, into: Tensor) -> None:
        """Fill `into`, which has the shape of `read`."""
        shard = read.shard
        assert isinstance(shard, InteropShard)
        view = shard.source
        assert isinstance(view, StoredView)
        extent = sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)) + 1
        is_one_of_several = 2 * extent * view.dtype.itemsize <= view.storage.num_bytes
        is_direct = isinstance(view, QuantizedView) or view.is_contiguous
        if is_direct or 1 in view.stride[-1:] or is_one_of_several:
            super().start(tensor, read, into)
            return
        if self._held is None or self._held[0] != view.storage:
            self._held = None
            count = view.storage.num_bytes // view.dtype.itemsize
            flat = StoredView(view.storage, view.dtype, (count,), (1,))
            self._held = (view.storage, self.read_full(flat))
        missing = len(shard.shape) - len(view.shape)
        full = self._held[1].as_strided(view.shape, view.stride, view.offset)
        full = full.reshape((1,) * missing + tuple(view.shape)) if missing else full
        offset, shape = read.in_shard
        for axis, (begin, length) in enumerate(zip(offset, shape, strict=True)):
            full = full.narrow(axis, begin, length)
        into.copy_(full)


def open_model(path: Path, *, reads_images: bool = False) -> ModelContents:
    """Open a model for the loader.

    Args:
        reads_images: open the encoder of images, too, if its family is supported.
    Raises:
        CheckpointError, ConfigError: the model cannot be read, or is not supported.
    """
    model = read_model_directory(path, reads_images=reads_images)
    draft = ContentsBuilder(path, f"Hugging Face ({model.family.model_type})")
    stored = dequantized(stored_tensors(path), model.fields, path)
    quantized = sum(isinstance(view, QuantizedView) for view in stored.values())
    if quantized:
        draft.notes.append(
            f"{quantized} weights in 8 or 4 bits are dequantised, and scales of activations are"
            " left out"
        )
    elif stated_quantization(model.fields) is not None:
        draft.notes.append("config.json has a quantization_config, but no weight is quantised")
    stored = model.family.in_own_names(stored)
    draft.notes += [*model.notes, *both_forms(path)]
    if zeros := _zeros(model, stored):
        draft.notes.append(f"{len(zeros)} vectors that no file contains are zero")
        stored |= zeros
    for name, original in repeated(model.family, model.settings, stored).items():
        if not are_equal(stored[name], stored[original]):
            raise _not_as_expected(path, f"{name!r} must equal {original!r}, which it repeats")
    unused = stored.keys() - _used(model, stored)
    for pattern, what in _left_out(model).items():
        if any(re.fullmatch(pattern, name) for name in unused):
            draft.notes.append(f"{what} is left out: it does not affect the model's logits")
    for key, shape, pieces in arranged(model, stored):
        draft.declare(key, pieces[0][1].dtype, shape)
        for offset, view in pieces:
            draft.add(key, offset, view)
    contents = draft.finish({}, model.settings.stated())
    return ModelContents(**vars(contents))


def _used(model: ModelDirectory, stored: dict[str, StoredView]) -> set[str]:
    """Return the names of the tensors that the rules use."""
    rules = model.family.rules(model.settings)
    prefix = model.family.prefix(stored, rules[0].hf_names[0])
    made = [names for rule in rules for _, names in rule.names(model.settings)]
    return {full_name(name, prefix) for names in made for name in names}


def _zeros(model: ModelDirectory, stored: dict[str, StoredView]) -> dict[str, StoredView]:
    """Return the tensors of zeros, in memory, that files of the family may lack."""
    found = {}
    for name in _used(model, stored) - stored.keys():
        for end, setting in model.family.zero_if_absent.items():
            if name.endswith(end):
                data = torch.zeros(getattr(model.settings, setting))
                storage = StoredBytes(
                    model.path / name, 0, data.nbytes, memory=data.view(torch.uint8)
                )
                found[name] = StoredView(storage, data.dtype, tuple(data.shape), (1,))
    return found


def _left_out(model: ModelDirectory) -> dict[str, str]:
    """Return pattern -> description of the weights of this model that are not read.

    `{num_layers}` is the number of a layer after the last layer of the model.
    """
    first = model.settings.num_layers
    number = f"({'|'.join(str(layer) for layer in range(first, first + _LATER))})"
    left_out = model.family.left_out
    return {key.replace("{num_layers}", number): what for key, what in left_out.items()}


_LATER = 8
"""Most layers after the last layer of a model that are left out: they predict later tokens."""
Pieces = list[tuple[tuple[int, ...], StoredView]]
"""(offset in Megatron's tensor, the box at this offset as stored in the files)."""


def arranged(
    model: ModelDirectory, stored: dict[str, StoredView]
) -> list[tuple[str, tuple[int, ...], Pieces]]:
    """Return (Megatron's name, shape, pieces) of every parameter.

    Raises:
        CheckpointError: tensors are missing or unknown.
    """
    family = model.family
    rules = family.rules(model.settings)
    prefix = family.prefix(stored, rules[0].hf_names[0])
    found, used = [], set()
    for rule in rules:
        shapes: list[tuple[int, ...]] | None = None
        for megatron_name, hf_names in rule.names(model.settings):
            names = [full_name(name, prefix) for name in hf_names]
            missing = [name for name in names if name not in stored]
            if missing:
                raise _not_as_expected(model.path, f"there is no tensor {missing[0]!r}")
            used.update(names)
            shapes = shapes or [stored[name].shape for name in names]
            odd = [n for n, s in zip(names, shapes, strict=True) if stored[n].shape != s]
            if odd:
                raise _not_as_expected(
                    model.path,
                    f"{odd[0]!r} has the shape {stored[odd[0]].shape}, unlike other layers",
                )
            found.append((megatron_name, *_pieces(model, rule, names, stored)))
    meaningless = [full_name(pattern, prefix) for pattern in family.without_meaning]
    meaningless += _left_out(model)
    used.update(repeated(family, model.settings, stored))
    unknown = [
        name
        for name in stored
        if name not in used and not any(re.fullmatch(p, name) for p in meaningless)
    ]
    if unknown:
        raise _not_as_expected(
            model.path, f"{len(unknown)} tensors are unknown, such as {unknown[0]!r}"
        )
    return found


def _pieces(
    model: ModelDirectory,
    rule: WeightRule,
    names: list[str],
    stored: dict[str, StoredView],
) -> tuple[tuple[int, ...], Pieces]:
    views = [stored[name] for name in names]
    if rule.num_blocks is not None:
        return _alternating_pieces(model, rule, names, views)
    if rule.is_transposed:
        views = [replace(v, shape=v.shape[::-1], stride=v.stride[::-1]) for v in views]
    if rule.is_number:
        views = [_as_one_row(model, *named) for named in zip(names, views, strict=True)]
    if any(rule.unit_dims):
        views = [_without_units(model, rule, *named) for named in zip(names, views, strict=True)]
    rest = views[0].shape[1:]
    classes = rule.num_vocabulary_rows or model.settings.unpadded_vocab_size
    if rule.has_vocabulary_rows and views[0].shape[0] != classes:
        raise _not_as_expected(
            model.path, f"{names[0]!r} has {views[0].shape[0]} rows for a vocabulary of {classes}"
        )
    if any(v.shape[1:] != rest or v.dtype != views[0].dtype for v in views):
        raise _not_as_expected(model.path, f"{', '.join(names)} differ in shape or dtype")
    pieces: Pieces = []
    height = 0
    for rows in rule.row_map(model.settings, [view.shape[0] for view in views]):
        view = views[rows.source]
        if rows.begin + rows.length > view.shape[0]:
            raise _not_as_expected(
                model.path, f"{names[rows.source]!r} has {view.shape[0]} rows, too few"
            )
        box = ((rows.begin, *(0 for _ in rest)), (rows.length, *rest))
        pieces.append(((rows.megatron_begin, *(0 for _ in rest)), view.narrow(box)))
        height = max(height, rows.megatron_begin + rows.length)
    if sum(piece.shape[0] for _, piece in pieces) != sum(view.shape[0] for view in views):
        raise _not_as_expected(model.path, f"{', '.join(names)} have more rows than in the config")
    count = rule.num_experts
    if count is None:
        return (height, *rest), pieces
    each = height // count
    numbered = [((*divmod(place[0], each), *place[1:]), view) for place, view in pieces]
    return (count, each, *rest), numbered


def _as_one_row(model: ModelDirectory, name: str, view: StoredView) -> StoredView:
    if view.shape:
        raise _not_as_expected(model.path, f"{name!r} has the shape {view.shape}")
    return replace(view, shape=(1,), stride=(1,))


def _without_units(
    model: ModelDirectory, rule: WeightRule, name: str, view: StoredView
) -> StoredView:
    before, after = rule.unit_dims
    kept = slice(before, len(view.shape) - after)
    if view.shape != (*[1] * before, *view.shape[kept], *[1] * after) or not view.shape[kept]:
        raise _not_as_expected(model.path, f"{name!r} has the shape {view.shape}")
    return replace(view, shape=view.shape[kept], stride=view.stride[kept])


def _alternating_pieces(
    model: ModelDirectory, rule: WeightRule, names: list[str], views: list[StoredView]
) -> tuple[tuple[int, ...], Pieces]:
    """Return the shape and the blocks of every expert in the tensors of all experts."""
    pieces: Pieces = []
    count, height, rest = 0, 0, list[int]()
    for name, view in zip(names, views, strict=True):
        (count, rows, *rest), found = _blocks_of_experts(model, rule, name, view)
        pieces += [((expert, height + row, *zeros), v) for (expert, row, *zeros), v in found]
        height += rows
    return (count, height, *rest), pieces


def _blocks_of_experts(
    model: ModelDirectory, rule: WeightRule, name: str, view: StoredView
) -> tuple[tuple[int, ...], Pieces]:
    """Return the shape and the blocks of every expert in one of these tensors."""
    count, blocks = rule.num_experts, rule.num_blocks
    assert count and blocks
    if rule.is_transposed:
        shape, stride = view.shape, view.stride
        view = replace(
            view, shape=(*shape[:1], *shape[:0:-1]), stride=(*stride[:1], *stride[:0:-1])
        )
    if len(view.shape) < 2 or view.shape[0] != count or view.shape[1] % blocks:
        raise _not_as_expected(
            model.path, f"{name!r} has the shape {view.shape}, which does not fit {count} experts"
        )
    (_, height, *rest), (expert_step, row_step, *steps) = view.shape, view.stride
    rows = height // blocks
    pieces: Pieces = [
        (
            (expert, block * rows, *(0 for _ in rest)),
            replace(
                view,
                shape=(rows, *rest),
                stride=(row_step * blocks, *steps),
                offset=view.offset + expert * expert_step + block * row_step,
            ),
        )
        for expert in range(count)
        for block in range(blocks)
    ]
    return view.shape, pieces


def _not_as_expected(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {what}.",
        rule="a model has exactly the tensors that its config.json describes",
        flags=["--load-hf"],
        fix="download or save the model again; config.json and weights must belong together",
    )


__all__ = ["ModelContents", "arranged", "open_model"]
