"""Balance of the experts' load: the losses, and the load of a step.

Balance loss: W. Fedus et al., "Switch Transformers", section 2.2, arXiv 2101.03961. z-loss: B. Zoph
et al., "ST-MoE", section 3.1, arXiv 2202.08906. Balance over the global batch: Z. Qiu et al.,
"Demons in the Detail", arXiv 2501.11873. Balance by a bias: L. Wang et al., "Auxiliary-Loss-Free
Load Balancing Strategy for Mixture-of-Experts", section 3, arXiv 2408.15664.

No figure depends on the layout: shares refer to a sequence, a micro batch, or the global batch,
whichever ranks hold its tokens. Padding is not counted. Each document of a packed sample counts as
a sequence.

Legend: s sequence, b micro batch, t = s*b tokens of this rank, e experts.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.core.parameters.exact_sum import on_grid
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.context import current_step
from megatron.core.tensor_parallel.unit_products import in_full_vectors
from megatron.core.transport import torch_collectives

AUX_LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
    "z_loss": "z_loss",
}
"""Method -> name in logs."""
ASSIGNMENTS, DROPPED, NOT_FINITE = "assignments", "dropped", "not finite"
"""Sums of a step in addition to the balance losses: choices of each expert [e], choices that did
not fit [], and micro batches with logits that are not finite []."""


@dataclass(frozen=True)
class TokenGroups:
    """The group (a sequence, a sample, a micro batch) of each token of this rank.

    numbers: int64 [s, b], from 0, non-decreasing along s. count: n, the number of groups on all
    ranks that share the micro batch.
    """

    numbers: Tensor
    count: int

    @staticmethod
    def of_samples(shape: Sequence[int], device: torch.device) -> TokenGroups:
        """Make each sample, a column of `shape` [s, b, ...], a group."""
        return TokenGroups(torch.arange(shape[1], device=device).expand(shape[0], -1), shape[1])

    @staticmethod
    def of_all(shape: Sequence[int], device: torch.device) -> TokenGroups:
        """Make all tokens one group."""
        return TokenGroups(torch.zeros((), dtype=torch.long, device=device).expand(shape[:2]), 1)

    def sums(self, x: Tensor) -> Tensor:
        """Sum x [t, ...] over the tokens of this rank in each group: [n, ...]."""
        if self.count == 1:
            return x.sum(0, keepdim=True)
        return x.new_zeros(self.count, *x.shape[1:]).index_add(0, self.numbers.flatten(), x)

    def of_tokens(self, x: Tensor) -> Tensor:
        """Return for each token of this rank the value of x [n, ...] of its group: [t, ...]."""
        return x[self.numbers.flatten()] if self.count > 1 else x


def load_balancing_loss(
    scores: Tensor, shares: Tensor, weights: Tensor, groups: TokenGroups, *, is_exact: bool = False
) -> Tensor:
    """Return this rank's part of e * sum over experts of (share of tokens) * (mean score).

    The sum is 1 for a group with even load, and grows with the scores of experts with many tokens.

    Args:
        scores: [t, e] of this rank's tokens.
        shares: [n, e], each expert's share of the assignments of a group; they add up to 1.
        weights: [t, 1] or [1, 1], weight of each token in the mean, zero for padding.
        is_exact: return an exact sum over the tokens, fp64.
    """
    if is_exact:
        terms = scores * weights * groups.of_tokens(shares).to(scores.dtype)
        return shares.shape[-1] * on_grid(terms).sum()
    return shares.shape[-1] * (groups.sums(scores * weights) * shares.to(scores.dtype)).sum()


def z_loss(logits: Tensor, weights: Tensor, *, is_exact: bool = False) -> Tensor:
    """Return this rank's part of the mean square of log-sum-exp of the logits [t, e].

    Args:
        weights, is_exact: as in `load_balancing_loss`.
    """
    if is_exact:
        smooth_maximum = functools.partial(torch.logsumexp, dim=-1, keepdim=True)
        return on_grid(in_full_vectors(smooth_maximum, logits).square() * weights).sum()
    return (torch.logsumexp(logits, -1, keepdim=True).square() * weights).sum()


class ExpertLoad:
    """The counts of one router: of the running step on this rank, and of the last step.

    `count` and `add` collect the choices of each expert, the choices beyond an expert's capacity
    and this rank's parts of the balance losses. `finish_step` takes their sums over all ranks:

    Attributes:
        step_assignments: int64 [e], number of choices of each expert in the last step.

    The properties `step_*` read their value from the device on first access.
    """

    def __init__(self, num_experts: int, layer_number: int) -> None:
        self.num_experts = num_experts
        self.layer_number = layer_number
        self.step_assignments: Tensor | None = None
        self._step = _StepFigures(lambda: [0.0, 0.0, 0.0], ())
        self._sums: dict[str, Tensor] = {}
        self.num_microbatches = 0.0

    @property
    def step_dropped(self) -> int:
        """Choices beyond an expert's capacity in the last step."""
        return int(self._step.values[0])

    @property
    def step_is_finite(self) -> bool:
        """Whether all logits of the last step were finite numbers."""
        return self._step.values[1] == 0

    @property
    def step_losses(self) -> dict[str, float]:
        """Name -> balance loss of the last step, the mean over micro batches."""
        _, _, count, *losses = self._step.values
        pairs = zip(self._step.names, losses, strict=True)
        return {name: value / (count or 1.0) for name, value in pairs}

    def count(
        self,
        routing_map: Tensor,
        dropped: Tensor | None = None,
        *,
        is_finite: Tensor,
        share: float,
    ) -> None:
        """Add the choices [t, e] of one micro batch, and whether its logits were finite.

        Args:
            share: this rank's share of the micro batches whose tokens it routes.
        """
        self.add(NOT_FINITE, is_finite.logical_not())
        self.add(ASSIGNMENTS, routing_map.sum(0))
        if dropped is not None:
            self.add(DROPPED, dropped)
        self.num_microbatches += share

    def add(self, name: str, value: Tensor) -> None:
        """Add this rank's part of a balance loss of one micro batch, or of one of the counts."""
        value = value.detach()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def packed(self, names: Sequence[str], device: torch.device) -> Tensor:
        """Return the counts of the running step as one fp64 vector, and reset them.

        fp64 represents counts exactly up to 2^53.
        """
        zero = torch.zeros((), device=device)
        assignments = self._sums.get(ASSIGNMENTS, zero.expand(self.num_experts))
        count = torch.full((), self.num_microbatches, dtype=torch.float64, device=device)
        dropped, bad, *losses = (
            self._sums.get(name, zero) for name in (DROPPED, NOT_FINITE, *names)
        )
        self._sums, self.num_microbatches = {}, 0.0
        rest = torch.stack([x.double() for x in (dropped, bad, count, *losses)])
        return torch.cat([assignments.double(), rest])

    def finish_step(self, packed: Tensor, read: Callable[[], Tensor], names: Sequence[str]) -> None:
        """Store the sums over all ranks of the vectors that `packed` returned.

        Args:
            read: returns these sums on the host.
        """
        self.step_assignments = packed[: self.num_experts].clone()
        first = self.num_experts
        self._step = _StepFigures(lambda: read()[first:].tolist(), names)


@dataclass(frozen=True)
class _StepFigures:
    """Figures of a step, which are read from the device on first access."""

    read: Callable[[], list[float]]
    names: Sequence[str]

    @functools.cached_property
    def values(self) -> list[float]:
        """Dropped choices, micro batches that were not finite, all micro batches, and losses."""
        return self.read()


@dataclass(frozen=True)
class LoadSummary:
    """The load of one layer's experts in a step, as multiples of the even share."""

    layer_number: int
    lowest: float
    median: float
    p90: float
    highest: float
    dropped: float
    """Share of choices beyond an expert's capacity."""

    @staticmethod
    def of(load: ExpertLoad) -> LoadSummary | None:
        """Summarise the last step; None before the first."""
        if load.step_assignments is None:
            return None
        total = float(load.step_assignments.sum())
        ratios = load.step_assignments * (load.num_experts / max(total, 1.0))
        points = torch.tensor([0.0, 0.5, 0.9, 1.0], dtype=ratios.dtype, device=ratios.device)
        lowest, median, p90, highest = torch.quantile(ratios, points).tolist()
        dropped = load.step_dropped / max(total, 1.0)
        return LoadSummary(load.layer_number, lowest, median, p90, highest, dropped)


class LoadTrackingRouter(nn.Module):
    """Base of routers; `finish_router_step` finds them by this class."""

    load: ExpertLoad
    routes_tokens_of_all_tp_ranks = False

    def loss_names(self) -> list[str]:
        """Return the names of the losses that this router adds."""
        raise NotImplementedError

    def apply_load(self) -> None:
        """Use the load of the step that has ended, for the steps that follow."""
        raise NotImplementedError


def routers_of(model: Sequence[nn.Module]) -> Iterator[LoadTrackingRouter]:
    """Yield the routers of model chunks, in order."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, LoadTrackingRouter):
                yield module


def loads_of_last_step() -> list[ExpertLoad]:
    """Return the loads of this stage's routers after the last step, in order.

    For callers without a reference to the model, such as Megatron's `track_moe_metrics`.
    """
    references = current_step().expert_loads
    return [load for reference in references if (load := reference()) is not None]


def finish_router_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum the counts of routers over all ranks of this stage, and call `apply_load`.

    Communication: one all-reduce over tp x cp x dp, if the stage has experts; in layout-invariant
    mode over cp x dp, because the ranks of tp count the same tokens.
    """
    routers = list(routers_of(model))
    current_step().expert_loads = [weakref.ref(router.load) for router in routers]
    if not routers:
        return
    device = next(routers[0].parameters()).device
    names = [router.loss_names() for router in routers]
    packed = [router.load.packed(own, device) for router, own in zip(routers, names, strict=True)]
    everything = torch.cat(packed)
    shared = groups.dp_cp if routers[0].routes_tokens_of_all_tp_ranks else groups.tp_dp_cp
    torch_collectives.all_reduce(everything, shared)
    # One wait for the device for all routers, at the first read of a figure.
    sizes = [part.numel() for part in packed]
    on_host = functools.cache(lambda: everything.cpu().split(sizes))
    for index, (router, part) in enumerate(zip(routers, everything.split(sizes), strict=True)):
        read = functools.partial(lambda index: on_host()[index], index)
        router.load.finish_step(part, read, names[index])
        router.apply_load()
