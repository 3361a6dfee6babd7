"""Where the host waits for the accelerator, and how many bytes each group of ranks exchanges."""

from __future__ import annotations

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

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.planner.tracing.imaginary import HostAnswers
from megatron.planner.tracing.ledger import StorageLedger, tensors_in

READS = ("tolist", "_item", "_nonzero")
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
"""Between host and device they wait, in either direction, unless they are told not to."""
AXES = ("tp", "cp", "ep", "expt_tp", "tp_ep", "pp", "dp_cp", "expt_dp", "embd", "mp", "tp_ep_pp")


def place_in_project() -> str:
    """Return the innermost line of the project that is no part of this watch."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if "megatron" in path.parts and "tracing" not in path.parts:
            begin = path.parts.index("megatron")
            return f"{'/'.join(path.parts[begin:])}:{frame.name}"
    return "elsewhere"


class AcceleratorLedger(StorageLedger):
    """Counts bytes as its base does, and what the host reads from the accelerator.

    Attributes:
        waits: place in the project -> reads of values since the last `clear`.
        traffic: (ranks of the group, operation) -> bytes that this rank gave.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.traffic: Counter[tuple[tuple[int, ...], str]] = Counter()

    def clear(self) -> None:
        """Begin anew."""
        self.waits.clear()
        self.traffic.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation."""
        if func.namespace == "c10d":
            self._exchanged(func, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in COPIES and not (kwargs or {}).get("non_blocking", len(args) > 2 and args[2]):
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            if (source.device.type == "cpu") != (result.device.type == "cpu"):
                self.waits[place_in_project()] += 1
        return result

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
        patches += [
            mock.patch.object(HostAnswers, name, self._counted(getattr(HostAnswers, name)))
            for name in READS
        ]
        for patch in patches:
            patch.start()
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()

    def _copied(self, make: Any) -> Any:
        def counted(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            if device is not None and torch.device(device).type != "cpu":
                self.waits[place_in_project()] += 1
            return make(data, *args, device=device, **kwargs)

        return counted

    def _counted(self, answer: Any) -> Any:
        def counted(answers: HostAnswers, x: Tensor) -> Any:
            if getattr(x, "fake_device", x.device).type != "cpu":
                self.waits[place_in_project()] += 1
            return answer(answers, x)

        return counted


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
