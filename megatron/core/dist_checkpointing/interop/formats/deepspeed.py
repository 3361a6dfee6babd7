"""Read DeepSpeed's ZeRO checkpoints: weights, fp32 main weights and Adam's moments by parameter.

    SAVE/latest                                               name of the newest tag
    SAVE/TAG/mp_rank_TT_model_states.pt                       stages 0 to 2: weights, names, shapes
    SAVE/TAG/[bf16_]zero_pp_rank_D_mp_rank_TT_optim_states.pt stages 1 to 3: flat fp32 shards
    SAVE/TAG/zero_pp_rank_D_mp_rank_TT_model_states.pt        stage 3: names and shapes alone

Stages 1 and 2 concatenate the flattened parameters of a group, pad the end, and cut the result into
equal parts, one per data-parallel rank. Stage 3 cuts every parameter by itself: each rank's part
has ceil(n / ranks) elements, and a rank's parts follow each other. Either way a parameter is a few
ranges of flat tensors, so it is read in place; nothing is gathered or converted first. See
Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5, arXiv:1910.02054.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.contents import (
    CheckpointFormat,
    ContentsBuilder,
    InteropContents,
    listed,
    not_readable,
    plain_values,
)
from megatron.core.dist_checkpointing.interop.rank_state import (
    StageNames,
    add_stage,
    common_values,
    flatten,
    split_of,
)
from megatron.core.dist_checkpointing.interop.stored_view import (
    StoredView,
    ViewReader,
    contiguous_stride,
    sizes_of,
)
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_dict

_MODEL = re.compile(r"mp_rank_(\d{2,})_model_states\.pt", re.ASCII)
_MODEL_PART = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d{2,})_model_states\.pt", re.ASCII)
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d{2,})_optim_states\.pt", re.ASCII
)
_PIPELINE = re.compile(r"layer_\d+(?:-model_\d+)?-model_states\.pt", re.ASCII)
_EXPERTS = re.compile(r"(?:layer_\d+_expert_\d+|expp_rank_\d+)_.*\.pt", re.ASCII)
_KINDS = ("fp32_param", "exp_avg", "exp_avg_sq")


def is_deepspeed(directory: Path) -> bool:
    """Return whether the directory has the files of one tag."""
    return any(
        p.fullmatch(name) for name in listed(directory) for p in (_MODEL, _MODEL_PART, _PIPELINE)
    )


def open_deepspeed(directory: Path) -> InteropContents:
    """Open one tag.

    Raises:
        CheckpointError: files are missing, or it was saved by the pipeline engine or with experts.
    """
    names = listed(directory)
    for pattern, what in ((_PIPELINE, "pipeline layers"), (_EXPERTS, "experts")):
        if any(pattern.fullmatch(name) for name in names):
            raise not_readable(
                directory,
                f"it holds {what} in files of their own",
                "save it without them, or convert it to Megatron's format there",
            )
    models, shards = _read(directory, names)
    tp_size = len(models)
    builder = ContentsBuilder(directory, "DeepSpeed")
    parts = [_Rank(directory, models[t], shards.get(t, {})) for t in range(tp_size)]
    stage = parts[0].stage
    builder.kind = f"DeepSpeed, ZeRO stage {stage}"
    weights = [part.weights for part in parts]
    stage_names = StageNames(weights[0] or parts[0].placeholders(), 0)
    if weights[0]:
        left_out = add_stage(builder, stage_names, weights, where=directory)
        if left_out:
            builder.notes.append(f"left out, split in an unknown way: {', '.join(left_out[:5])}")
    for kind in _KINDS:
        _add_ranges(builder, stage_names, parts, kind, is_weight=False)
        if kind == "fp32_param" and not weights[0]:
            _add_ranges(builder, stage_names, parts, kind, is_weight=True)
    builder.optimizer_step = parts[0].step
    client = models[0]
    values, run = common_values(client)
    values.setdefault("iteration", client.get("iteration", client.get("global_steps", 0)))
    if "consumed_train_samples" not in values:
        values["consumed_train_samples"] = client.get("global_samples", 0)
    builder.layout = {"tp": tp_size, "dp": max(len(s) for s in shards.values()) if shards else 1}
    return builder.finish(plain_values(values), run)


@dataclass(frozen=True)
class _Range:
    """Elements first .. first + count - 1 of a parameter, and their source."""

    first: int
    count: int
    source: StoredView
    """A flat tensor of `count` elements."""


class _Rank:
    """One tensor-parallel rank: its model file and the optimizer files of its data-parallel row."""

    def __init__(
        self, directory: Path, model: Mapping[str, Any], shards: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self.directory = directory
        module = model.get("module")
        self.weights = dict(flatten(module)) if isinstance(module, dict) else {}
        self.shapes = _groups_of_shapes(model.get("param_shapes"))
        states = [shards[d].get("optimizer_state_dict", {}) for d in sorted(shards)]
        if sorted(shards) != list(range(len(shards))):
            _damaged(directory, "the file of a data-parallel rank is missing")
        self.stage = int(_number(states[0].get("zero_stage"), 1)) if states else 0
        self.step = 0
        self.ranges: dict[str, dict[str, list[_Range]]] = {kind: {} for kind in _KINDS}
        if self.stage >= 3:
            self.weights = {}  # empty placeholders: the shards hold everything
            self._read_stage_3(states)
        elif self.stage > 0 and not any(map(_has_gaps, states)):
            self._read_stage_1_2(states)

    @property
    def all_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter by name."""
        return {name: shape for group in self.shapes for name, shape in group.items()}

    def placeholders(self) -> dict[str, StoredView]:
        """Return views with the right shapes, for callers that read only names and shapes."""
        some = next(iter(self.ranges["fp32_param"].values()))[0].source
        return {
            name: StoredView(some.storage, some.dtype, shape, contiguous_stride(shape))
            for name, shape in self.all_shapes.items()
        }

    def _read_stage_1_2(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Read groups: each is one flat sequence of elements, cut into equal parts."""
        for index, group in enumerate(self.shapes):
            mains = [_item(state.get("single_partition_of_fp32_groups"), index) for state in states]
            moments = [_adam(state.get("base_optimizer_state"), index) for state in states]
            self._learn_step(moments)
            rows = {"fp32_param": mains}
            rows |= {kind: [m.get(kind) for m in moments] for kind in ("exp_avg", "exp_avg_sq")}
            for kind, row in rows.items():
                parts = [view for view in row if isinstance(view, StoredView)]
                if len(parts) != len(states):
                    continue
                position = 0
                for name, shape in group.items():
                    count = math.prod(shape)
                    self.ranges[kind][name] = _cut(parts, position, count, self.directory)
                    position += count

    def _read_stage_3(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Read parameters: each is cut separately, and a rank's parts follow each other."""
        world = len(states)
        for kind in _KINDS:
            rows = [_stage_3_row(state, kind) for state in states]
            self._learn_step([_adam(state.get("optimizer_state_dict"), 0) for state in states])
            if any(not row for row in rows):
                continue
            position = 0
            for name, shape in self.all_shapes.items():
                count = math.prod(shape)
                part = -(-count // world)
                found: list[_Range] = []
                for rank, row in enumerate(rows):
                    first = rank * part
                    held = min(part, count - first)
                    if held > 0:
                        pieces = _cut(row, position, held, self.directory)
                        found += [_Range(first + r.first, r.count, r.source) for r in pieces]
                self.ranges[kind][name] = found
                position += part

    def _learn_step(self, moments: Sequence[Mapping[str, Any]]) -> None:
        with ViewReader() as reader:
            for entry in moments:
                step = entry.get("step")
                if isinstance(step, StoredView) and math.prod(step.shape) == 1:
                    step = reader.read_full(step).reshape(()).item()
                if isinstance(step, (int, float)):
                    self.step = max(self.step, int(step))


def _add_ranges(
    builder: ContentsBuilder,
    names: StageNames,
    parts: Sequence[_Rank],
    kind: str,
    *,
    is_weight: bool,
) -> None:
    """Add one kind of state of every parameter, from the ranges of all tensor-parallel ranks."""
    for name, shape in parts[0].all_shapes.items():
        key = names.keys.get(name)
        if key is None or any(name not in part.ranges[kind] for part in parts):
            continue
        split = split_of(key, is_gated=names.is_gated, size=len(parts))
        if split is None:
            continue
        stored = key if is_weight else f"optimizer.state.{kind}.{key}"
        dtype = parts[0].ranges[kind][name][0].source.dtype
        builder.declare(stored, dtype, split.full_shape(shape, len(parts)))
        for rank, part in enumerate(parts if split.dim is not None else parts[:1]):
            for piece in part.ranges[kind][name]:
                full = piece.source.unflattened(shape, -piece.first)
                bounds = piece.first, piece.first + piece.count
                for box, offset in split.boxes(shape, rank, len(parts), bounds):
                    builder.add(stored, offset, full.narrow(box))


def _cut(row: Sequence[StoredView], first: int, count: int, directory: Path) -> list[_Range]:
    """Return elements first .. first + count - 1 of flat tensors that follow each other."""
    found, begin = [], 0
    for view in row:
        size = math.prod(view.shape)
        low, high = max(first, begin), min(first + count, begin + size)
        if low < high:
            source = view.reshaped((size,)).narrow(((low - begin,), (high - low,)))
            found.append(_Range(low - first, high - low, source))
        begin += size
    if sum(r.count for r in found) != count:
        _damaged(directory, "the flat shards are shorter than the parameters")
    return found


def _has_gaps(state: Mapping[str, Any]) -> bool:
    """Return whether each parameter is padded separately, at offsets that the file omits."""
    groups = state.get("param_alignment_paddings") or ()
    return any(any(group) for group in groups if isinstance(group, (list, tuple)))


def _stage_3_row(state: Mapping[str, Any], kind: str) -> list[StoredView]:
    """Return a rank's flat tensors of one kind, in order."""
    if kind == "fp32_param":
        row = state.get("fp32_flat_groups")
        return [v for v in row if isinstance(v, StoredView)] if isinstance(row, list) else []
    inner = state.get("optimizer_state_dict")
    entries = inner.get("state") if isinstance(inner, dict) else None
    if not isinstance(entries, dict):
        return []
    views = [entries[i].get(kind) for i in sorted(entries) if isinstance(entries[i], dict)]
    return [view for view in views if isinstance(view, StoredView)]


def _adam(state: Any, index: int) -> dict[str, Any]:
    """Return the entry of one group of an optimizer's state dict."""
    if isinstance(state, dict) and isinstance(state.get("state"), dict):
        entry = state["state"].get(index)
    else:
        entry = _item(state, index)
    return entry if isinstance(entry, dict) else {}


def _item(values: Any, index: int) -> Any:
    return values[index] if isinstance(values, (list, tuple)) and index < len(values) else None


def _groups_of_shapes(value: Any) -> list[dict[str, tuple[int, ...]]]:
    groups = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    return [{str(n): sizes_of(s) for n, s in group.items()} for group in groups]


def _read(
    directory: Path, names: Sequence[str]
) -> tuple[dict[int, dict[str, Any]], dict[int, dict[int, dict[str, Any]]]]:
    """Return (model file by tensor rank, optimizer file by tensor rank and data rank)."""
    models: dict[int, dict[str, Any]] = {}
    shards: dict[int, dict[int, dict[str, Any]]] = {}
    for name in names:
        if match := _MODEL.fullmatch(name):
            models[int(match[1])] = read_torch_dict(directory / name)
        elif (match := _MODEL_PART.fullmatch(name)) and int(match[1]) == 0:
            models.setdefault(int(match[2]), read_torch_dict(directory / name))
        elif match := _OPTIMIZER.fullmatch(name):
            shards.setdefault(int(match[2]), {})[int(match[1])] = read_torch_dict(directory / name)
    if sorted(models) != list(range(len(models))) or (shards and sorted(shards) != sorted(models)):
        _damaged(directory, "the file of a tensor-parallel rank is missing")
    return models, shards


def _number(value: Any, default: float) -> float:
    if isinstance(value, (int, float)):
        return value
    digits = re.search(r"\d+", str(value.args[0])) if getattr(value, "args", None) else None
    return float(digits[0]) if digits else default


def _damaged(directory: Path, what: str) -> NoReturn:
    raise DamagedCheckpointError(
        f"{directory} is incomplete or damaged: {what}.",
        rule="a ZeRO checkpoint has the files of all ranks",
        fix="fetch the missing files, or use another tag",
    )


FORMAT = CheckpointFormat(name="deepspeed", recognises=is_deepspeed, open=open_deepspeed)
