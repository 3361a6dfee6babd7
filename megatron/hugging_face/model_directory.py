"""Read the config of a Hugging Face model directory, and find its tensors in the files."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.interop.stored_view import (
    MAX_DIMS,
    StoredBytes,
    StoredView,
    ViewReader,
    contiguous_stride,
)
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.foundation.errors import CheckpointError, MegatronError, shown
from megatron.hugging_face.families import Family, family_of_config
from megatron.hugging_face.families.family import full_name
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.quantized import dequantized

CONFIG_NAME = "config.json"
MODELOPT_NAME = "hf_quant_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_MAX_JSON_BYTES = 100 << 20
_MAX_PARTS = 1 << 16
_COMPARED = 1 << 23
"""Number of elements of a tensor that are compared at once."""
_COUNTS = frozenset(
    {
        "num_hidden_layers", "n_layer", "num_layers", "num_nextn_predict_layers",
        "num_attention_heads", "n_head", "num_key_value_heads", "num_local_experts", "num_experts",
        "n_routed_experts", "n_shared_experts", "first_k_dense_replace",
    }
)  # fmt: skip
"""Config fields that count layers, heads or experts."""


@dataclass(frozen=True)
class ModelDirectory:
    """The config of a Hugging Face model; no weights are read."""

    path: Path
    fields: Mapping[str, Any]
    """The fields of config.json; of a model with images, of its language model."""
    family: Family
    settings: ModelDescription
    """The settings that the config describes."""
    notes: tuple[str, ...] = ()
    """Differences between the config and the settings."""


def read_model_directory(path: Path, *, reads_images: bool = False) -> ModelDirectory:
    """Read the config of a model; see `family_of_config`.

    Raises:
        CheckpointError: the file is missing or not readable.
        ConfigError: the config describes a model that is not supported; all reasons are listed.
    """
    file = path / CONFIG_NAME
    if not file.is_file():
        raise CheckpointError(
            f"{path} holds no {CONFIG_NAME}.",
            rule="a Hugging Face model is a directory with config.json and *.safetensors",
            flags=["--load-hf"],
            fix="use the directory that save_pretrained() wrote, or a downloaded snapshot",
        )
    whole = read_json(file)
    if "quantization_config" not in whole and (path / MODELOPT_NAME).is_file():
        whole["quantization_config"] = read_json(path / MODELOPT_NAME).get("quantization")
    family, fields = family_of_config(whole, str(file), reads_images=reads_images)
    _check_counts(file, fields)
    settings = family.read(fields, str(file))
    untied = replace(settings, untie_embeddings_and_output_weights=True)
    has_weights = any((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    if settings == untied or not has_weights:
        return ModelDirectory(path, fields, family, settings)
    stored = family.in_own_names(dequantized(stored_tensors(path), fields, path))
    heads = repeated(family, settings, stored).items() - repeated(family, untied, stored).items()
    for head, embedding in heads:
        if not are_equal(stored[head], stored[embedding]):
            note = (
                f"{CONFIG_NAME} ties the output head to the embedding, but {head} has other values"
                f" than {embedding}: the head is read untied, as Transformers does"
            )
            return ModelDirectory(path, fields, family, untied, (note,))
    return ModelDirectory(path, fields, family, settings)


def repeated(family: Family, settings: ModelDescription, stored: Collection[str]) -> dict[str, str]:
    """Return each tensor that must equal another tensor -> this other tensor, by names in files.

    Args:
        stored: names of the tensors in the files.
    """
    untied = family.rules(replace(settings, untie_embeddings_and_output_weights=True))
    heads = [rule.hf_names[0] for rule in untied if rule.megatron_name == "output_layer.weight"]
    embedding, copies = untied[0].hf_names[0], dict(family.copies)
    if not settings.untie_embeddings_and_output_weights:
        copies |= dict.fromkeys(heads, embedding)
    prefix = family.prefix(stored, embedding)
    named = {full_name(name, prefix): full_name(other, prefix) for name, other in copies.items()}
    return {name: other for name, other in named.items() if {name, other} <= set(stored)}


def are_equal(one: StoredView, other: StoredView) -> bool:
    """Return whether two stored tensors are equal; read them up to the first difference."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    count, rest = one.shape[0], one.shape[1:]
    step = max(_COMPARED // max(math.prod(rest), 1), 1)
    with ViewReader() as reader:
        for begin in range(0, count, step):
            box = (begin, *(0 for _ in rest)), (min(step, count - begin), *rest)
            first, second = (reader.read_full(view.narrow(box)) for view in (one, other))
            if not torch.equal(first, second):
                return False
    return True


def both_forms(path: Path) -> list[str]:
    """Return a note if a directory holds its weights in one file and in several."""
    if not all((path / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return []
    return [f"{SINGLE_NAME} is read, as Transformers does, and {INDEX_NAME} beside it is not"]


def _check_counts(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuse implausible counts before memory is allocated for each layer, head or expert."""
    for name, value in fields.items():
        if name not in _COUNTS:
            continue
        if isinstance(value, int) and not 0 <= value <= _MAX_PARTS:
            raise _damaged(file, f"{name} is {shown(value)}; the limit is {_MAX_PARTS}")


def stored_tensors(path: Path) -> dict[str, StoredView]:
    """Return the place of every tensor of a model, by name, without reading the tensors.

    Raises:
        CheckpointError: files are missing or damaged; the message names them.
    """
    index = path / INDEX_NAME
    if (path / SINGLE_NAME).is_file():
        names, weight_map = [SINGLE_NAME], None
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(n, str) for n in weight_map.values()
        ):
            raise _damaged(index, "it has no weight_map from tensors to files")
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(
            f"{path} holds neither {SINGLE_NAME} nor {INDEX_NAME}.",
            rule="weights are read from safetensors; pickles (*.bin) are not opened",
            flags=["--load-hf"],
            fix="save the model again with save_pretrained(..., safe_serialization=True)",
        )
    found: dict[str, StoredView] = {}
    for name in names:
        if name != Path(name).name:
            raise _damaged(index, f"it names the file {shown(name)}, which has a path in it")
        in_file = tensors_of_file(path / name)
        if twice := sorted(found.keys() & in_file.keys()):
            raise _damaged(path / name, f"{shown(twice[0])} is in another file as well")
        found.update(in_file)
    missing = sorted(set(weight_map or ()) - set(found))
    if missing:
        raise _damaged(index, f"it names {shown(missing[0])}, which no file contains")
    return found


def tensors_of_file(path: Path) -> dict[str, StoredView]:
    """Read the header of a safetensors file."""
    try:
        # The files of a download cache are symbolic links.
        path = path.resolve(strict=True)
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(size - 8, _MAX_JSON_BYTES):
                raise _damaged(path, f"its header has a length of {length} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise _damaged(path, str(error)) from error
    except (struct.error, ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is not an object")
    header.pop("__metadata__", None)
    views = {name: _view(path, name, entry, 8 + length, size) for name, entry in header.items()}
    end, before = 0, ""
    for name, view in sorted(views.items(), key=lambda item: item[1].storage.begin):
        if view.storage.num_bytes and view.storage.begin < end:
            raise _damaged(path, f"{shown(before)} and {shown(name)} overlap")
        end, before = max(end, view.storage.begin + view.storage.num_bytes), name
    return views


def _view(path: Path, name: str, entry: Any, data: int, size: int) -> StoredView:
    try:
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if len(shape) > MAX_DIMS:
            raise ValueError("too many dimensions")
        begin, end = entry["data_offsets"]
        is_valid = (
            all(type(n) is int and n >= 0 for n in (*shape, begin, end))
            and end - begin == math.prod(shape) * dtype.itemsize
            and data + end <= size
        )
    except (KeyError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        raise _damaged(path, f"its header describes {shown(name)} as {shown(entry, 120)}")
    storage = StoredBytes(path, data + begin, end - begin)
    return StoredView(storage, dtype, shape, contiguous_stride(shape))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: the file is too large or does not contain a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise _damaged(path, f"it is larger than {_MAX_JSON_BYTES >> 20} MiB")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise _damaged(path, str(error)) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise _damaged(path, "it is not an object")
    return value


def _damaged(path: Path, why: str) -> MegatronError:
    return CheckpointError(
        f"{path} cannot be read: {why}.",
        rule="the files of a model are complete and in the format of save_pretrained()",
        flags=["--load-hf"],
        fix="download or save the model again",
    )
