"""Restore a run from an opened checkpoint, of this program or another.

Of another program weights, moments and main weights are tensors under our keys already; settings
of the optimizer (learning rate, weight decay, ...) stay those of this run, since the other
program groups its parameters in another way.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.core.dist_checkpointing.collective import print_once, run_collectively
from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.dist_checkpointing.loader import Contents, Loaded, load_state
from megatron.core.dist_checkpointing.local_state import as_local_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.foundation.errors import CheckpointError
from megatron.core.transport.object_collectives import ControlGroup, SingleProcess
from megatron.training.checkpointing.key_mapping import (
    compare_heads,
    compare_vocabularies,
    stored_key,
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
from megatron.training.checkpointing.upcycling import is_dense, read_from_dense
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState

NOT_FOR_OWN_STATE: dict[str, Any] = {
    "finetune": False,
    "no_load_optim": False,
    "no_load_rng": False,
    "moe_use_upcycling": False,
}
"""What a run asks of a checkpoint that it begins with, and not of what it has kept itself."""


@dataclass
class Restored:
    """What a checkpoint gave back, besides what it put into the parts."""

    path: StoragePath
    train_state: TrainState
    args: Mapping[str, Any]
    """Settings of the run that saved it."""
    extra: dict[str, Any]
    """What was passed to `save` as extra."""
    layout: Mapping[str, Any] = field(default_factory=dict)


class Restorer:
    """Fills the parts of one run. Every method is a collective."""

    def __init__(
        self, settings: CheckpointSettings, context: CheckpointContext, peers: ControlGroup
    ) -> None:
        self.settings, self.context, self.peers = settings, context, peers

    def restore(self, contents: Contents, *, is_finetuning: bool) -> Restored:
        """Load a checkpoint of any layout into the parts.

        Args:
            is_finetuning: take the weights alone, and begin at iteration 0.
        """
        settings = self.settings
        is_upcycling = settings.moe_use_upcycling and is_dense(contents.manifest)
        is_finetuning = is_finetuning or is_upcycling
        with_optimizer = not (is_finetuning or settings.no_load_optim)
        with_rng = not (is_finetuning or settings.no_load_rng)
        has_optimizer = self.context.optimizer is not None
        if isinstance(contents, InteropContents):
            for line in check_interop(contents, needs_moments=with_optimizer and has_optimizer):
                print_once(self.peers, f"  {line}")
        template = self._template(with_optimizer=with_optimizer, with_rng=with_rng)
        if is_upcycling:
            template = read_from_dense(template, contents.manifest)
            print_once(self.peers, "  every expert begins as a copy of the dense MLP of its layer")
        strict = parse_strict_handling(settings.dist_ckpt_strictness)
        vocabulary = self.context.args.get("unpadded_vocab_size")
        for note in (
            compare_heads(template, contents, strict, peers=self.peers),
            compare_vocabularies(vocabulary, contents, strict),
        ):
            if note:
                print_once(self.peers, f"  {note}")
        generators = template.get("generators")
        if generators is not None and generators.unique_key not in contents.objects:
            del template["generators"]  # another grid of ranks; nothing of ours depends on it
        loaded = load_state(
            template,
            contents,
            peers=self.peers,
            strict=strict,
            key_mapping=stored_key,
        )
        if isinstance(contents, InteropContents) and with_optimizer and has_optimizer:
            complete_interop_state(self.context, loaded.state, template["optimizer"], contents)
        flags = {"with_optimizer": with_optimizer, "with_rng": with_rng}
        return self._apply(contents, loaded, **flags, is_finetuning=is_finetuning)

    def restore_local(self, contents: Contents) -> Restored:
        """Load what this rank saved for itself."""
        flags = {
            "with_optimizer": not self.settings.no_load_optim,
            "with_rng": not self.settings.no_load_rng,
        }
        template = as_local_state(self._template(**flags))
        loaded = run_collectively(
            self.peers,
            f"loading {contents.directory}",
            lambda: load_state(template, contents, peers=SingleProcess()),
        )
        return self._apply(contents, loaded, **flags, is_finetuning=False)

    def _template(self, *, with_optimizer: bool, with_rng: bool) -> ShardedStateDict:
        return run_collectively(
            self.peers,
            "declaring the state to load",
            lambda: declare_run(
                self.context, with_optimizer=with_optimizer, with_rng=with_rng, is_loading=True
            ),
        )

    def _apply(
        self,
        contents: Contents,
        loaded: Loaded,
        *,
        with_optimizer: bool,
        with_rng: bool,
        is_finetuning: bool,
    ) -> Restored:
        """Give the loaded state to the parts."""
        state, info = loaded.state, contents.manifest.info

        def apply() -> None:
            apply_model(self.context, state, strict=not loaded.unexpected)
            apply_optimizer(self.context, state, was_loaded=with_optimizer)
            if with_rng:
                apply_rng(state)

        for chunk in self.context.model:
            for buffer in getattr(chunk, "gradient_buffers", ()):
                buffer.params.prepare_update()
        run_collectively(self.peers, f"applying the state of {contents.directory}", apply)
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
    """Return what to say about a checkpoint before it is loaded.

    Raises:
        CheckpointError: moments are needed and cannot be read; on every rank, since all hold
            the same description.
    """
    why = contents.no_optimizer
    if why is None and not contents.has_optimizer:
        why = "it holds no optimizer state"
    if needs_moments and why is not None:
        raise CheckpointError(
            f"{contents.directory}: {why}.",
            rule="a run goes on only with the optimizer state it stopped with",
            flags=["--load", "--no-load-optim", "--finetune"],
            fix="give --no-load-optim to continue with fresh moments, or --finetune to start at"
            " step 0",
        )
    return [f"{contents.directory} is a checkpoint of {contents.kind}", *contents.notes]


def complete_interop_state(
    context: CheckpointContext, state: dict[str, Any], template: object, contents: InteropContents
) -> None:
    """Fill in, in place, the plain values that optimizer and schedule expect.

    Args:
        state: the loaded state of the run.
        template: the declaration of the optimizer's.
    """
    contents.complete_optimizer(state["optimizer"], template)
    if context.scheduler is not None and "opt_param_scheduler" not in state:
        context.scheduler.step(increment=int(state.get("consumed_train_samples", 0)))
