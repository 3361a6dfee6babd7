"""Ranks that wait for a late one count it where they wait."""

import time

import torch

from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.transport import torch_collectives
from megatron.core.transport.collectives import all_reduce
from megatron.training.hooks.times import StepClock
from tests.harness.distributed import distributed

LATE_S = 0.5


@distributed(world_size=4, tp=2, pp=2)
def test_a_late_rank_computes_and_the_others_wait_for_it(groups):
    pipeline = groups.ranks["pp"]
    clock = StepClock(PROGRESS.waits, pipeline)
    all_reduce(torch.ones(8), groups.tp)  # opens the connections
    torch_collectives.barrier(groups.pp)
    torch_collectives.barrier(torch_collectives.world())
    clock.start()
    if groups.tp.rank() == 1:
        time.sleep(LATE_S)
    all_reduce(torch.ones(8), groups.tp)
    within = clock.stop()
    clock.start()
    if groups.pp.rank() == 1:
        time.sleep(LATE_S)
    torch_collectives.barrier(groups.pp)
    between = clock.stop()
    is_late = groups.tp.rank() == 1
    assert (within.compute_s if is_late else within.communication_s) > 0.9 * LATE_S
    assert (within.communication_s if is_late else within.compute_s) < 0.5 * LATE_S
    is_late = groups.pp.rank() == 1
    assert (between.compute_s if is_late else between.bubble_s) > 0.9 * LATE_S
    assert within.bubble_s == between.communication_s == 0.0
