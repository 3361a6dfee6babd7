"""Where the host waits for the accelerator, what a CUDA graph of it could not replay, and how many
bytes each group of ranks exchanges."""

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.offload import device_copies
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.metrics.memory_timeline import MemoryTimeline, tensors_in
from megatron.training.setup.fake_device import HostAnswers

READS = ("tolist", "_item", "_nonzero")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Between host and device they wait, in either direction, unless they are told not to."""
READ = "the host reads a value"
EVENT = "the host waits for an event"
SHAPE = "a shape depends on values"
COPY = "host memory is copied: a replay copies what is there then, from pinned memory alone"
RANDOM = "a random state is used that is not registered with the graph"
_aten = torch.ops.aten
NO_LAUNCH = {
    _aten.detach.default, _aten.empty.memory_format, _aten.empty_like.default,
    _aten._unsafe_view.default, _aten.lift_fresh.default, _aten.new_empty.default,
    _aten.empty_strided.default, _aten.new_empty_strided.default,
}  # fmt: skip
"""Operations that are not declared as views and compute nothing."""
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::_grouped_mm"}
AXES = ("tp", "cp", "ep", "expt_tp", "tp_ep", "pp", "dp_cp", "expt_dp", "embd", "mp", "tp_ep_pp")


def place_in_project() -> str:
    """Return the innermost line of the project that is no part of this watch."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.name == "pretrain_gpt.py":
            return f"{path.name}:{frame.name}"
        is_tracer = path.name in {"fake_device.py", "memory_timeline.py", "traced_rank.py"}
        if "megatron" in path.parts and not is_tracer:
            begin = path.parts.index("megatron")
            return f"{'/'.join(path.parts[begin:])}:{frame.name}"
    return "elsewhere"


class AcceleratorLedger(MemoryTimeline):
    """Counts bytes of the accelerator as its base does, and what the host reads from there.

    Attributes:
        waits: place in the project -> reads of values since the last `clear`.
        obstacles: (place in the project, why) -> how often something happened, since the last
            `clear`, that a CUDA graph cannot hold.
        traffic: (ranks of the group, operation) -> bytes that this rank gave.
        operations: place in the project -> operations on the accelerator that are no views, since
            the last `clear`.
        watched: addresses of storages of weights.
        copied: place in the project -> bytes of these weights that an operation read which is no
            product, since the last `clear`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ignored_device = "cpu"
        self.waits: Counter[str] = Counter()
        self.obstacles: Counter[tuple[str, str]] = Counter()
        self.traffic: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.operations: Counter[str] = Counter()
        self.watched: frozenset[int] = frozenset()
        self.copied: Counter[str] = Counter()

    def clear(self) -> None:
        """Begin anew."""
        self.waits.clear()
        self.obstacles.clear()
        self.traffic.clear()
        self.operations.clear()
        self.copied.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        if func is torch.ops.aten.record_stream.default:
            return None  # delays the end of memory's life, which is counted without streams
        if func.namespace == "c10d":
            self._exchanged(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COPIES:
            self._copied_between(func, args, kwargs or {}, result)
        elif _draws(func, args, kwargs or {}) and _is_on_device(result):
            self.obstacles[place_in_project(), RANDOM] += 1
        if func.namespace == "aten" and not func.is_view and func not in NO_LAUNCH:
            self._computed(func, args, kwargs or {}, result)
        return result

    def _computed(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        if not _is_on_device((args, result)):
            return
        self.operations[place_in_project()] += 1
        if func._schema.name in PRODUCTS or not self.watched:
            return
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is None:  # it is read and not written
                self.copied[place_in_project()] += sum(
                    x.numel() * x.element_size()
                    for x in tensors_in(value)
                    if x.untyped_storage()._cdata in self.watched
                )

    def _copied_between(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Tensor
    ) -> None:
        source = args[1] if func is torch.ops.aten.copy_.default else args[0]
        if (source.device.type == "cpu") == (result.device.type == "cpu"):
            return
        place = place_in_project()
        self.obstacles[place, READ if result.device.type == "cpu" else COPY] += 1
        if not kwargs.get("non_blocking", len(args) > 2 and args[2]):
            self.waits[place] += 1

    def _exchanged(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
                given = sum(x.numel() * x.element_size() for x in tensors_in((args, kwargs)))
                self.traffic[ranks, func._schema.name.removeprefix("c10d::")] += given
                return

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, reads of values are counted."""
        patches: list[Any] = [mock.patch.object(torch, "tensor", self._copied(torch.tensor))]
        patches += [mock.patch.object(device_copies, "wait_on_host", self._waited)]
        patches += [
            mock.patch.object(HostAnswers, name, self._counted(name, getattr(HostAnswers, name)))
            for name in READS
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def _waited(self, _: torch.Event) -> None:
        self.waits[place_in_project()] += 1
        self.obstacles[place_in_project(), EVENT] += 1

    def _copied(self, make: Any) -> Any:
        def counted(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None and torch.device(device).type != "cpu":
                self.waits[place_in_project()] += 1
                self.obstacles[place_in_project(), COPY] += 1
            return make(data, *args, device=device, **kwargs)

        return counted

    def _counted(self, name: str, answer: Any) -> Any:
        def counted(answers: HostAnswers, x: Tensor) -> Any:
            if getattr(x, "fake_device", x.device).type != "cpu":
                place = place_in_project()
                self.waits[place] += 1
                self.obstacles[place, SHAPE if name == "_nonzero" else READ] += 1
            return answer(answers, x)

        return counted


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation takes random numbers: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(given)
    return True


def _is_on_device(result: Any) -> bool:
    return any(x.device.type != "cpu" for x in tensors_in(result))


def bytes_by_axis(
    traffic: Mapping[tuple[tuple[int, ...], str], int], groups: ProcessGroupCollection
) -> Counter[tuple[str, str]]:
    """Return (axis, operation) -> bytes, axes of equal ranks under the first one's name."""
    names: dict[tuple[int, ...], str] = {}
    for axis in AXES:
        names.setdefault(tuple(groups.ranks.get(axis, ())), axis)
    found: Counter[tuple[str, str]] = Counter()
    for (ranks, operation), count in traffic.items():
        found[names.get(ranks, f"{len(ranks)} ranks"), operation] += count
    return found
