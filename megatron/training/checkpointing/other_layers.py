"""Read a model from a checkpoint of a model with other layers.

`read_from_dense` initializes a mixture of experts from a dense model (A. Komatsuzaki et al.,
"Sparse Upcycling", arXiv 2212.05055): every expert is a copy of the dense MLP, the router has its
own initial values, and all other weights are the dense model's. If the weights of the chosen
experts add up to 1, the first outputs equal the dense model's.

`read_from_halves` reads the layers of a GPT from a hybrid model, and the reverse. A layer has two
halves, a mixer and an MLP; a layer of one letter in --hybrid-layer-pattern has only one of them.
The n-th half of a kind reads weights and optimizer state of the n-th half of this kind, so that a
model of `M*-*-` reads a GPT of two layers. A half of a kind that the checkpoint lacks, here
Mamba-2, keeps its initial values.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.interop.contents import slice_of_stack
from megatron.core.dist_checkpointing.loader import Contents
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.tree import map_leaves
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transformer.config.layer_kinds import (
    ATTENTION,
    DENSE,
    EXPERTS,
    GATED_DELTA_NET,
    KIMI,
    MAMBA,
    NOTHING,
    SHORT_CONV,
    SPARSE_ATTENTION,
    LayerKind,
)
from megatron.core.transformer.transformer_config import TransformerConfig

EXPERT_WEIGHTS = "experts.experts."
NEW_PARTS = (".mlp.router.", ".mlp.shared_experts.")
NORM, FUSED_NORM = "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"


def read_from_dense(state: ShardedStateDict, manifest: Manifest) -> ShardedStateDict:
    """Return declarations that fill a model with experts from a dense checkpoint.

    Every expert reads the whole MLP of its layer. Parts that a dense model lacks (routers, shared
    experts) keep their values.
    """

    def other(leaf: Any) -> Any:
        if any(part in getattr(leaf, "key", "") for part in NEW_PARTS):
            return LocalNonpersistentObject(leaf.data)
        if isinstance(leaf, ShardedTensorFactory):
            build = leaf.build_fn
            return replace(leaf, build_fn=lambda *args: map_leaves(other, build(*args)))
        if isinstance(leaf, ShardedTensor) and leaf.key not in manifest.tensors:
            return _in_dense(leaf, manifest)
        return leaf

    return map_leaves(other, state)


def _in_dense(wanted: ShardedTensor, manifest: Manifest) -> ShardedTensor:
    found = wanted
    if EXPERT_WEIGHTS in found.key:
        axis = found.prepend_axis_num - 1  # the axis of experts is the last prepended axis
        found = replace(
            found,
            key=found.key.replace(EXPERT_WEIGHTS, ""),
            global_shape=found.global_shape[:axis] + found.global_shape[axis + 1 :],
            global_offset=found.global_offset[:axis] + found.global_offset[axis + 1 :],
            axis_fragmentations=None,
            prepend_axis_num=axis,
        )
    if found.key not in manifest.tensors:
        found = replace(found, key=found.key.replace(NORM, FUSED_NORM))
    found = slice_of_stack(found, manifest)
    return found if found.key in manifest.tensors else wanted


_HALF = re.compile(
    r"(?P<before>optimizer\.state\.\w+\.)?"
    r"(?P<stack>decoder|mtp\.layers\.\d+\.transformer_layer)\."
    r"(?P<layers>layers\.)?(?:(?P<layer>\d+)\.)?"
    r"(?P<name>(?:self_attention|input_layernorm|post_self_attn_layernorm"
    r"|mlp|pre_mlp_layernorm|post_mlp_layernorm)\..+)",
    re.ASCII,
)
"""The key of a tensor of a half; `layers` without `layer` is a stack of all layers."""
_MIXER_OF_NAME = {
    "self_attention.D": MAMBA,
    "self_attention.decay_up_weight": KIMI,
    "self_attention.A_log": GATED_DELTA_NET,
    "self_attention.in_proj.weight": SHORT_CONV,
    "self_attention.core_attention.indexer.linear_wk.weight": SPARSE_ATTENTION,
}
"""A tensor that only this mixer has, or no mixer after it."""


def read_from_halves(
    state: ShardedStateDict, contents: Contents, config: TransformerConfig, strict: StrictHandling
) -> tuple[ShardedStateDict, str | None]:
    """Return declarations that read each half of a layer from the half that it corresponds to.

    Args:
        config: config of the model.
    Returns:
        the state itself, if model and checkpoint have the same layers, or whole layers only; and
        otherwise a log line.
    Raises:
        CheckpointError: the numbers or the order of halves differ, or halves of the checkpoint
            would be dropped and `strict` does not permit it. On every rank, because all ranks have
            the same description.
    """
    stored, own = _stored_kinds(contents.manifest), {"decoder": config.layer_kinds()}
    for depth, kinds in enumerate(config.prediction_kinds()):
        own[f"mtp.layers.{depth}.transformer_layer"] = kinds
    changed = {n for n, kinds in own.items() if n in stored and stored[n] != kinds}
    are_whole = all(kind.mixer and kind.mlp for n in changed for kind in (*own[n], *stored[n]))
    if are_whole:
        return state, None
    places: dict[tuple[str, int, bool], int] = {}
    kept = 0
    for stack in changed:
        here, there = _halves(own[stack]), _halves(stored[stack])
        common = {half for _, half in here} & {half for _, half in there}
        pairs = [[pair for pair in side if pair[1] in common] for side in (here, there)]
        is_dropping = len(pairs[1]) < len(there) and not strict.tolerates_unexpected
        if is_dropping or [half for _, half in pairs[0]] != [half for _, half in pairs[1]]:
            raise CheckpointError(
                f"{contents.directory} has {_shown(there)}; this model has {_shown(here)}.",
                rule="the layers of each kind are read in their order, and no trained layer is"
                " dropped silently",
                flags=["--hybrid-layer-pattern", "--num-layers", "--dist-ckpt-strictness"],
                fix="use a pattern with the same layers in the same order; a kind that the model"
                " lacks is dropped with --dist-ckpt-strictness ignore_all",
            )
        for (layer, half), (found, _) in zip(*pairs, strict=True):
            places[stack, layer, half in (DENSE, EXPERTS)] = found
        kept += len(here) - len(pairs[0])

    def other(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            build = leaf.build_fn
            return replace(leaf, build_fn=lambda *args: map_leaves(other, build(*args)))
        match = _HALF.fullmatch(leaf.key) if isinstance(leaf, ShardedTensor) else None
        if match is None or match["stack"] not in changed:
            return leaf
        is_stacked = match["layers"] is not None and match["layer"] is None
        layer = leaf.global_offset[0] if is_stacked else int(match["layer"] or 0)
        found = places.get((match["stack"], layer, "mlp" in match["name"].split(".")[0]))
        if found is None:
            return LocalNonpersistentObject(leaf.data)
        return _in_layer(leaf, match, found, contents.manifest)

    note = f"the layers are read from {_shown(_halves(stored['decoder']))}"
    if kept:
        note += f"; {kept} that the checkpoint lacks keep their initial values"
    return map_leaves(other, state), note


def _in_layer(
    wanted: ShardedTensor, match: re.Match[str], layer: int, manifest: Manifest
) -> ShardedTensor:
    """Return the declaration of the same tensor in another layer of the checkpoint."""
    skipped = int(match["layers"] is not None and match["layer"] is None)
    shape, offset = wanted.global_shape[skipped:], wanted.global_offset[skipped:]
    axes = wanted.prepend_axis_num - skipped
    stack, name = match["stack"], match["name"]
    key = f"{stack}.{name}"  # the only layer of a depth
    if key not in manifest.tensors:
        key = f"{stack}.layers.{name}"
        if key in manifest.tensors:
            shape, offset = (manifest.tensors[key].shape[0], *shape), (layer, *offset)
            axes += 1
        else:
            key = f"{stack}.layers.{layer}.{name}"
    return replace(
        wanted,
        key=(match["before"] or "") + key,
        global_shape=shape,
        global_offset=offset,
        axis_fragmentations=None,
        prepend_axis_num=axes,
    )


def _stored_kinds(manifest: Manifest) -> dict[str, tuple[LayerKind, ...]]:
    """Return the kinds of the layers in the checkpoint, for each stack, by the names of weights."""
    names: dict[str, dict[int, set[str]]] = {}
    for key, tensor in manifest.tensors.items():
        match = _HALF.fullmatch(key)
        if match is None or match["before"]:
            continue
        is_stacked = match["layers"] is not None and match["layer"] is None
        for layer in range(tensor.shape[0]) if is_stacked else (int(match["layer"] or 0),):
            of_stack = names.setdefault(match["stack"], {})
            of_stack.setdefault(layer, set()).add(match["name"])
    return {
        stack: tuple(_kind(layers[number]) for number in sorted(layers))
        for stack, layers in names.items()
    }


def _kind(names: set[str]) -> LayerKind:
    parts = {name.split(".")[0] for name in names}
    mixer = next((mixer for name, mixer in _MIXER_OF_NAME.items() if name in names), ATTENTION)
    mlp = EXPERTS if "mlp.router.weight" in names else DENSE
    return LayerKind(
        mixer if "self_attention" in parts else NOTHING, mlp if "mlp" in parts else NOTHING
    )


def _halves(kinds: Iterable[LayerKind]) -> list[tuple[int, str]]:
    """Return (layer, mixer or MLP) of each half, in their order."""
    return [
        (layer, half)
        for layer, kind in enumerate(kinds)
        for half in (kind.mixer, kind.mlp)
        if half != NOTHING
    ]


def _shown(halves: list[tuple[int, str]]) -> str:
    counts = Counter(half for _, half in halves)
    return " and ".join(f"{count} layers of {half}" for half, count in counts.items())
