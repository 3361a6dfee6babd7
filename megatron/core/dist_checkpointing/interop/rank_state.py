"""The state dicts of Megatron's ranks: names of parameters, plain state, and their assembly.

A file with one rank's state dict does not store the layout; the split of a parameter follows from
its name. The names before megatron.core (`language_model.encoder...`), which Megatron-DeepSpeed
still uses, are read too. `add_stage` joins the tensors of tensor-parallel ranks as boxes of full
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.flat_ranges import Box, boxes_of_shard
from megatron.core.dist_checkpointing.interop.contents import ContentsBuilder, plain_values
from megatron.core.dist_checkpointing.interop.stored_view import StoredView
from megatron.core.foundation.errors import shown

MAX_NAME = 1 << 12
"""Characters of the name of a parameter, which joins the keys of nested dicts."""
FINAL_NORM_OF_HYBRID = ("decoder.final_norm.", "decoder.final_layernorm.")
"""Prefix of the final norm of Megatron's HybridModel, and of every other model."""


@dataclass(frozen=True)
class Split:
    """Split of a parameter over tensor-parallel ranks."""

    dim: int | None
    """The split dimension; None: every rank has the whole parameter."""
    stride: int = 1
    """Blocks that are split one by one: 2 where each rank holds [gate_shard; up_shard]."""

    def full_shape(self, shape: tuple[int, ...], size: int) -> tuple[int, ...]:
        """Return the shape of the full tensor, if `size` ranks hold shards of `shape`."""
        return tuple(n * size if d == self.dim else n for d, n in enumerate(shape))

    def boxes(
        self,
        shape: tuple[int, ...],
        rank: int,
        size: int,
        flat_range: tuple[int, int] | None = None,
    ) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes of a rank's shard of `shape`; see `boxes_of_shard`."""
        return boxes_of_shard(
            shape, self.dim, rank=rank, size=size, stride=self.stride, flat_range=flat_range
        )


_OLD_NAMES = (
    (r"^language_model\.(?:transformer|encoder)\.", "decoder."),
    (r"^language_model\.embedding\.", "embedding."),
    (r"^language_model\.output_layer\.", "output_layer."),
    (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
    (r"\.attention\.query_key_value\.", ".self_attention.linear_qkv."),
    (r"\.post_attention_(?:layernorm|norm)\.", ".pre_mlp_layernorm."),
    (r"\.input_norm\.", ".input_layernorm."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    (r"^decoder\.(?:final_norm|final_layernorm)\.", "decoder.final_layernorm."),
)
_OLD_PATTERNS = tuple((re.compile(old), new) for old, new in _OLD_NAMES)
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)", re.ASCII)
_ROWS = re.compile(
    r"(?:.*\.)?(?:word_embeddings\.weight|output_layer\.weight|linear_qkv\.(?:weight|bias)"
    r"|linear_fc1\.(?:weight|bias)|core_attention\.softmax_offset)"
)
_COLUMNS = re.compile(r".*\.(?:linear_proj|linear_fc2)\.weight")
_WHOLE = re.compile(
    r".*(?:layer_?norm[_.]?(?:weight|bias)|layernorm\.(?:weight|bias)|position_embeddings\.weight"
    r"|(?:linear_proj|linear_fc2)\.bias)"
)


def flatten(tree: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, StoredView]]:
    """Yield (dotted name, tensor) of nested dicts, in order; other values are skipped."""
    for name, value in tree.items():
        if len(prefix) + len(str(name)) > MAX_NAME:
            raise DamagedCheckpointError(
                f"the name of a tensor, {shown(prefix)}, has more than {MAX_NAME} characters."
            )
        if isinstance(value, StoredView):
            yield f"{prefix}{name}", value
        elif isinstance(value, dict):
            yield from flatten(value, f"{prefix}{name}.")


def canonical_name(name: str) -> str:
    """Return the key of a parameter of one layer, under the names that checkpoints use."""
    name = name.removeprefix("module.").removeprefix("model.")
    for pattern, new in _OLD_PATTERNS:
        name = pattern.sub(new, name)
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def split_of(name: str, *, is_gated: bool, size: int) -> Split | None:
    """Return how `size` tensor-parallel ranks split a parameter; None for an unknown name."""
    if size == 1 or _WHOLE.fullmatch(name):
        return Split(None)
    if _COLUMNS.fullmatch(name):
        return Split(1)
    if _ROWS.fullmatch(name):
        return Split(0, 2 if is_gated and ".linear_fc1." in name else 1)
    return None


Tensors = Mapping[str, StoredView]
"""One rank's parameters by their name in the file, in the order of the model."""


class StageNames:
    """The keys of one pipeline stage (or virtual stage): local layer numbers become global."""

    def __init__(self, tensors: Tensors, layer_offset: int) -> None:
        self.keys: dict[str, str] = {}
        self.num_layers = 0
        shapes: dict[str, tuple[int, ...]] = {}
        for name, view in tensors.items():
            key = canonical_name(name)
            shapes[key] = view.shape
            if match := _LAYER.fullmatch(key):
                self.num_layers = max(self.num_layers, int(match[1]) + 1)
                key = f"decoder.layers.{int(match[1]) + layer_offset}.{match[2]}"
            self.keys[name] = key
        # In a gated MLP the output of the first layer is twice the input of the second layer.
        first = next((key for key in shapes if key.endswith(".mlp.linear_fc1.weight")), "")
        second = shapes.get(first.replace("linear_fc1", "linear_fc2"))
        self.is_gated = second is not None and shapes[first][0] == 2 * second[1]


def add_stage(
    builder: ContentsBuilder,
    names: StageNames,
    ranks: Sequence[Tensors],
    *,
    prefix: str = "",
    where: Path,
) -> list[str]:
    """Add the parameters of one stage, or state of their shapes.

    Args:
        ranks: per tensor-parallel rank, tensors by the names of the file.
        prefix: prefix of the keys, for optimizer state.
        where: the directory, for messages.
    Returns:
        names that were left out, because their split over ranks is unknown.
    """
    unknown = []
    for name, first in ranks[0].items():
        views = [rank.get(name) for rank in ranks]
        if any(v is None or v.shape != first.shape or v.dtype != first.dtype for v in views):
            raise DamagedCheckpointError(
                f"{where}: {shown(name, 120)} is not the same on all tensor-parallel ranks.",
                rule="ranks of one stage hold equal shares of the same parameters",
            )
        key = names.keys[name]
        split = split_of(key, is_gated=names.is_gated, size=len(ranks))
        if split is None:
            unknown.append(key)
            continue
        builder.declare(prefix + key, first.dtype, split.full_shape(first.shape, len(ranks)))
        shards = [view for view in views if view is not None]
        for rank, view in enumerate(shards if split.dim is not None else shards[:1]):
            for box, offset in split.boxes(first.shape, rank, len(ranks)):
                builder.add(prefix + key, offset, view.narrow(box))
    return unknown


_KEPT = ("iteration", "num_floating_point_operations_so_far", "opt_param_scheduler")
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_SCALER = ("scale", "growth_tracker", "hysteresis_tracker")
_LAYOUT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
}  # fmt: skip


def common_values(common: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state to keep, settings of the run) from the common state.

    Megatron's settings contain the counters of samples; loss scaler and scheduler have the same
    fields here and there. Random states belong to another generator and are left out.
    """
    args = common.get("args")
    run = plain_values(args) if isinstance(args, dict) else {}
    state = {name: common[name] for name in _KEPT if common.get(name) is not None}
    state |= {name: run[name] for name in _COUNTERS if isinstance(run.get(name), int)}
    scaler = next(_found(common.get("optimizer"), "grad_scaler"), None)
    if isinstance(scaler, dict) and all(name in scaler for name in _SCALER):
        state["grad_scaler"] = {name: scaler[name] for name in _SCALER}
    return state, run


def steps_in(optimizer: object) -> int:
    """Return the number of updates in an optimizer's plain state; 0 if there is none."""
    found = [value for name in ("step", "common_step") for value in _found(optimizer, name)]
    numbers = plain_values({str(i): value for i, value in enumerate(found)}).values()
    steps = [value for value in numbers if isinstance(value, (int, float))]
    return int(max(steps, default=0))


def describe_layout(run: Mapping[str, object]) -> dict[str, Any]:
    """Return the sizes of the axes that the settings name."""
    return {axis: run[name] for axis, name in _LAYOUT.items() if isinstance(run.get(name), int)}


def _found(tree: Any, name: str) -> Iterator[Any]:
    """Yield every value that is under `name` in nested containers."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name and value is not None:
                yield value
            else:
                yield from _found(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _found(value, name)
