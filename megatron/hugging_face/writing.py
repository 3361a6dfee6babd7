"""Write a checkpoint as a Hugging Face model, one tensor at a time.

The source is any opened checkpoint: a native one of any layout, or another program's. The directory
is renamed to its final name when all of its files are on disk.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.durable import (
    describe_os_error,
    rename_durably,
    sync_directory,
    write_all,
    write_durably,
)
from megatron.core.dist_checkpointing.loader import Contents, SliceReader
from megatron.core.dist_checkpointing.shard_file import DTYPES, as_bytes, build_header, dtype_name
from megatron.core.foundation.errors import CheckpointError
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.tokenizers.hugging_face import GENERATION_NAME
from megatron.hugging_face.config_fields import is_without_effect
from megatron.hugging_face.families import family_of_settings
from megatron.hugging_face.families.family import Family, full_name
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.model_directory import CONFIG_NAME, INDEX_NAME, SINGLE_NAME
from megatron.hugging_face.quantized import FP8_BLOCK, is_quantizable, num_blocks, to_block_fp8
from megatron.hugging_face.stored import (
    Source,
    StoredAdapters,
    find_source,
    read_box,
    read_source,
    stored_adapters,
    stored_values,
)
from megatron.hugging_face.tokenizer_files import (
    copy_tokenizer,
    special_ids,
    write_generation_config,
    write_tokenizer,
)
from megatron.hugging_face.weight_map import RowRange, WeightRule

PRECISIONS = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8-block": torch.float8_e4m3fn,
}  # fmt: skip
"""Values of --save-hf-dtype and --dtype -> the argument of `write_model`."""
FILE_BYTES = 5_000_000_000
"""Most bytes of tensors in a file, unless one tensor is larger."""


@dataclass(frozen=True)
class Group:
    """The Hugging Face tensors that are made of one parameter of Megatron."""

    megatron_name: str
    rule: WeightRule
    source: Source
    names: tuple[str, ...]
    rows: tuple[RowRange, ...]
    shapes: tuple[tuple[int, ...], ...]


Described = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype and shape of a Hugging Face tensor."""


def num_bytes(entry: Described) -> int:
    """Return the size of a tensor in bytes."""
    return math.prod(entry[2]) * DTYPES[entry[1]].itemsize


@dataclass(frozen=True)
class Written:
    """A summary of an export."""

    family: str
    num_tensors: int
    num_bytes: int
    files: tuple[str, ...]
    dtype: str
    note: str | None = None
    """A note on the tokenizer's files."""


def write_model(
    contents: Contents,
    target: Path,
    *,
    settings: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    adapters: Contents | None = None,
    companion: Path | None = None,
    tokenizer: TextTokenizer | None = None,
    file_bytes: int = FILE_BYTES,
) -> Written:
    """Write the weights of a checkpoint and a config.json that describes them.

    Args:
        contents: the opened checkpoint.
        target: directory to create; it must not exist.
        settings: describe the model; by default, the settings in the checkpoint.
        adapters: an opened checkpoint of adapters, which are merged into the weights.
        dtype: of the written weights; None keeps the stored dtype. E4M3: weights of linear layers
            in blocks of 128 x 128 with fp32 scales, as DeepSeek-V3 has them, and others in bf16.
        companion: directory of the model that training has continued. Its tokenizer files and the
            config fields that do not affect weights are copied, and its family is preferred.
        tokenizer: written instead of the companion's tokenizer files.
        file_bytes: most bytes of tensors in a file.
    Raises:
        ConfigError: no family can express this model.
        CheckpointError: weights are missing, or the directory cannot be written.
    """
    model = ModelDescription.from_values(stored_values(contents) if settings is None else settings)
    former = {} if companion is None else json.loads((companion / CONFIG_NAME).read_bytes())
    family = family_of_settings(model, preferred=former.get("model_type"))
    groups = plan(contents, family, model)
    merge = None if adapters is None else stored_adapters(adapters)
    stored = DTYPES[groups[0].source.tensor.dtype] if dtype is None else dtype
    fields: dict[str, Any] = {"torch_dtype": str(stored).removeprefix("torch.")}
    if stored == torch.float8_e4m3fn:
        fields = {"torch_dtype": "bfloat16", "quantization_config": _quantization_config(groups)}
    with new_directory(target) as draft:
        files, total = _write_weights(contents, groups, merge, draft, dtype, file_bytes)
        note = _write_config(draft, family, model, fields, companion, tokenizer)
    count = sum(len(group.names) for group in groups)
    return Written(
        family.model_type, count, total, tuple(files), str(stored).removeprefix("torch."), note
    )


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yield a draft directory; rename it to `target` if the block ends without an exception.

    Raises:
        CheckpointError: the target exists, or cannot be written.
    """
    if target.exists():
        raise CheckpointError(
            f"{target} exists already.",
            rule="an export never writes over files",
            fix="name another directory, or remove this one",
        )
    draft = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        yield draft
        sync_directory(draft)
        rename_durably(draft, target)
    except OSError as error:
        raise describe_os_error(error, path=target, doing="writing") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def plan(contents: Contents, family: Family, settings: ModelDescription) -> list[Group]:
    """Find the source of every Hugging Face tensor."""
    vocabulary = settings.unpadded_vocab_size
    groups: list[Group] = []
    planned: set[str] = set()
    for rule in family.rules(settings):
        for megatron_name, hf_names in rule.names(settings):
            if planned.issuperset(hf_names):
                continue  # one tensor that all layers read
            planned.update(hf_names)
            source = find_source(contents, megatron_name)
            shape = source.shape
            if rule.num_blocks is not None:
                shape = (shape[0], shape[1] // len(hf_names), *shape[2:])
                hf_shape = (*shape[:1], *shape[:0:-1]) if rule.is_transposed else shape
                names = tuple(full_name(name, family.prefixes[0]) for name in hf_names)
                hf_shapes = (hf_shape,) * len(names)
                groups.append(Group(megatron_name, rule, source, names, (), hf_shapes))
                continue
            if rule.num_experts is not None:
                shape = (shape[0] * shape[1], *shape[2:])
            if rule.has_vocabulary_rows:
                shape = (rule.num_vocabulary_rows or vocabulary, *shape[1:])
                source = Source(source.tensor, source.layer, shape)
            rows = rule.row_map(settings, [shape[0] // len(hf_names)] * len(hf_names))
            heights = [
                max(r.begin + r.length for r in rows if r.source == i) for i in range(len(hf_names))
            ]
            shapes = [(height, *shape[1:]) for height in heights]
            if rule.is_transposed:
                shapes = [shape[::-1] for shape in shapes]
            before, after = rule.unit_dims
            shapes = [(*[1] * before, *shape, *[1] * after) for shape in shapes]
            if rule.is_number:
                shapes = [()] * len(shapes)
            names = tuple(full_name(name, family.prefixes[0]) for name in hf_names)
            groups.append(Group(megatron_name, rule, source, names, tuple(rows), tuple(shapes)))
    return groups


def described(groups: Sequence[Group], dtype: torch.dtype | None) -> list[Described]:
    """Return the name, dtype and shape of every tensor that `tensors` yields, in its order."""
    return [
        (name, group.source.tensor.dtype if dtype is None else dtype_name(dtype), shape)
        for group in groups
        for name, shape in zip(group.names, group.shapes, strict=True)
    ]


def tensors(
    contents: Contents,
    groups: Sequence[Group],
    merge: StoredAdapters | None,
    dtype: torch.dtype | None,
) -> Iterator[Tensor]:
    """Yield all Hugging Face tensors [...], in order; each is read when the caller takes it.

    At most the parameter of one group is in memory, and the tensor that is yielded.
    """
    reads_whole = merge is not None or not contents.reads_rows
    with contents.open_reader() as reader:
        for group in groups:
            whole = None
            if reads_whole:
                whole = read_source(group.source, reader, contents.device)
                whole = whole if merge is None else merge.merged(group.megatron_name, whole)
                whole = whole if group.rule.num_experts is None else whole.flatten(0, 1)
            for index, shape in enumerate(group.shapes):
                run = _one_run(group, index, shape)
                stored = DTYPES[group.source.tensor.dtype] if whole is None else whole.dtype
                if whole is not None and run is not None:
                    yield whole.narrow(0, run.megatron_begin, run.length).to(dtype or stored)
                    continue
                out = torch.empty(shape, dtype=dtype or stored, device=contents.device)
                for begin, view in _pieces(group, index, out):
                    if whole is not None:
                        view.copy_(whole.narrow(0, begin, len(view)))
                    else:
                        _read_rows(group, reader, begin, view)
                yield out
                del out
            del whole  # free it before the next parameter is read


def _pieces(group: Group, index: int, out: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the ranges of rows of Megatron's parameter that make up a Hugging Face tensor.

    Args:
        out: the tensor with number `index`, [...].
    Yields:
        (first row of a range in Megatron's parameter, view of `out` for the rows of the range).
    """
    rule = group.rule
    if rule.num_blocks is None:
        by_rows = out.t() if rule.is_transposed else out
        if rule.is_number:
            by_rows = out.view(1)
        if any(rule.unit_dims):
            before, after = rule.unit_dims
            by_rows = out.view(out.shape[before : out.dim() - after])
        for rows in group.rows:
            if rows.source == index:
                yield rows.megatron_begin, by_rows.narrow(0, rows.begin, rows.length)
        return
    by_rows = out.transpose(1, 2) if rule.is_transposed else out
    before, height = index * by_rows.shape[1], group.source.shape[1]
    blocks = by_rows.unflatten(1, (-1, rule.num_blocks)).transpose(1, 2)
    for expert, block in product(range(len(out)), range(rule.num_blocks)):
        yield expert * height + before + block * blocks.shape[2], blocks[expert, block]


def _read_rows(group: Group, reader: SliceReader, begin: int, into: Tensor) -> None:
    """Read rows of Megatron's parameter into [rows, ...].

    Rows are counted through all experts: row i of expert e is e * (rows of an expert) + i.
    """
    shape, count = group.source.shape, len(into)
    if group.rule.num_experts is None:
        offset = (begin, *(0 for _ in shape[1:]))
        read_box(group.source, reader, (offset, (count, *shape[1:])), into)
        return
    rest, done = shape[2:], 0
    while done < count:
        expert, row = divmod(begin + done, shape[1])
        length = min(count - done, shape[1] - row)
        box = (expert, row, *(0 for _ in rest)), (1, length, *rest)
        read_box(group.source, reader, box, into.narrow(0, done, length).unsqueeze(0))
        done += length


def _one_run(group: Group, index: int, shape: tuple[int, ...]) -> RowRange | None:
    """Return the range of rows that equals a Hugging Face tensor; None if it needs several."""
    rule, runs = group.rule, [rows for rows in group.rows if rows.source == index]
    if rule.is_transposed or rule.is_number or any(rule.unit_dims):
        return None
    is_full = len(runs) == 1 and runs[0].begin == 0 and runs[0].length == shape[0]
    return runs[0] if is_full else None


def _write_weights(
    contents: Contents,
    groups: Sequence[Group],
    merge: StoredAdapters | None,
    draft: Path,
    dtype: torch.dtype | None,
    file_bytes: int,
) -> tuple[list[str], int]:
    """Write the safetensors files and, of several files, the index; return names and bytes."""
    in_fp8 = dtype == torch.float8_e4m3fn
    entries = _described_in_fp8(groups) if in_fp8 else described(groups, dtype)
    found = tensors(contents, groups, merge, None if in_fp8 else dtype)
    found = _in_block_fp8(groups, found) if in_fp8 else found
    parts: list[list[Described]] = [[]]
    size = total = 0
    for entry in entries:
        length = num_bytes(entry)
        if parts[-1] and size + length > file_bytes:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size, total = size + length, total + length
    count = len(parts)
    files = [
        SINGLE_NAME if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
        for i in range(count)
    ]
    for file, part in zip(files, parts, strict=True):
        write_tensors(draft / file, part, found)
    if count > 1:
        weight_map = {e[0]: file for file, part in zip(files, parts, strict=True) for e in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_durably(draft / INDEX_NAME, json.dumps(index, indent=2).encode())
    return files, total


def _is_coded(group: Group, index: int) -> bool:
    """Return whether block FP8 stores a tensor of a group."""
    is_usual = group.names[index].endswith(".weight") and not group.rule.is_transposed
    return is_usual and is_quantizable(group.megatron_name, group.shapes[index])


def _described_in_fp8(groups: Sequence[Group]) -> list[Described]:
    """Return what `described` returns, for block FP8: scales follow their weights."""
    entries: list[Described] = []
    for group in groups:
        for index, (name, shape) in enumerate(zip(group.names, group.shapes, strict=True)):
            if _is_coded(group, index):
                entries.append((name, "F8_E4M3", shape))
                entries.append((name + "_scale_inv", "F32", num_blocks(shape)))
            else:
                entries.append((name, "BF16", shape))
    return entries


def _in_block_fp8(groups: Sequence[Group], weights: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors of `_described_in_fp8` for the tensors of `tensors`."""
    for group in groups:
        for index in range(len(group.names)):
            weight = next(weights)
            if _is_coded(group, index):
                yield from to_block_fp8(weight)
            else:
                yield weight.to(torch.bfloat16)
            del weight


def _quantization_config(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the field `quantization_config` of block FP8."""
    others = {
        name.rpartition(".")[0]
        for group in groups
        for index, name in enumerate(group.names)
        if len(group.shapes[index]) > 1 and not _is_coded(group, index)
    }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": sorted(others),
    }


def _write_config(
    draft: Path,
    family: Family,
    settings: ModelDescription,
    of_weights: Mapping[str, Any],
    companion: Path | None,
    tokenizer: TextTokenizer | None,
) -> str | None:
    """Write config.json and the tokenizer's files; return a note on the tokenizer, or None.

    Args:
        of_weights: fields that describe the precision of the weights.
    """
    carried: Mapping[str, Any] = {}
    note = None
    ids: dict[str, int | list[int] | None] = {}
    if companion is not None:
        carried = json.loads((companion / CONFIG_NAME).read_bytes())
        carried = {**(carried.get("text_config") or {}), **carried}
    if tokenizer is not None:
        note = write_tokenizer(tokenizer, draft)
        ids = special_ids(tokenizer, settings.unpadded_vocab_size, settings.architecture)
        write_generation_config(draft, ids)
    elif companion is not None:
        copy_tokenizer(companion, draft)
        if (companion / GENERATION_NAME).is_file():
            shutil.copyfile(companion / GENERATION_NAME, draft / GENERATION_NAME)
    fields = {
        name: carried[name] for name in sorted(carried) if is_without_effect(name, carried[name])
    }
    fields["architectures"] = [family.architecture]
    fields |= family.exported(settings) | ids
    fields |= {"model_type": family.model_type, **of_weights}
    fields.pop("dtype", None)
    if family.around:
        text = {n: v for n, v in fields.items() if n not in ("architectures", *of_weights)}
        whole = ("architectures", "model_type", "tie_word_embeddings", *of_weights)
        fields = {**{n: fields[n] for n in whole if n in fields}, **family.around,
                  "text_config": text | {"model_type": f"{family.model_type}_text"}}  # fmt: skip
    write_durably(draft / CONFIG_NAME, (json.dumps(fields, indent=2) + "\n").encode())
    return note


def write_tensors(file: Path, entries: Sequence[Described], values: Iterator[Tensor]) -> None:
    """Write a safetensors file of the described tensors, the next ones of `values`."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(descriptor, build_header(entries, {"format": "pt"}))
        for _ in entries:
            write_all(descriptor, as_bytes(next(values)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
