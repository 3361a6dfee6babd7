"""The loss of indexers in the step that has ended, as the log shows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport import torch_collectives


class IndexerLoss:
    """The loss of one layer's indexer: of the running step on this rank, and of the last step.

    Attributes:
        layer_number: 1-based, in the whole model.
        step_loss: [], the mean over the queries of the last step on all ranks; None before it.
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
        """Return sum and number of the parts of the running step, fp64 [2], and reset them."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self._sum is not None:
            total = self._sum
        count = torch.full_like(total, self._count)
        self._sum, self._count = None, 0
        return torch.stack((total, count))


class IndexedAttention(nn.Module):
    """Base of attentions with an indexer; `finish_indexer_step` finds them by this class."""

    indexer_loss: IndexerLoss | None
    """None if the indexer is not trained."""


def indexer_losses(model: Sequence[nn.Module]) -> Iterator[IndexerLoss]:
    """Yield the losses of the indexers of model chunks, in order."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, IndexedAttention) and module.indexer_loss is not None:
                yield module.indexer_loss


def finish_indexer_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Average the losses of the indexers of this stage over all micro batches of the step.

    Communication: one all-reduce over dp x cp, if the stage has trained indexers.
    """
    losses = list(indexer_losses(model))
    if not losses:
        return
    where = device.current_device()
    packed = torch.stack([loss.packed(where) for loss in losses])
    torch_collectives.all_reduce(packed, groups.dp_cp)
    for loss, (total, count) in zip(losses, packed, strict=True):
        # Each rank of a context-parallel group counts the micro batch, but sums a part of its loss.
        loss.step_loss = total * groups.cp.size() / count.clamp(min=1)
