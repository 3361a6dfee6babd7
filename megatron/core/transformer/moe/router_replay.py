"""Record the experts that a router chose, and replay the choices.

A policy that was updated, or computed in another precision or layout, routes some tokens to other
experts than the rollout did; replaying the rollout's choices removes that difference (W. Ma et al.,
"Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv
2510.11370). Only the choices are replayed: the router computes the weights of the experts, so the
gradient flows through the router.

Choices are stored by layer and micro batch, which works with virtual stages, any schedule and
recomputation. Gathered choices do not depend on the layout: any other layout can replay them.

`record_routing` and `replay_routing` are for whole models. Each router has a `RouterReplay`, which
has Megatron's methods.

Legend: b micro batch, s sequence, l layers, k experts per token; t = s/cp/tp * b tokens here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.context import current_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.moe.load_balancing import routers_of
from megatron.core.transport import torch_collectives
from megatron.core.utils import as_list, get_model_config

NOT_GIVEN = -1
"""Takes the place of an expert: the router chooses for this token."""


class RouterReplayAction(Enum):
    """Action of a router on its choices."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"
    """In a recomputation: use the choices of the forward pass of this micro batch."""


class _Live:
    """The replays of all living routers, in order of construction."""

    def __init__(self) -> None:
        self.known: weakref.WeakSet[RouterReplay] = weakref.WeakSet()
        self.numbers = itertools.count()

    def __get__(self, _instance: object, _owner: type) -> list[RouterReplay]:
        return sorted(self.known, key=lambda replay: replay.number)


_LIVE = _Live()


class RouterReplay:
    """Records or replays the choices of one router."""

    global_router_replay_instances: ClassVar[Any] = _LIVE

    def __init__(self) -> None:
        self.number = next(_LIVE.numbers)
        self.router_replay_action: RouterReplayAction | None = None
        self.recorded: dict[int, Tensor] = {}
        """micro batch -> choices [s/cp/tp, b, k] of this rank's tokens."""
        self.targets: dict[int, Tensor] = {}
        """micro batch -> choices [b, s, k] for the whole of it."""
        self.target_topk_idx: Tensor | None = None
        """Choices [t, k] for this rank's tokens of the micro batches that have no target."""
        self._used: dict[int, Tensor] = {}
        self._last: Tensor | None = None
        _LIVE.known.add(self)

    def choose(self, own: Tensor, rows: SequenceShard) -> Tensor:
        """Return the experts of this rank's tokens of the running micro batch.

        Args:
            own: [s/cp/tp, b, k], the router's own choices.
            rows: the positions of these tokens.
        """
        action, number = self.router_replay_action, current_step().random_scope.microbatch
        if is_recomputing() and number in self._used:
            return self._used[number]
        if action is None:
            return own
        if action is RouterReplayAction.RECORD:
            if not is_recomputing():
                self.recorded[number] = own.detach()
                self._last = own.detach().flatten(0, 1)
            return own
        if action is RouterReplayAction.REPLAY_BACKWARD:
            return self._used.get(number, own)
        given = self._given(number, own, rows)
        chosen = torch.where(given < 0, own, given)
        self._used[number] = chosen
        return chosen

    def _given(self, number: int, own: Tensor, rows: SequenceShard) -> Tensor:
        whole = self.targets.get(number)
        if whole is not None:
            b, s, _ = whole.shape
            found = torch.full_like(own, NOT_GIVEN)
            positions = rows.positions(whole.device)
            inside = (positions < s).nonzero().squeeze(1)
            found[inside, :b] = whole[:, positions[inside]].transpose(0, 1).to(own)
            return found
        if self.target_topk_idx is None:
            raise ConfigError(
                f"there are no choices to replay in micro batch {number}.",
                rule="a replay needs the choices of every micro batch",
                fix="pass replay_routing() a tensor for each, or call set_replay_data() before it;"
                " compute_log_probs() adds micro batches and takes the routing itself",
            )
        return self.target_topk_idx.to(own).view_as(own)

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set the choices [t, k] of the next micro batch."""
        self.target_topk_idx = topk_indices

    def get_recorded_indices(self) -> Tensor | None:
        """Return the choices [t, k] of the last micro batch."""
        return self._last

    def clear_indices(self) -> None:
        """Drop recorded choices and choices to replay."""
        self.recorded, self.targets, self._used = {}, {}, {}
        self.target_topk_idx = self._last = None

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set the action of the following forward passes."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Stop recording and replaying."""
        self.router_replay_action = None

    @staticmethod
    def set_replay_data(all_layers_topk_indices: Sequence[Tensor]) -> None:
        """Set the choices [t, k] of every router, in the order of their layers on this rank."""
        replays = RouterReplay.global_router_replay_instances
        if len(replays) != len(all_layers_topk_indices):
            raise DataError(
                f"choices for {len(all_layers_topk_indices)} routers, but this rank has"
                f" {len(replays)}.",
                rule="each router of this rank has its own choices",
                fix="pass a list with one tensor for each router",
            )
        for replay, indices in zip(replays, all_layers_topk_indices, strict=True):
            replay.set_target_indices(indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """Return `get_recorded_indices()` of every router."""
        return [one.get_recorded_indices() for one in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Call `clear_indices` of every router."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Set the action of every router."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Stop recording and replaying in every router."""
        for replay in RouterReplay.global_router_replay_instances:
            replay.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Do nothing: a deleted router leaves the list by itself."""


class RoutingRecord:
    """The choices that `record_routing` recorded on this rank."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.config = get_model_config(chunks[0])
        self.replays = dict(_replays_of(chunks))

    def gather(self, pg_collection: ProcessGroupCollection | None = None) -> list[Tensor]:
        """Return the choices of every micro batch, int64 [b, s, l, k], on all ranks of a replica.

        Micro batches are in the order of their numbers; dense layers have `NOT_GIVEN`.

        Communication:
            a maximum of four numbers and a sum of m x b x s x l x k on tp, cp and pp.
        """
        groups = routing_groups(self.config, resolve_groups(pg_collection))
        sharing = (groups.tp, groups.cp, groups.pp)
        found = [
            (layer - 1, number, indices)
            for layer, replay in self.replays.items()
            for number, indices in replay.recorded.items()
        ]
        where = next(
            (indices.device for _, _, indices in found), torch_collectives.tensor_device(groups.tp)
        )
        sizes = torch.zeros(4, dtype=torch.long, device=where)
        for _, number, indices in found:
            sizes = torch.maximum(sizes, sizes.new_tensor((number + 1, *indices.shape)))
        for group in sharing:
            torch_collectives.all_reduce(sizes, group, torch.distributed.ReduceOp.MAX)
        count, length, b, k = sizes.tolist()
        s = length * groups.tp.size() * groups.cp.size()
        # One rank holds each choice. Adding 1 lets the sum distinguish expert 0 from no choice.
        table = torch.zeros(count, s, b, self.config.num_layers, k, dtype=torch.long, device=where)
        for layer, number, indices in found:
            positions = rows_of_rank(indices.shape[0], groups).positions(where)
            table[number, positions, :, layer] = indices + 1
        for group in sharing:
            torch_collectives.all_reduce(table, group)
        return list((table - 1).transpose(1, 2))


def routing_groups(
    config: ModelParallelConfig, groups: ProcessGroupCollection
) -> ProcessGroupCollection:
    """Return the groups of a router; in layout-invariant mode each tensor-parallel rank routes the
    tokens of all of them."""
    if not config.layout_invariant_mode:
        return groups
    return groups.with_groups(tp=SINGLE_RANK, tp_cp=groups.cp)


def rows_of_rank(num_rows: int, groups: ProcessGroupCollection) -> SequenceShard:
    """Return the positions of the tokens that a router of this rank routes.

    Ranks of tp x cp share the sequences of a micro batch, with and without sequence parallelism.
    """
    return sequence_shard_of_rank(num_rows, cp=groups.microbatch_cp, sp=groups.tp)


@contextmanager
def record_routing(model: nn.Module | Sequence[nn.Module]) -> Iterator[RoutingRecord]:
    """Inside, record the choices of all routers except in prediction layers.

    Args:
        model: this rank's model chunk, or its list of chunks; wrapped or not.
    """
    record = RoutingRecord(as_list(model))
    with _acting(record.replays.values(), RouterReplayAction.RECORD):
        yield record


@contextmanager
def replay_routing(
    model: nn.Module | Sequence[nn.Module], routing: Sequence[Tensor]
) -> Iterator[None]:
    """Inside, route tokens by given choices.

    Args:
        model: this rank's model chunk, or its list of chunks; wrapped or not.
        routing: for every micro batch of this replica [b, s, l, k] as `RoutingRecord.gather`
            returns it, equal on all ranks. The router chooses for entries `NOT_GIVEN` and for
            positions beyond s.
    Raises:
        DataError: a tensor has a wrong shape, or contains an expert that does not exist.
    """
    chunks = as_list(model)
    config = get_model_config(chunks[0])
    for number, choices in enumerate(routing):
        _check(number, choices, config)
    replays = dict(_replays_of(chunks))
    with _acting(replays.values(), RouterReplayAction.REPLAY_FORWARD):
        for layer, replay in replays.items():
            replay.targets = {n: choices[:, :, layer - 1] for n, choices in enumerate(routing)}
        yield


def _check(number: int, choices: Tensor, config: Any) -> None:
    wanted = (config.num_layers, config.moe_router_topk)
    if choices.dim() != 4 or tuple(choices.shape[2:]) != wanted:
        found = f"the shape {tuple(choices.shape)}"
    elif choices.numel() and not (
        int(choices.min()) >= NOT_GIVEN and int(choices.max()) < config.num_moe_experts
    ):
        found = f"experts from {int(choices.min())} to {int(choices.max())}"
    else:
        return
    raise DataError(
        f"the routing of micro batch {number} has {found}.",
        rule=f"its shape is [b, s, {wanted[0]} layers, {wanted[1]} experts of a token], and experts"
        f" are 0 to {config.num_moe_experts - 1}",
        fix="replay in the model whose choices were recorded",
    )


def _replays_of(chunks: Sequence[nn.Module]) -> Iterator[tuple[int, RouterReplay]]:
    num_layers = get_model_config(chunks[0]).num_layers
    for router in routers_of(chunks):
        replay = getattr(router, "router_replay", None)  # absent in routers of other authors
        if replay is not None and router.load.layer_number <= num_layers:
            yield router.load.layer_number, replay


@contextmanager
def _acting(replays: Any, action: RouterReplayAction) -> Iterator[None]:
    for replay in replays:
        replay.clear_indices()
        replay.set_router_replay_action(action)
    try:
        yield
    finally:
        for replay in replays:
            replay.clear_router_replay_action()
            if action is not RouterReplayAction.RECORD:
                replay.clear_indices()
