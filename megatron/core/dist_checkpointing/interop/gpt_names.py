"""Names of GPT parameters in Megatron's formats: canonical keys, and how ranks split them.

Files that hold one rank's state dict say nothing of the layout; it follows from the name. The
names before megatron.core (`language_model.encoder...`), which Megatron-DeepSpeed still uses, are
read too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.stored_view import StoredView
from megatron.core.foundation.errors import shown

MAX_NAME = 1 << 12
"""Characters of the name of a parameter, which joins the keys of nested dicts."""


@dataclass(frozen=True)
class Split:
    """How tensor-parallel ranks share a parameter."""

    dim: int | None
    """The dimension that is cut; None: every rank has all of it."""
    is_gated: bool = False
    """Each rank holds [gate_shard; up_shard]."""


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


def with_layer_offset(name: str, offset: int) -> str:
    """Return a name whose layer number counts from the first layer of the model."""
    match = _LAYER.fullmatch(name)
    return name if match is None else f"decoder.layers.{int(match[1]) + offset}.{match[2]}"


def num_layers(names: Iterator[str] | list[str]) -> int:
    """Return how many layers a stage has, from the names of its parameters."""
    numbers = [int(match[1]) for name in names if (match := _LAYER.fullmatch(name))]
    return max(numbers, default=-1) + 1


def split_of(name: str, *, is_gated: bool) -> Split | None:
    """Return how tensor-parallel ranks split a parameter; None for a name that is not known."""
    if _WHOLE.fullmatch(name):
        return Split(None)
    if _COLUMNS.fullmatch(name):
        return Split(1)
    if _ROWS.fullmatch(name):
        return Split(0, is_gated and ".linear_fc1." in name)
    return None


def is_gated_mlp(tensors: Mapping[str, StoredView]) -> bool:
    """Return whether the first MLP layer is twice as wide as the second one takes."""
    for name, view in tensors.items():
        if name.endswith(".mlp.linear_fc1.weight"):
            second = tensors.get(name.replace("linear_fc1", "linear_fc2"))
            return second is not None and view.shape[0] == 2 * second.shape[1]
    return False
