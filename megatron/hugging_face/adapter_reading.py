"""Read low-rank adapters from a directory of PEFT's.

Several projections of Hugging Face are one of Megatron (queries, keys and values; gate and up), and
each may have an A of its own. Then Megatron's is those A concatenated, and each B has the columns
of its own: the product is the same, of a rank as large as all of them together. An adapter that
`adapters.write_adapters` wrote has one A for all, and comes back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.interop.stored_view import StoredView, ViewReader
from megatron.core.foundation.errors import CheckpointError
from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import get_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.low_rank_adapter import TARGETS, adapter_parameters
from megatron.core.utils import unwrap_model
from megatron.hugging_face.adapters import CONFIG_NAME, PREFIX, WEIGHTS_NAME
from megatron.hugging_face.model_directory import ModelDirectory, read_json, tensors_of_file
from megatron.hugging_face.reading import full_name
from megatron.hugging_face.weight_map import RowRange

_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "peft_version", "revision",
    "target_modules", "exclude_modules", "task_type", "megatron_config", "megatron_core",
    "runtime_config", "ensure_weight_tying", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config",
})  # fmt: skip
"""Fields that the tensors say already, or that matter before training only."""


@dataclass(frozen=True)
class _Source:
    """The adapter of one of their layers, unread."""

    down: StoredView
    up: StoredView
    rows: tuple[RowRange, ...]


@dataclass(frozen=True)
class PeftAdapter:
    """Adapters of a directory, in terms of our layers."""

    path: Path
    rank: int
    """PEFT's rank times the number of different A that one layer of Megatron needs."""
    alpha: float
    dropout: float
    adapted: Mapping[str, tuple[_Source, ...]]
    """Our name of a weight -> the adapters of their layers in it."""

    @property
    def targets(self) -> list[str]:
        """Names of our layers that have one."""
        found = {name.split(".")[-2] for name in self.adapted}
        return [name for name in TARGETS if name in found]

    def pair(self, megatron_name: str, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return A [r, width] and B [height, r] beside a weight; zeros where there is none."""
        down, up = torch.zeros(self.rank, width), torch.zeros(height, self.rank)
        with ViewReader() as reader:
            columns: list[tuple[Tensor, slice]] = []
            for source in self.adapted.get(megatron_name, ()):
                hf_down = reader.read_full(source.down).float()
                place = next((where for known, where in columns if known.equal(hf_down)), None)
                if place is None:
                    begin = sum(len(known) for known, _ in columns)
                    place = slice(begin, begin + len(hf_down))
                    columns.append((hf_down, place))
                    down[place] = hf_down
                wide = reader.read_full(source.up).float()
                for rows in source.rows:
                    part = wide[rows.begin : rows.begin + rows.length]
                    up[rows.megatron_begin : rows.megatron_begin + rows.length, place] = part
        return down, up


def read_adapters(path: Path, model: ModelDirectory) -> PeftAdapter:
    """Read the config of an adapter and find its tensors.

    Args:
        model: the model that it belongs to.
    Raises:
        CheckpointError: it is not there, not a plain LoRA, or not of this model.
    """
    if not (path / CONFIG_NAME).is_file() or not (path / WEIGHTS_NAME).is_file():
        raise _problem(path, f"it holds no {CONFIG_NAME} with {WEIGHTS_NAME}")
    fields = read_json(path / CONFIG_NAME)
    rank, scale, dropout = _strength(path, fields)
    stored, used = tensors_of_file(path / WEIGHTS_NAME), set()
    geometry, prefix = model.settings.geometry, model.family.prefixes[0]
    adapted, needed = {}, rank
    for rule in model.family.rules(model.settings):
        for megatron_name, hf_names in rule.names(geometry):
            if not megatron_name.endswith(".weight") or megatron_name.split(".")[-2] not in TARGETS:
                continue
            found: dict[int, tuple[StoredView, StoredView]] = {}
            for index, name in enumerate(hf_names):
                layer = PREFIX + full_name(name, prefix).removesuffix(".weight")
                names = [f"{layer}.lora_{part}.weight" for part in "AB"]
                if all(name in stored for name in names):
                    found[index] = (stored[names[0]], stored[names[1]])
                    used.update(names)
            if not found:
                continue
            height = next(iter(found.values()))[1].shape[0]
            heights = [found[i][1].shape[0] if i in found else height for i in range(len(hf_names))]
            rows = rule.row_map(geometry, heights)
            adapted[megatron_name] = tuple(
                _Source(down, up, tuple(r for r in rows if r.source == index))
                for index, (down, up) in found.items()
            )
            needed = max(needed, rank * _num_different([down for down, _ in found.values()]))
    unknown = sorted(set(stored) - used)
    if unknown:
        raise _problem(path, f"{unknown[0]!r} is no adapter of a layer here ({len(unknown)} such)")
    return PeftAdapter(path, needed, scale * needed, dropout, adapted)


def load_adapters(
    adapter: PeftAdapter, chunks: list[nn.Module], groups: ProcessGroupCollection
) -> None:
    """Fill the adapters of this rank's part of a model; those without a file become zero."""
    rank, size = groups.tp.rank(), groups.tp.size()
    for chunk in chunks:
        model = unwrap_model(chunk)
        names = canonical_names(model)
        pairs: dict[str, dict[str, Any]] = {}
        for name, parameter in adapter_parameters(model):
            layer, _, part = names[name].rpartition(".adapter.")
            pairs.setdefault(layer, {})[part] = parameter
        for layer, parts in pairs.items():
            whole = {part: _full_shape(p, size) for part, p in parts.items()}
            full = adapter.pair(f"{layer}.weight", whole["up"][0], whole["down"][1])
            for part, tensor in zip(("down", "up"), full, strict=True):
                local = shard_of(tensor, get_param_meta(parts[part]), rank, size)
                with torch.no_grad():
                    parts[part].copy_(local)


def _full_shape(parameter: Tensor, size: int) -> tuple[int, ...]:
    split = get_param_meta(parameter).split_dim
    return tuple(n * size if dim == split else n for dim, n in enumerate(parameter.shape))


def _num_different(views: list[StoredView]) -> int:
    with ViewReader() as reader:
        tensors = [reader.read_full(view) for view in views]
    return sum(not any(t.equal(other) for other in tensors[:i]) for i, t in enumerate(tensors))


def _strength(path: Path, fields: Mapping[str, Any]) -> tuple[int, float, float]:
    """Return rank, factor on the product, and dropout; refuse what is more than a plain LoRA."""
    rest = {k: v for k, v in fields.items() if k not in _WITHOUT_EFFECT}
    kind, rank = rest.pop("peft_type", "LORA"), rest.pop("r", None)
    alpha, dropout = rest.pop("lora_alpha", None), rest.pop("lora_dropout", 0.0)
    is_by_root, bias = rest.pop("use_rslora", False), rest.pop("bias", "none")
    odd = sorted(name for name, value in rest.items() if value)
    if kind != "LORA" or bias != "none" or odd:
        what = f"{odd[0]} = {rest[odd[0]]!r}" if odd else f"peft_type {kind}, bias {bias}"
        raise _problem(path, f"{what} is more than a product beside frozen layers")
    numbers = (int, float)
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, numbers):
        raise _problem(path, f"r = {rank!r}, lora_alpha = {alpha!r}")
    return rank, alpha / (rank**0.5 if is_by_root else rank), float(dropout)


def _problem(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be loaded as an adapter: {what}.",
        rule="an adapter of PEFT's is a plain LoRA of linear layers, of the model of --load-hf",
        flags=["--load-adapter", "--load-hf"],
        fix="merge it with merge_and_unload() of PEFT, save the model, and give that as --load-hf",
    )


__all__ = ["PeftAdapter", "load_adapters", "read_adapters"]
