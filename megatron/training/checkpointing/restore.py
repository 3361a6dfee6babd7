"""Restore a run from an opened checkpoint of this or another program.

A checkpoint of another program is opened with our keys for weights, moments and main weights. The
optimizer's settings (learning rate, weight decay, ...) are this run's, because the other program
groups parameters differently.

Some tensors are read from another key than their own:

* Precision: a half-precision run stores weights twice, in half precision and as the optimizer's
  fp32 main weights; an fp32 run stores them once. An fp32 run reads the main weights if they are
  stored, and a half-precision run reads main weights from the weights of an fp32 run.
* Tying: a model with tied embeddings stores one tensor for embedding and head. A run with a
  separate head copies this tensor and its optimizer state to the head, so that the first steps
  change the head about as much as they would change the shared tensor. With zero moments the first
  steps would be much larger.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron.core.dist_checkpointing.collective import print_once
from megatron.core.dist_checkpointing.flat_ranges import describe_box
from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.loader import Contents, Loaded, load_state
from megatron.core.dist_checkpointing.manifest import Manifest
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.shard_file import DTYPES
from megatron.core.dist_checkpointing.tree import leaves, map_leaves
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_handling
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport.object_collectives import ControlGroup, SingleProcess
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing.other_layers import (
    EXPERT_WEIGHTS,
    read_from_dense,
    read_from_halves,
)
from megatron.training.checkpointing.run_state import (
    CheckpointContext,
    apply_model,
    apply_optimizer,
    apply_rng,
    declare_run,
    describe_layout,
    show_layout,
    train_state_of,
)
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState

NOT_FOR_OWN_STATE: dict[str, Any] = {
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "moe_use_upcycling": False,
}
"""Settings for the initial checkpoint of a run, and their values for the run's own later state."""


@dataclass
class Restored:
    """Values from a loaded checkpoint, in addition to the state of model and optimizer."""

    path: StoragePath
    train_state: TrainState
    args: Mapping[str, Any]
    """Settings of the run that saved the checkpoint."""
    extra: dict[str, Any]
    """Argument `extra` of the save."""
    layout: Mapping[str, Any] = field(default_factory=dict)


class Restorer:
    """Loads checkpoints into the parts of one run. Every method is a collective."""

    def __init__(
        self, settings: CheckpointSettings, context: CheckpointContext, peers: ControlGroup
    ) -> None:
        self.settings, self.context, self.peers = settings, context, peers

    def restore(self, contents: Contents, *, is_finetuning: bool) -> Restored:
        """Load a checkpoint of any layout into the parts.

        Args:
            is_finetuning: load weights only, and begin at iteration 0.
        """
        settings = self.settings
        has_experts = any(EXPERT_WEIGHTS in key for key in contents.manifest.tensors)
        is_upcycling = settings.moe_use_upcycling and not has_experts
        is_finetuning = is_finetuning or is_upcycling
        with_optimizer = not (is_finetuning or settings.no_load_optim)
        with_rng = not (is_finetuning or settings.no_load_rng)
        has_optimizer = self.context.optimizer is not None
        if isinstance(contents, InteropContents):
            for line in check_interop(contents, needs_moments=with_optimizer and has_optimizer):
                print_once(self.peers, f"  {line}")
        template = declare_run(
            self.context, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=True
        )
        if is_upcycling:
            template = read_from_dense(template, contents.manifest)
            print_once(self.peers, "  every expert is a copy of the dense MLP of its layer")
        strict = parse_strict_handling(settings.dist_ckpt_strictness)
        of_layers = None
        config = getattr(unwrap_model(self.context.model[0]), "config", None)
        if isinstance(config, TransformerConfig) and self.context.weights != "adapters":
            template, of_layers = read_from_halves(template, contents, config, strict)
        vocabulary = self.context.args.get("unpadded_vocab_size")
        for note in (
            of_layers,
            compare_heads(template, contents, strict, peers=self.peers),
            compare_vocabularies(vocabulary, contents, strict),
        ):
            if note:
                print_once(self.peers, f"  {note}")
        generators = template.get("generators")
        if generators is not None and generators.unique_key not in contents.objects:
            del template["generators"]  # saved by another grid of ranks; our draws do not need it
        loaded = load_state(
            template,
            contents,
            peers=self.peers,
            strict=strict,
            key_mapping=stored_key,
        )
        if isinstance(contents, InteropContents) and with_optimizer and has_optimizer:
            state, scheduler = loaded.state, self.context.scheduler
            contents.complete_optimizer(state["optimizer"], template["optimizer"])
            if scheduler is not None and "opt_param_scheduler" not in state:
                scheduler.step(increment=int(state.get("consumed_train_samples", 0)))
        flags = {"with_optimizer": with_optimizer, "with_rng": with_rng}
        return self._apply(contents, loaded, **flags, is_finetuning=is_finetuning)

    def restore_local(self, contents: Contents) -> Restored:
        """Load the shards of this rank from a local checkpoint."""
        flags = {
            "with_optimizer": not self.settings.no_load_optim,
            "with_rng": not self.settings.no_load_rng,
        }
        template = as_local_state(declare_run(self.context, **flags, is_loading=True))
        loaded = load_state(template, contents, peers=SingleProcess())
        return self._apply(contents, loaded, **flags, is_finetuning=False)

    def _apply(
        self,
        contents: Contents,
        loaded: Loaded,
        *,
        with_optimizer: bool,
        with_rng: bool,
        is_finetuning: bool,
    ) -> Restored:
        """Load the state into the parts."""
        state, info = loaded.state, contents.manifest.info
        for chunk in self.context.model:
            for buffer in getattr(chunk, "gradient_buffers", ()):
                buffer.params.prepare_update()
        apply_model(self.context, state, strict=not loaded.unexpected)
        apply_optimizer(self.context, state, was_loaded=with_optimizer)
        if with_rng:
            apply_rng(state)
        layout, args, extra = info.get("layout"), state.get("args"), state.get("extra")
        restored = Restored(
            contents.directory,
            TrainState() if is_finetuning else train_state_of(state),
            vars(args) if isinstance(args, Namespace) else {},
            extra if isinstance(extra, dict) and not is_finetuning else {},
            layout if isinstance(layout, dict) else {},
        )
        before, now = show_layout(restored.layout), show_layout(describe_layout(self.context))
        if before != now:
            print_once(self.peers, f"  layout of the checkpoint: {before}; of this run: {now}")
        return restored


def check_interop(contents: InteropContents, *, needs_moments: bool) -> list[str]:
    """Return log lines about a checkpoint of another program.

    Raises:
        CheckpointError: moments are needed and cannot be read; on every rank, because all ranks
            have the same description.
    """
    why = contents.why_no_moments
    if needs_moments and why is not None:
        raise CheckpointError(
            f"{contents.directory}: {why}.",
            rule="a resumed run needs its optimizer state",
            flags=["--load", "--no-load-optim", "--finetune"],
            fix="give --no-load-optim to continue with zero moments, or --finetune to start at"
            " step 0",
        )
    return [f"{contents.directory} is a checkpoint of {contents.kind}", *contents.notes]


MAIN_WEIGHT_PREFIX = "optimizer.state.fp32_param."
HEAD = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def is_head(key: str) -> bool:
    """Return whether a key names a head's weight or its optimizer state."""
    return key == HEAD or key.endswith(f".{HEAD}")


def stored_key(wanted: ShardedTensor, manifest: Manifest) -> str:
    """Return the key of the stored tensor that fills `wanted`."""
    key, stored = wanted.key, manifest.tensors
    if is_head(key) and not any(map(is_head, stored)):
        key = key.removesuffix(HEAD) + EMBEDDING
    if key.startswith(MAIN_WEIGHT_PREFIX):
        weight = key.removeprefix(MAIN_WEIGHT_PREFIX)
        return weight if key not in stored and weight in stored else key
    main = MAIN_WEIGHT_PREFIX + key
    if not (key in stored and main in stored and wanted.dtype == torch.float32):
        return key
    return main if DTYPES[stored[key].dtype].itemsize < wanted.dtype.itemsize else key


def compare_heads(
    template: ShardedStateDict, contents: Contents, strict: StrictHandling, *, peers: ControlGroup
) -> str | None:
    """Compare the model's head with the stored one. Collective.

    Returns:
        a log line if the head is copied from the embedding.
    Raises:
        CheckpointError: on every rank, if the checkpoint has a separate head, the model's head is
            the embedding, and `strict` does not permit unexpected tensors.
    """
    has_own = any(is_head(leaf.key) for _, leaf in leaves(template) if hasattr(leaf, "key"))
    wanted = peers.gather(has_own)
    is_wanted = peers.broadcast(wanted is not None and any(wanted))
    stored = contents.manifest.tensors
    is_stored = any(map(is_head, stored))
    if is_stored and not is_wanted and not strict.tolerates_unexpected:
        raise CheckpointError(
            f"{contents.directory} contains a separate head ({HEAD}); in this model the word "
            "embedding is the head.",
            rule="no trained weight is dropped silently",
            flags=["--untie-embeddings-and-output-weights", "--dist-ckpt-strictness"],
            fix="add --untie-embeddings-and-output-weights, or drop the stored head with "
            "--dist-ckpt-strictness ignore_all",
        )
    if is_wanted and not is_stored and any(key.endswith(EMBEDDING) for key in stored):
        return "the head is a copy of the word embedding, as the checkpoint's embeddings are tied"
    return None


def compare_vocabularies(classes: object, contents: Contents, strict: StrictHandling) -> str | None:
    """Compare the vocabulary size of this run with the stored one, without padding rows.

    Args:
        classes: the vocabulary size of this run without padding; None skips the comparison.
    Returns:
        a log line if rows are missing or dropped, and `strict` permits it.
    Raises:
        CheckpointError: the sizes differ; on every rank, because all have the same description.
    """
    if not isinstance(classes, int):
        return None
    layout, args = contents.manifest.info.get("layout"), contents.common_state().get("args")
    known = dict(vars(args) if isinstance(args, Namespace) else {})
    known |= layout if isinstance(layout, dict) else {}
    stored = known.get("unpadded_vocab_size")
    if not isinstance(stored, int):
        # The other program stores the padded size only, which may still be too small.
        rows = [t.shape[0] for key, t in contents.manifest.tensors.items() if key == EMBEDDING]
        stored = min([classes, *rows])
    if stored == classes:
        return None
    what = "are missing" if stored < classes else "are dropped"
    found = f"rows {min(stored, classes)} to {max(stored, classes) - 1} of the vocabulary {what}"
    if strict.tolerates_unexpected:
        return f"{found}: this run has {classes} rows, and {contents.directory} has {stored}"
    fix = (
        "use the tokenizer of the checkpoint" if stored < classes else f"give --vocab-size {stored}"
    )
    raise CheckpointError(
        f"{contents.directory} has a vocabulary of {stored}; this run has {classes}: {found}.",
        rule="the checkpoint provides every row of the vocabulary except padding",
        flags=["--vocab-size", "--tokenizer-type", "--tokenizer-model", "--dist-ckpt-strictness"],
        fix=f"{fix}; with --dist-ckpt-strictness ignore_all missing rows are random, and"
        " additional rows are dropped",
    )


def as_local_state(state: ShardedStateDict) -> ShardedStateDict:
    """Return `state` with each shard declared as a full tensor with a unique name.

    The data are the same tensors, so loading into the result fills the tensors of `state`.
    """
    seen: Counter[str] = Counter()

    def unique(name: str) -> str:
        seen[name] += 1
        return name if seen[name] == 1 else f"{name}#{seen[name]}"

    def own(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            # Built now, so that names are numbered in the order of the state.
            parts = map_leaves(own, leaf.build())
            return replace(leaf, build_fn=lambda *_: parts)
        if isinstance(leaf, ShardedTensor):
            name = leaf.key + describe_box(leaf.box)
            if leaf.flattened_range is not None:
                name += f"[{leaf.flat_bounds[0]}:{leaf.flat_bounds[1]}]"
            assert leaf.data is not None, f"{leaf.key} is declared without data"
            return ShardedTensor.from_rank_offsets(unique(name), leaf.data)
        if isinstance(leaf, ShardedObject):
            return ShardedObject(unique(leaf.unique_key.replace("/", "|")), leaf.data)
        return leaf

    return map_leaves(own, state)
