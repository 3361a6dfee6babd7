"""Join what the loss function reported on each micro batch and replica into one mean.

A loss function reports either a pair (sum, count) or a mean by itself. Pairs are summed over
micro batches and replicas before the division, so the figure is a true mean over tokens; plain
means are averaged.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import Group
from megatron.core.transport import backend
from megatron.core.transport.object_collectives import sum_across_ranks
from megatron.core.utils import as_list

Report = Mapping[str, Any]


@dataclass(frozen=True)
class UnreadLosses:
    """The reports of one rank where they were computed.

    names: in the order of the reports; flat: fp32 [micro batches * names, 2] of (sum, count), or
    None off the last stage.
    """

    num_microbatches: int
    names: tuple[str, ...]
    flat: Tensor | None

    @staticmethod
    def of(reports: Sequence[Report]) -> UnreadLosses:
        """Join reports, one per micro batch on the last pipeline stage, [] elsewhere."""
        if not reports:
            return UnreadLosses(0, (), None)
        names = tuple(reports[0])
        rows = [_pair(report[name]) for report in reports for name in names]
        return UnreadLosses(len(reports), names, torch.stack(rows))

    def read(self) -> LossTable:
        """Copy them to the host in one piece: every copy by itself would wait for the device."""
        if self.flat is None:
            return LossTable((), torch.empty(0, 0, 2, dtype=torch.float64))
        pairs = self.flat.cpu().double()
        return LossTable(self.names, pairs.reshape(self.num_microbatches, len(self.names), 2))


@dataclass(frozen=True)
class LossTable:
    """The reports of one rank, on the host.

    names: in the order of the reports; pairs: fp64 [micro batches, names, 2] of (sum, count).
    """

    names: tuple[str, ...]
    pairs: Tensor

    @staticmethod
    def of(reports: Sequence[Report]) -> LossTable:
        """Return reports, one per micro batch on the last pipeline stage, [] elsewhere."""
        return UnreadLosses.of(reports).read()

    def first_not_finite(self) -> tuple[int, str, float] | None:
        """Return (micro batch, name, value) of the first loss that is not a finite number."""
        bad = (~self.pairs.isfinite()).any(-1).nonzero()
        if not len(bad):
            return None
        microbatch, index = bad[0].tolist()
        total, count = self.pairs[microbatch, index].tolist()
        return microbatch, self.names[index], total / count if count else total

    def means(self, group: Group) -> dict[str, float]:
        """Return name -> mean over all micro batches of all replicas; {} off the last stage.

        Args:
            group: replicas, with their context-parallel ranks.
        Communication:
            one all-reduce on `group`, on the last stage only.
        """
        if not self.names:
            return {}
        totals = sum_across_ranks(self.pairs.sum(0).flatten().tolist(), group)
        pairs = zip(self.names, totals[::2], totals[1::2], strict=True)
        return {name: total / count if count else 0.0 for name, total, count in pairs}


def _pair(value: Any) -> Tensor:
    """Return (sum, count) as a tensor [2]; a plain mean counts once."""
    if isinstance(value, Tensor):
        value = value.detach()
        if value.numel() == 2:
            return value.reshape(2).float()
        return torch.stack([value.reshape(()).float(), value.new_ones((), dtype=torch.float32)])
    if isinstance(value, (tuple, list)):
        return torch.tensor([float(part) for part in value])
    return torch.tensor([float(value), 1.0])


def with_loss_tokens(
    data: Any, num_microbatches: int, groups: ProcessGroupCollection
) -> tuple[Any, Tensor | None]:
    """Read the micro batches of a step, and count the tokens that its loss will be divided by.

    Losses inside the model are means over micro batches, whatever the main loss is divided by; they
    are multiplied by this number first, so it is needed before the step.

    Args:
        data: an iterator, or one for each model chunk; None where a rank reads no data.
    Returns:
        (such iterators over the same micro batches, the tokens of all replicas, []; None if micro
        batches have no `loss_mask`).
    Communication:
        two maxima and a sum of two numbers, over `pp`, `tp` and `dp_cp`.
    """
    iterators = as_list(data)
    read = [list(itertools.islice(it or (), num_microbatches)) for it in iterators]
    counted = torch.zeros(2, dtype=torch.float64)
    for batch in max(read, key=len, default=[]):
        mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
        if mask is not None:
            sharing = int(batch.get("local_cp_size", groups.cp.size()))
            counted += torch.stack((mask.sum(dtype=torch.float64).cpu(), torch.ones(()))) / sharing
    counted = counted.to(device.current_device())
    for group in (groups.pp, groups.tp):  # a stage, or a rank, may read no data
        backend.all_reduce(counted, group, dist.ReduceOp.MAX)
    backend.all_reduce(counted, groups.dp_cp)
    known: list[Any] = [
        None if it is None else itertools.chain(batches, it)
        for it, batches in zip(iterators, read, strict=True)
    ]
    tokens = counted[0].clamp(min=1).float() if counted[1] else None
    return known if isinstance(data, list) else known[0], tokens
