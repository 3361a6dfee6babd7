"""Keep the list of what this rank starts and waits for."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from tests.gpu_without_gpu.collective_order.calls import Call, RankLog, Wait
from tests.gpu_without_gpu.process_group_calls import GroupCall, observed


class _Recorder:
    def __init__(self) -> None:
        self.log = RankLog(dist.get_rank())
        self.labels: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Names and ranks of groups that torch.distributed does not know."""
        self._lock = threading.Lock()
        self._unnamed: list[tuple[int, Any, dict[str, Any]]] = []

    def started(self, call: GroupCall) -> Callable[[], None]:
        """See `Observer`."""
        with self._lock:
            number = len(self._unnamed)
            # A group that has got its name only later has it everywhere.
            self._unnamed.append((len(self.log.events), call.group, _facts(call)))
            self.log.events.append(Wait(-1))
        return partial(self._waited, number)

    def _waited(self, number: int) -> None:
        with self._lock:
            self.log.events.append(Wait(number))

    def finish(self) -> RankLog:
        """Return the log."""
        for place, group, facts in self._unnamed:
            name, ranks = self.labels.get(id(group)) or _name_of(group)
            known = facts | {key: ranks[facts[key]] for key in ("root", "peer") if key in facts}
            self.log.events[place] = Call(ranks=ranks, group=name, **known)
        return self.log


@contextmanager
def recorded() -> Iterator[Callable[[], RankLog]]:
    """Inside, keep what this rank starts in all process groups; the result returns the log."""
    recorder = _Recorder()
    connect = P2PCommunicator._create_channel_groups

    def connected(communicator: P2PCommunicator) -> dict[tuple[int, int], Any]:
        channels = connect(communicator)
        assert communicator.pp_group is not None
        everyone = dist.get_process_group_ranks(communicator.pp_group)
        for (source, target), group in channels.items():
            ranks = (everyone[source], everyone[target])
            recorder.labels[id(group)] = (f"channel {ranks}", ranks)
        return channels

    connecting = mock.patch.object(P2PCommunicator, "_create_channel_groups", connected)
    with connecting, observed(recorder):
        yield recorder.finish


def _facts(call: GroupCall) -> dict[str, Any]:
    """Return fields of the `Call`; root and peer are ranks of the group."""
    name, tensors = call.name, call.tensors
    found: dict[str, Any] = {"name": name, "batch": call.batch, "where": call.where}
    # The one tensor that is alike on every rank.
    first = next(iter(tensors[name in ("all_gather_single", "gather")] if tensors else []), None)
    if first is not None:
        found |= {"shape": tuple(first.shape), "dtype": str(first.dtype).removeprefix("torch.")}
    if name in ("all_gather", "alltoall"):
        found["shape"] = tuple(itertools.chain(*(x.shape for x in tensors[0])))
    if name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"):
        found["reduction"] = _reduction(call.options.reduceOp)
    if name in ("broadcast", "reduce", "gather", "scatter"):
        found["root"] = call.options.rootRank
    if name == "all_to_all_single":
        [received], [sent] = tensors[:2]
        found["shape"] = tuple(received.shape[1:])
        size = call.group.size()
        found["sizes"] = tuple(
            tuple(given) or (x.shape[0] // size,) * size
            for given, x in ((call.args[3], sent), (call.args[2], received))
        )
    if name in ("send", "recv"):
        found["peer"] = call.args[1]
    return found


def _reduction(operation: Any) -> str:
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next(name for name, kind in kinds if operation == kind).lower()


def _name_of(group: Any) -> tuple[str, tuple[int, ...]]:
    return str(group.group_name), tuple(dist.get_process_group_ranks(group))
