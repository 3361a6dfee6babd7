"""A dispatch mode that keeps the clocks of imagined streams, and reports races."""

import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.distributed.zero import sharded_params, stage2
from megatron.core.foundation import device
from megatron.core.offload import device_copies, saved_activations
from megatron.core.step_context.overlap import Overlap
from tests.gpu_without_gpu.process_group_calls import GroupCall, caller, observed, ways_of_nccl
from tests.gpu_without_gpu.races.clocks import COMPUTE, HOST, Clocks
from tests.gpu_without_gpu.races.memory import Access, Block, Memory, byte_range, tensors_in

_MAKES_ALIKE = re.compile("(new_.*|.*_like)")
_WAITS_ON_HOST = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
}
_READS = {
    **dict.fromkeys(("all_gather", "all_gather_single", "all_to_all_single", "alltoall"), 1),
    **dict.fromkeys(("gather", "scatter", "reduce_scatter", "reduce_scatter_single"), 1),
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "send"), 0),
}
"""Operation -> the argument that it reads."""


class RaceDetector(TorchDispatchMode):
    """Sees all operations of this thread, and those that are handed to process groups.

    Args:
        clocks: of the program, and of the same without some of its waits.
    """

    def __init__(self, clocks: Sequence[Clocks]) -> None:
        super().__init__()
        self.clocks = clocks
        self.num_operations = 0
        self._memory = Memory(self._is_freed)
        self._names: dict[int, str] = {}
        for stream, name in ((HOST, "the host"), (0, "default"), (COMPUTE, "computing")):
            self._add_stream(stream, name)
        self._num_launches = 0
        self._communicators: dict[Any, int] = {}
        self._groups: list[Any] = []
        self._thread = threading.local()
        self._lock = threading.RLock()

    # Streams ----------------------------------------------------------------------------------

    @property
    def stream(self) -> int:
        """The current stream of this thread."""
        return getattr(self._thread, "stream", 0)

    @stream.setter
    def stream(self, stream: int) -> None:
        self._thread.stream = stream

    def new_stream(self, name: str) -> int:
        """Return another stream."""
        stream = max(self._names) + 1
        self._add_stream(stream, name)
        return stream

    def _add_stream(self, stream: int, name: str) -> None:
        self._names[stream] = name
        for clocks in self.clocks:
            clocks.create_stream(stream)

    def record(self, stream: int) -> int:
        """Return an event: all that `stream` has been given so far."""
        return max(clocks.record(stream) for clocks in self.clocks)

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        for clocks in self.clocks:
            clocks.wait(stream, event)

    def _wait_on_host(self, stream: int) -> None:
        for clocks in self.clocks:
            clocks.all_streams_wait_for_stream(stream)

    # Operations -------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,
        _types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute the result, and take note of what was read and written."""
        options = dict(kwargs or {})
        is_pinned = bool(options.get("pin_memory"))
        if is_pinned:
            options["pin_memory"] = False
        result = func(*args, **options)
        if func.namespace not in ("c10d", "prim", "profiler"):
            with self._lock:
                self._compute(func, args, options, result, is_pinned)
        return result

    def _compute(
        self, func: Any, args: Sequence[Any], options: dict[str, Any], result: Any, is_pinned: bool
    ) -> None:
        self.num_operations += 1
        reads, writes = _accessed(func, args, options, result)
        blocks = [(x, w, self._block(x)) for w, xs in ((0, reads), (1, writes)) for x in xs]
        if is_pinned:
            for _, _, block in blocks:
                block.is_host = True
        stream = self.stream
        on_host = [block.is_host for _, _, block in blocks]
        is_copy = func is torch.ops.aten.copy_.default
        if any(on_host) and not (is_copy and not all(on_host)):
            # What the host computes with, it has copied from the device, and has waited for it.
            if not all(on_host):
                self._wait_on_host(stream)
            stream = HOST
        if blocks:
            what = f"{func} ({caller()})"
            self._launch(stream, [(x, bool(w), block) for x, w, block in blocks], what)
        is_blocking = is_copy and any(on_host) and not (len(args) > 2 and args[2])
        if func in _WAITS_ON_HOST or (is_blocking and stream != HOST):
            self._wait_on_host(stream)

    def _launch(
        self,
        stream: int,
        tensors: Sequence[tuple[Tensor, bool, Block]],
        what: str,
        *,
        held_for: int = HOST,
    ) -> None:
        self._num_launches = number = self._num_launches + 1
        for clocks in self.clocks:
            clocks.launch(stream, number)
        for tensor, is_write, block in tensors:
            begin, end = byte_range(tensor)
            access = Access(begin, end, is_write, stream, number, what, held_for)
            for earlier in block.add(access):
                for clocks in self.clocks:
                    if not clocks.is_ordered_after(stream, earlier.number, earlier.stream):
                        self._report(clocks, access, earlier)

    def _block(self, tensor: Tensor) -> Block:
        return self._memory.block_of(tensor.untyped_storage(), self.stream)

    def _report(self, clocks: Clocks, access: Access, earlier: Access) -> None:
        verb = "writes to" if access.is_write else "reads"
        other = "writes" if earlier.is_write else "reads"
        clocks.reports.setdefault(
            (access.what, earlier.what),
            f"on stream {self._names[access.stream]!r} {access.what} {verb} what {earlier.what}"
            f" {other} on stream {self._names[earlier.stream]!r}, without waiting for it",
        )

    # Memory -----------------------------------------------------------------------------------

    def _is_freed(self, block: Block, *, is_resized: bool = False) -> None:
        """Look for streams that may not have done with memory that is given away."""
        if block.is_host:
            return
        with self._lock:
            for clocks, access in itertools.product(self.clocks, block.accesses):
                # The allocator gives it to what comes next on its own stream, after what the
                # streams that it knows of have been given so far.
                waited = {block.stream, *(s for name, s in block.users if name == clocks.without)}
                is_kept = access.held_for in waited and not is_resized
                if is_kept or access.stream == HOST:  # the host has done what it did
                    continue
                # What the host has waited for is over, whoever comes next.
                if not any(
                    clocks.is_ordered_after(s, access.number, access.stream)
                    for s in (HOST, *waited)
                ):
                    new = Access(0, 0, True, block.stream, 0, "the next owner of the memory")
                    self._report(clocks, new, access)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int) -> None:
        """Take note that a storage gets another memory, or none."""
        with self._lock:
            block = self._memory.block_of(storage, self.stream)
            self._is_freed(block, is_resized=True)
            self._memory.forget(storage)
            if num_bytes:
                self._memory.block_of(storage, self.stream)

    def keep_for(self, tensor: Tensor, stream: int) -> None:
        """Let the memory of a tensor not be given away before `stream` has done with it."""
        block = self._block(tensor)
        for clocks in self.clocks:
            if not clocks.is_skipped("record_stream"):
                block.users.add((clocks.without, stream))

    # Communication ----------------------------------------------------------------------------

    def started(self, call: GroupCall) -> Callable[[], None]:
        """Run an operation of a process group on the stream of its communicator; see `Observer`."""
        with self._lock:
            is_pair = call.name in ("send", "recv") and call.batch < 0
            key = (id(call.group), call.args[1] if is_pair else None)
            if key not in self._communicators:
                self._groups.append(call.group)  # so that its id is nobody else's
                self._communicators[key] = self.new_stream(_name_of(call))
            stream = self._communicators[key]
            begun = self.record(self.stream)
            for clocks in self.clocks:
                clocks.stream_wait_for_event(stream, begun)
            tensors = call.tensors
            reads = tensors[_READS[call.name]] if call.name in _READS else []
            is_read_only = call.name == "send" or (
                call.name == "broadcast" and call.group.rank() == call.options.rootRank
            )
            writes = [] if is_read_only or not tensors else tensors[0]
            seen = [(x, False, self._block(x)) for x in reads if x.numel()]
            seen += [(x, True, self._block(x)) for x in writes if x.numel()]
            what = f"{call.name} ({call.where})"
            self._launch(stream, seen, what, held_for=self.stream)
            ended = self.record(stream)

        def waited() -> None:
            with self._lock:
                self.wait(self.stream, ended)

        return waited


def _name_of(call: GroupCall) -> str:
    try:
        return f"of group {dist.get_process_group_ranks(call.group)}"
    except (KeyError, ValueError, AttributeError):  # made without torch.distributed
        return "of messages"


class _SameInThread(TorchDispatchMode):
    """The detector in another thread."""

    def __init__(self, detector: RaceDetector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._detector.__torch_dispatch__(func, types, args, kwargs)


@functools.cache
def _roles(func: Any) -> tuple[bool, list[bool], bool]:
    """Return whether tensors are taken for their shapes alone, which arguments are written, and
    whether the result is memory of its own."""
    schema = func._schema
    is_alike = bool(_MAKES_ALIKE.match(schema.name.split("::")[-1]))
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
    is_new = all(r.alias_info is None for r in schema.returns)
    return is_alike, writes, is_new


def _accessed(
    func: Any, args: Sequence[Any], options: Mapping[str, Any], result: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads and writes, by its schema."""
    is_alike, is_written, is_new = _roles(func)
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else options.get(argument.name)
        if value is None:
            continue
        if is_written[place]:
            writes += tensors_in(value)
        elif argument.alias_info is None and not is_alike:
            reads += tensors_in(value)
    if is_new:
        given = {id(x.untyped_storage()) for x in reads}
        made = [x for x in tensors_in(result) if id(x.untyped_storage()) not in given]
        writes += made
        if not made and any(True for _ in tensors_in(result)):
            reads = []  # a view, of which the schema does not say it
    return [x for x in reads if x.numel()], [x for x in writes if x.numel()]


class _Event:
    def __init__(self, detector: RaceDetector, number: int) -> None:
        self._detector, self.number = detector, number

    def synchronize(self) -> None:
        self._detector.wait(HOST, self.number)


class _Stream:
    """What stands for `torch.Stream`."""

    def __init__(self, detector: RaceDetector, number: int) -> None:
        self._detector, self.number = detector, number

    def record_event(self) -> _Event:
        return _Event(self._detector, self._detector.record(self.number))

    def wait_event(self, event: _Event) -> None:
        self._detector.wait(self.number, event.number)


@contextmanager
def watched(without: Sequence[str] = ()) -> Iterator[RaceDetector]:
    """Inside, this rank computes on an imagined device, and races are reported.

    Args:
        without: places, see `Clocks`: whether a race would be reported without each of them.
    """
    detector = RaceDetector([Clocks(place) for place in ("", *without)])
    run_half, resize = Overlap.run_half, torch.UntypedStorage.resize_

    def run_half_watched(
        overlap: Overlap, me: int, function: Callable[[], None], stream: Any = None
    ) -> None:
        def in_thread() -> None:
            with _SameInThread(detector):
                function()

        run_half(overlap, me, in_thread if me == 1 else function, stream)

    def resized(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        detector.resize(storage, num_bytes)
        return resize(storage, num_bytes)

    def current() -> Any:
        return _Stream(detector, detector.stream)

    def set_current(stream: Any) -> None:
        if stream is not None:
            detector.stream = stream.number

    def stream_of(_device: torch.device) -> Any:
        return _Stream(detector, detector.new_stream("of copies"))

    def record_stream(tensor: Tensor, stream: Any) -> None:
        detector.keep_for(tensor, stream.number)

    streams = functools.cache(saved_activations.offloader.__wrapped__)
    patches: list[tuple[Any, str, Any]] = [
        (Overlap, "run_half", run_half_watched),
        (torch.UntypedStorage, "resize_", resized),
        (torch.Tensor, "record_stream", record_stream),
        (torch, "Stream", stream_of),
        (device_copies, "is_host_memory", lambda _: False),
        (sharded_params, "is_host_memory", lambda _: False),
        (stage2, "is_host_memory", lambda _: False),
        (saved_activations, "is_host_memory", lambda _: False),
        (saved_activations, "offloader", streams),
    ]
    for module in (device, device_copies):
        patches += [
            (module, "current_stream", current),
            (module, "set_current_stream", set_current),
        ]
    patches += [(saved_activations, "current_stream", current)]
    with ExitStack() as stack:
        stack.enter_context(ways_of_nccl())
        for target, name, value in patches:
            stack.enter_context(mock.patch.object(target, name, value))
        stack.enter_context(observed(detector))
        detector.stream = COMPUTE
        stack.enter_context(detector)
        yield detector
