"""The loop around a run: when ranks are lost, give up the groups and begin again with the others.

The process keeps its imports, its compiled kernels and the copies of the state that it has in
memory; model, optimizer, groups and loaders are built anew, for the rank that it is given.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Callable

import torch.distributed as dist

from megatron.core.dist_checkpointing import async_save, save_lock
from megatron.core.dist_checkpointing.memory_copies import MemoryCopies
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.heartbeat.place import PLACE
from megatron.training.inprocess.coordinator import Place
from megatron.training.inprocess.generation import Generation
from megatron.training.inprocess.membership import (
    LOST_PEER_S,
    OWN_ERROR_S,
    Connections,
    Membership,
    Watch,
)
from megatron.training.resilience.failure import is_lost_peer
from megatron.training.resilience.status import RunStatus
from megatron.training.run.state import RanksChange
from megatron.training.setup.distributed import shut_down


def run_with_restarts(
    membership: Membership,
    status: RunStatus,
    run: Callable[[Generation], None],
) -> None:
    """Call `run` in one generation after another, until it returns or fails by its own fault."""
    copies = MemoryCopies()
    while True:
        status.activity = "waiting for the other ranks"
        place = membership.join()
        PLACE.begin_anew()
        status.begin_anew(place.rank, place.local_rank, place.generation)
        connections = Connections()
        watch = Watch(place, connections.abort)
        try:
            run(Generation(place, watch, copies))
            watch.leave()
            return
        except (SystemExit, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            if not _is_over(error, membership, place, watch):
                raise
            watch.leave()
            _say(error, place, watch, status)
            traceback.clear_frames(error.__traceback__)
        tear_down(status)


def check_launcher(membership: Membership | None, *, wants_restarts: bool) -> None:
    """Refuse --inprocess-restart where nobody would start other processes.

    Raises:
        ConfigError: another launcher started this process.
    """
    if wants_restarts and membership is None:
        raise ConfigError(
            "--inprocess-restart under a launcher that ends all ranks when one fails.",
            rule="a launcher of its own starts processes in place of lost ones",
            flags=["--inprocess-restart"],
            fix="start with `python -m megatron.training.inprocess.run` instead of torchrun, or"
            " use torchrun --max-restarts with --load",
        )


def _is_over(error: BaseException, membership: Membership, place: Place, watch: Watch) -> bool:
    """Return whether an error is only that the generation is given up."""
    if isinstance(error, RanksChange):
        return True
    seconds = OWN_ERROR_S
    if is_lost_peer(error):
        membership.report_failure(place)
        seconds = LOST_PEER_S
    return watch.is_broken_within(seconds)


def _say(error: BaseException, place: Place, watch: Watch, status: RunStatus) -> None:
    why = watch.reason or str(error)
    if place.local_rank == 0:
        text = f"RESTART iter={status.iteration} generation={place.generation}: {why}"
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def tear_down(status: RunStatus) -> None:
    """Give up what belongs to one set of ranks; nothing waits for another rank."""
    if status.heart is not None:
        status.heart.close()
        status.heart = None
    async_save.abandon()
    save_lock.release_all()
    with contextlib.suppress(Exception):
        shut_down()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
