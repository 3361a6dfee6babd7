"""Average the loss function's reports over micro batches and replicas.

A loss function reports either a pair (sum, count) or a mean. Pairs are summed over micro batches
and replicas before the division, so the result is the mean over tokens; reported means are
averaged.
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
from megatron.core.foundation.errors import ConfigError, shown
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import sum_across_ranks
from megatron.core.utils import as_list

Report = Mapping[str, Any]


@dataclass(frozen=True)
class DeferredLosses:
    """The reports of one rank, on its device.

    names: in the order of the reports; flat: fp32 or fp64 [micro batches * names, 2] of (sum,
    count), None except on the last stage.
    """

    num_microbatches: int
    names: tuple[str, ...]
    flat: Tensor | None

    @staticmethod
    def of(reports: Sequence[Report]) -> DeferredLosses:
        """Stack reports, one per micro batch on the last pipeline stage, [] on other stages.

        A report that is not a mapping is the value of "loss".

        Raises:
            ConfigError: micro batches report different names, or a value is no number or pair.
        """
        if not reports:
            return DeferredLosses(0, (), None)
        named = [r if isinstance(r, Mapping) else {"loss": r} for r in reports]
        names = tuple(named[0])
        for report in named:
            if report.keys() != named[0].keys():
                raise ConfigError(
                    f"the loss function reported {', '.join(names) or 'nothing'} for one micro"
                    f" batch and {', '.join(report) or 'nothing'} for another.",
                    rule="every micro batch reports the same names",
                    fix="report the pair (sum 0, count 0) for a missing value",
                )
        rows = [_pair(name, report[name]) for report in named for name in names]
        return DeferredLosses(len(reports), names, torch.stack(rows))

    def read(self) -> LossTable:
        """Copy the reports to the host at once, because every copy waits for the device."""
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

    def first_not_finite(self) -> tuple[int, str, float] | None:
        """Return (micro batch, name, value) of the first loss that is not finite, else None."""
        bad = (~self.pairs.isfinite()).any(-1).nonzero()
        if not len(bad):
            return None
        microbatch, index = bad[0].tolist()
        total, count = self.pairs[microbatch, index].tolist()
        return microbatch, self.names[index], total / count if count else total

    def means(self, group: Group) -> dict[str, float]:
        """Return name -> mean over all micro batches of all replicas; {} except on the last stage.

        Args:
            group: data- and context-parallel ranks.
        Communication:
            one all-reduce on `group`, on the last stage only.
        """
        if not self.names:
            return {}
        totals = sum_across_ranks(self.pairs.sum(0).flatten().tolist(), group)
        pairs = zip(self.names, totals[::2], totals[1::2], strict=True)
        return {name: total / count if count else 0.0 for name, total, count in pairs}


def _pair(name: str, value: Any) -> Tensor:
    """Return (sum, count) as a tensor [2]; a mean has the count 1."""
    try:
        if isinstance(value, Tensor):
            parts = value.detach().reshape(-1)
            # Exact sums of `layout_invariant_mode` are fp64.
            parts = parts if parts.dtype == torch.float64 else parts.float()
        else:
            several = value if isinstance(value, (tuple, list)) else (value,)
            parts = torch.tensor([float(part) for part in several])
    except (TypeError, ValueError):
        parts = torch.empty(0)
    if len(parts) == 1:
        parts = torch.cat((parts, parts.new_ones(1)))
    if len(parts) != 2:
        raise ConfigError(
            f"the loss function reported {name!r} as {shown(value)}.",
            rule="a reported value is a mean, or a pair (sum, number of tokens)",
            fix="report loss.detach(), or torch.stack((total.detach(), num_tokens))",
        )
    return parts


def with_loss_tokens(
    data: Any, num_microbatches: int, groups: ProcessGroupCollection
) -> tuple[Any, Tensor | None]:
    """Read the micro batches of a step, and count the tokens that divide its loss.

    Losses inside the model are means over micro batches and are multiplied by this number before
    the step, so that they have the same divisor as the main loss.

    Args:
        data: an iterator, or a list with one per model chunk; None on ranks without data.
    Returns:
        (iterators over the same micro batches, tokens of all replicas, []). The tokens are None if
        micro batches have no `loss_mask`.
    Communication:
        all-reduces of two numbers: maximum over `pp` and `tp`, sum over `dp_cp`.
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
    for group in (groups.pp, groups.tp):  # some stages and ranks read no data
        torch_collectives.all_reduce(counted, group, dist.ReduceOp.MAX)
    torch_collectives.all_reduce(counted, groups.dp_cp)
    known: list[Any] = [
        None if it is None else itertools.chain(batches, it)
        for it, batches in zip(iterators, read, strict=True)
    ]
    tokens = counted[0].clamp(min=1).float() if counted[1] else None
    return known if isinstance(data, list) else known[0], tokens
