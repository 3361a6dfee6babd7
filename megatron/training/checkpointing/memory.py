"""Copies of a run's state in the memory of its ranks, to continue after a rank is lost."""

from __future__ import annotations

import dataclasses

from megatron.core.dist_checkpointing.collective import print_once, run_collectively
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import ControlGroup
from megatron.training.checkpointing.non_persistent import own_group
from megatron.training.checkpointing.restore import NOT_FOR_OWN_STATE, Restored, Restorer
from megatron.training.checkpointing.run_state import (
    CheckpointContext,
    declare_run,
    describe_layout,
    plain_run_state,
)
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.run.state import TrainState

_ALL = {"with_optimizer": True, "with_rng": True}


class MemoryCheckpoints:
    """Makes and loads copies of the whole state. Every method is a collective."""

    def __init__(
        self,
        copies: MemoryCopies,
        settings: CheckpointSettings,
        context: CheckpointContext,
        peers: ControlGroup,
        node: int,
    ) -> None:
        self._context, self._peers = context, peers
        own = dataclasses.replace(settings, **NOT_FOR_OWN_STATE)
        self._restorer = Restorer(own, context, peers)
        world = torch_collectives.world()
        group = own_group(world).group if torch_collectives.has_peers(world) else SINGLE_RANK
        self._copies = copies.open(group, node)
        self._newest = self._copies.newest()
        self._layout = describe_layout(context)

    @property
    def newest_iteration(self) -> int:
        """Iteration of the newest complete copy, -1 if there is no copy."""
        return -1 if self._newest is None else self._newest[0]

    def find_newest(self) -> None:
        """Search the newest complete copy again."""
        self._newest = self._copies.newest()

    def save(self, train_state: TrainState) -> None:
        """Copy the state after a step.

        Raises:
            CheckpointError: on every rank, if one rank fails.
        """

        def declare() -> ShardedStateDict:
            plain = plain_run_state(self._context, train_state, **_ALL)
            return declare_run(self._context, **_ALL) | plain | {"extra": {}}

        self._copies.save(declare, train_state.iteration, {"layout": self._layout})

    def load(self) -> Restored:
        """Load the newest copy; its layout may differ from the run's layout."""
        assert self._newest is not None
        key = self._newest
        contents = run_collectively(
            self._peers, "opening copies of the state", lambda: self._copies.contents(key)
        )
        restored = self._restorer.restore(contents, is_finetuning=False)
        print_once(
            self._peers, f"  successfully loaded iteration {self._newest[0]} from memory copies"
        )
        return restored
