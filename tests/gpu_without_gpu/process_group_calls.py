"""See every operation that this rank hands to a process group, on gloo and in NCCL's ways."""

import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol
from unittest import mock

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core.distributed import communication
from megatron.core.distributed.zero import gathered_params, stage
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transport import collectives, transport
from megatron.core.transport.transport import NativeTransport

_FORMER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
}
_METHODS = {
    **{name: name for name in ("broadcast", "reduce", "gather", "scatter", "barrier")},
    **{name: name for name in ("send", "recv", "reduce_scatter", "alltoall", *_FORMER_NAMES)},
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allreduce_coalesced": "all_reduce",
}
"""Method of a process group -> what the operation is called."""


@dataclass(frozen=True)
class GroupCall:
    """One call of a process group's method.

    Attributes:
        tensors: of each argument, in order; none of an argument that is no tensor.
        batch: a number that messages share which are started as one; -1 if it is alone.
        where: file and line that asked for it.
    """

    name: str
    group: Any
    args: Sequence[Any]
    options: Any
    tensors: list[list[Tensor]]
    batch: int
    where: str


class Observer(Protocol):
    """Who is told of calls."""

    def started(self, call: GroupCall) -> Callable[[], None]:
        """Take note of a call that begins; the result takes note that it is waited for."""
        ...


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Inside, tell `observer` of all calls of groups of more than one rank."""
    batch = [-1]
    batches = itertools.count()
    start_batch = dist.batch_isend_irecv

    def in_one_batch(operations: list[Any]) -> list[Any]:
        batch[0] = next(batches)
        try:
            return start_batch(operations)
        finally:
            batch[0] = -1

    with ExitStack() as stack:
        # A backend is used by itself where torch.distributed does not know of the group; where it
        # does, the group calls it in C++.
        for kind in (dist.ProcessGroup, dist.ProcessGroupGloo.__base__):
            for method, name in _METHODS.items():
                for attribute in {method, _FORMER_NAMES.get(method, method)} & set(dir(kind)):
                    seen = _seen(observer, getattr(kind, attribute), name, batch)
                    stack.enter_context(mock.patch.object(kind, attribute, seen))
        stack.enter_context(mock.patch.object(dist, "batch_isend_irecv", in_one_batch))
        yield


@contextmanager
def ways_of_nccl() -> Iterator[None]:
    """Inside, tensors on CPUs are sent as on GPUs: by collectives of the backend alone, without
    tags, with a channel for each direction of a pipeline."""
    with ExitStack() as stack:
        for module in (transport, communication, stage, gathered_params):
            stack.enter_context(mock.patch.object(module, "has_tags", return_value=False))
        stack.enter_context(mock.patch.object(collectives, "select_transport", _native_transport))
        without_tags = property(lambda communicator: False)
        stack.enter_context(mock.patch.object(P2PCommunicator, "has_tags", without_tags))
        yield


def _native_transport(_x: Tensor, group: Any) -> NativeTransport:
    return NativeTransport(group)


def _seen(
    observer: Observer, original: Callable[..., Any], name: str, batch: list[int]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def started(group: Any, *args: Any, **kwargs: Any) -> Any:
        if group.size() == 1:
            return original(group, *args, **kwargs)
        options = next((a for a in [*args, *kwargs.values()] if hasattr(a, "timeout")), None)
        tensors = [_tensors(arg) for arg in args]
        call = GroupCall(name, group, args, options, tensors, batch[0], caller())
        note = observer.started(call)
        with _disable_current_modes():  # gloo computes with torch's operations
            return _SeenWork(original(group, *args, **kwargs), note)

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
        with _disable_current_modes():
            return self._work.wait(*timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _tensors(arg: Any) -> list[Tensor]:
    if isinstance(arg, Tensor):
        return [arg]
    if isinstance(arg, list | tuple):
        return [tensor for each in arg for tensor in _tensors(each)]
    return []


_BETWEEN = (
    *(
        "/torch/",
        "/unittest/",
        "contextlib.py",
        "/core/transport/",
        "/foundation/flight_recorder.py",
    ),
    *("/process_group_calls.py", "/collective_order/", "/races/"),
)


def calling_frame() -> FrameType:
    """Return the frame that is behind torch, the transport and these tests' own tools."""
    frame = sys._getframe(1)
    while frame.f_back is not None and any(p in frame.f_code.co_filename for p in _BETWEEN):
        frame = frame.f_back
    return frame


def caller() -> str:
    """Return file and line of `calling_frame`."""
    frame = calling_frame()
    name = frame.f_code.co_filename
    at = max(name.rfind("/megatron/"), name.rfind("/tests/"))
    return f"{name[at + 1 :]}:{frame.f_lineno}"
