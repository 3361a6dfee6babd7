"""Keep the list of what this rank starts, where torch hands it to a process group."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from megatron.core.distributed import communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transport import collectives, transport, unit_memory
from megatron.core.transport.torch_transport import NativeTransport
from tests.gpu_without_gpu.collective_order.calls import Call, RankLog, Wait

_SINGLE = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")
_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_METHODS = {
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "barrier", *_SINGLE)},
    **{name: name for name in ("send", "recv", "reduce_scatter", "alltoall")},
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allreduce_coalesced": "all_reduce",
}
"""Method of a process group -> what the operation is called."""


class _Recorder:
    def __init__(self) -> None:
        self.log = RankLog(dist.get_rank())
        self.batch = -1
        self.labels: dict[int, tuple[str, tuple[int, ...]]] = {}
        """Names and ranks of groups that torch.distributed does not know."""
        self._lock = threading.Lock()
        self._count = 0
        self._unnamed: list[tuple[int, Any, Callable[[tuple[int, ...]], Call]]] = []

    def started(self, group: Any, make: Callable[[tuple[int, ...]], Call]) -> int:
        """Keep a call; return its number."""
        with self._lock:
            number, self._count = self._count, self._count + 1
            self._unnamed.append((len(self.log.events), group, make))
            self.log.events.append(Wait(-1))
            return number

    def waited(self, number: int) -> None:
        with self._lock:
            self.log.events.append(Wait(number))

    def finish(self) -> RankLog:
        """Return the log. A group that has got its name only later has it everywhere."""
        for place, group, make in self._unnamed:
            name, ranks = self.labels.get(id(group)) or _name_of(group)
            call = make(ranks)
            self.log.events[place] = Call(**{**vars(call), "group": name})
        return self.log


@contextmanager
def recorded() -> Iterator[Callable[[], RankLog]]:
    """Inside, keep what this rank starts in all process groups; the result returns the log."""
    recorder = _Recorder()
    with ExitStack() as stack:
        for method, name in _METHODS.items():
            former = _FORMER_NAMES.get(method, method)
            for kind in (dist.ProcessGroup, dist.ProcessGroupGloo.__base__):
                # A backend is used by itself where torch.distributed does not know of the group;
                # where it does, the group calls it in C++.
                for attribute in {method, former} & set(dir(kind)):
                    original = getattr(kind, attribute)
                    seen = _seen(recorder, original, name)
                    stack.enter_context(mock.patch.object(kind, attribute, seen))
        batches = itertools.count()
        start_batch = dist.batch_isend_irecv

        def in_one_batch(operations: list[Any]) -> list[Any]:
            recorder.batch = next(batches)
            try:
                return start_batch(operations)
            finally:
                recorder.batch = -1

        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", in_one_batch))
        connect = P2PCommunicator._create_channel_groups

        def connected(communicator: P2PCommunicator) -> dict[tuple[int, int], Any]:
            channels = connect(communicator)
            assert communicator.pp_group is not None
            everyone = dist.get_process_group_ranks(communicator.pp_group)
            for (source, target), group in channels.items():
                ranks = (everyone[source], everyone[target])
                recorder.labels[id(group)] = (f"channel {ranks}", ranks)
            return channels

        stack.enter_context(mock.patch.object(P2PCommunicator, "_create_channel_groups", connected))
        yield recorder.finish


@contextmanager
def ways_of_nccl() -> Iterator[None]:
    """Inside, tensors on CPUs are sent as those on GPUs are: collectives of the backend alone,
    without tags, a channel for each direction of a pipeline."""
    with ExitStack() as stack:
        for module in (transport, communication, unit_memory):
            stack.enter_context(mock.patch.object(module, "has_tags", return_value=False))
        stack.enter_context(mock.patch.object(collectives, "select_transport", _native_transport))
        without_tags = property(lambda communicator: False)
        stack.enter_context(mock.patch.object(P2PCommunicator, "has_tags", without_tags))
        yield


def _native_transport(_x: Tensor, group: Any) -> NativeTransport:
    return NativeTransport(group)


def _seen(recorder: _Recorder, original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def started(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() == 1:
            return original(group, *args, **kwargs)
        facts = _facts(name, group, args, kwargs) | {"batch": recorder.batch, "where": _where()}

        def make(ranks: tuple[int, ...]) -> Call:
            return Call(ranks=ranks, group="", name=name, **_global(facts, ranks))

        number = recorder.started(group, make)
        return _SeenWork(original(group, *args, **kwargs), lambda: recorder.waited(number))

    return started


class _SeenWork:
    """A backend's work, of which the first wait is noted."""

    def __init__(self, work: Any, note: Callable[[], None]) -> None:
        self._work, self._note = work, note
        self._is_noted = False

    def wait(self, *timeout: Any) -> Any:
        if not self._is_noted:
            self._is_noted = True
            self._note()
        return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _facts(name: str, group: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return fields of the `Call`; root and peer are ranks of the group."""
    tensors = [_tensors(arg) for arg in args]
    first = tensors[0][0] if tensors and tensors[0] else None
    options = next((a for a in [*args, *kwargs.values()] if hasattr(a, "timeout")), None)
    found: dict[str, Any] = {}
    if name in ("all_gather_single", "gather", "scatter"):
        # The one tensor that every rank has.
        first = tensors[0][0] if name == "scatter" else tensors[1][0]
    if first is not None:
        found |= {"shape": tuple(first.shape), "dtype": str(first.dtype).removeprefix("torch.")}
    if name in ("all_gather", "alltoall"):
        found["shape"] = tuple(itertools.chain(*(x.shape for x in tensors[0])))
    if name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"):
        found["reduction"] = _reduction(options.reduceOp)
    if name in ("broadcast", "reduce", "gather", "scatter"):
        found["root"] = options.rootRank
    if name == "all_to_all_single":
        found["shape"] = tuple(first.shape[1:])
        rows = (tensors[1][0].shape[0], first.shape[0])  # sent, received
        size = group.size()
        found["sizes"] = tuple(
            tuple(given) or (num // size,) * size
            for given, num in zip((args[3], args[2]), rows, strict=True)
        )
    if name in ("send", "recv"):
        found["peer"] = args[1]
    return found


def _global(facts: dict[str, Any], ranks: tuple[int, ...]) -> dict[str, Any]:
    return facts | {n: ranks[facts[n]] for n in ("root", "peer") if n in facts}


def _tensors(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    if isinstance(arg, list | tuple):
        return [tensor for each in arg for tensor in _tensors(each)]
    return []


def _reduction(operation: Any) -> str:
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next(name for name, kind in kinds if operation == kind).lower()


def _name_of(group: Any) -> tuple[str, tuple[int, ...]]:
    return str(group.group_name), tuple(dist.get_process_group_ranks(group))


_BETWEEN = ("/torch/", "/core/transport/", "/collective_order/recording.py")


def _where() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and any(p in frame.f_code.co_filename for p in _BETWEEN):
        frame = frame.f_back
    name = frame.f_code.co_filename
    at = max(name.rfind("/megatron/"), name.rfind("/tests/"))
    return f"{name[at + 1 :]}:{frame.f_lineno}"
