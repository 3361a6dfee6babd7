"""The loss of indexers in the step that has ended, as the log shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives


class IndexerLoss:
    """What one layer's indexer lost: in the running step on this rank, then in the whole last step.

    Attributes:
        layer_number: 1-based, in the whole model.
        step_loss: [], the mean over the queries of the last step, of all ranks; None before.
    """

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number
        self.step_loss: Tensor | None = None
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, part: Tensor) -> None:
        """Add this rank's part of the loss of one micro batch, []."""
        part = part.detach().double()
        self._sum = part if self._sum is None else self._sum + part
        self._count += 1

    def packed(self, device: torch.device) -> Tensor:
        """Return sum and number of the running step's parts, fp64 [2], and forget them."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self._sum is not None:
            total = self._sum
        count = torch.full_like(total, self._count)
        self._sum, self._count = None, 0
        return torch.stack((total, count))


class IndexedAttention(nn.Module):
    """What the end of a step asks of an attention with an indexer."""

    indexer_loss: IndexerLoss | None
    """None: it does not learn."""


def indexer_losses(model: Sequence[nn.Module]) -> Iterator[IndexerLoss]:
    """Yield what the indexers of model chunks lost, in order."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, IndexedAttention) and module.indexer_loss is not None:
                yield module.indexer_loss


def finish_indexer_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Average what the indexers of this stage lost over all micro batches of the step.

    Communication: one all-reduce over dp x cp, where the stage has indexers that learn.
    """
    losses = list(indexer_losses(model))
    if not losses:
        return
    where = device.current_device()
    packed = torch.stack([loss.packed(where) for loss in losses])
    torch_collectives.all_reduce(packed, groups.dp_cp)
    for loss, (total, count) in zip(losses, packed, strict=True):
        # The ranks of a context-parallel group count a micro batch each, and have parts of it.
        loss.step_loss = total * groups.cp.size() / count.clamp(min=1)
