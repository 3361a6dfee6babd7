"""The loss of the indexers of sparse attention, for log line and scalars."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.core.transformer.indexer import indexer_losses
from megatron.core.transport.object_collectives import all_gather_object

if TYPE_CHECKING:
    from megatron.training.run.context import TrainingContext


def indexer_loss(context: TrainingContext) -> dict[str, float]:
    """Return the loss of the last step as a mean over layers, without its coefficient.

    Communication: with pipeline stages, one all-gather of small Python objects over `pp`, if
    indexers are trained.
    """
    if not context.run.model.trains_indexer:
        return {}
    losses = (loss.step_loss for loss in indexer_losses(context.model))
    own = [float(loss) for loss in losses if loss is not None]
    values = [value for stage in all_gather_object(own, context.groups.pp) for value in stage]
    return {"indexer loss": sum(values) / len(values)} if values else {}
