"""What a run takes over from a checkpoint of another program besides its tensors.

Weights, moments and main weights are tensors under our keys already; settings of the update rule
(learning rate, weight decay, ...) stay those of this run, since the other program groups its
parameters in another way.
"""

from __future__ import annotations

from typing import Any

from megatron.core.dist_checkpointing.interop.contents import InteropContents
from megatron.core.errors import CheckpointError
from megatron.training.checkpointing.run_state import RunParts


def check_interop(contents: InteropContents, *, needs_moments: bool) -> list[str]:
    """Return what to say about a checkpoint before it is loaded.

    Raises:
        CheckpointError: moments are needed and cannot be read; on every rank alike, since all
            hold the same description.
    """
    why = contents.no_optimizer
    if why is None and not contents.has_optimizer:
        why = "it holds no optimizer state"
    if needs_moments and why is not None:
        raise CheckpointError(
            f"{contents.directory}: {why}.",
            rule="a run goes on only with the optimizer state it stopped with",
            flags=["--load", "--no-load-optim", "--finetune"],
            fix="give --no-load-optim to go on with fresh moments, or --finetune to start at step "
            "0",
        )
    return [f"{contents.directory} is a checkpoint of {contents.kind}", *contents.notes]


def complete_interop_state(
    parts: RunParts, state: dict[str, Any], template: Any, contents: InteropContents
) -> None:
    """Fill in, in place, the plain values that optimizer and schedule expect.

    Args:
        state: the loaded state of the run.
        template: the declaration of the optimizer's.
    """
    contents.complete_optimizer(state["optimizer"], template)
    if parts.scheduler is not None and "opt_param_scheduler" not in state:
        parts.scheduler.step(increment=int(state.get("consumed_train_samples", 0)))
