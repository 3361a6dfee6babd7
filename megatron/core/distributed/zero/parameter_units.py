"""When sharded parameters are unsharded: hooks around the units of a model chunk.

    forward    gather unit k, start unit k+1 | compute | free unit k
    backward   gather unit k, start unit k-1 | compute | gradients complete: reduce, free unit k

At most one unit is gathered while another one computes. Shards of later units that are offloaded
are prefetched to the device, in the order of their gathers: at the end of a forward pass for the
backward pass, at the end of a backward pass for the next micro batch's forward pass, and after the
update for the next step.

Units that one pass uses last and the next pass uses first stay unsharded in between. From forward
to backward: the last unit of a chunk, the parameters of the chunk itself, and a tied weight that
the head has read. From backward to the forward pass of another micro batch: the first units. A
forward pass inside backward (activation recompute) frees nothing; the unit's backward pass does.

The forward pass of one micro batch and the backward pass of another may overlap
(`core.step_context.overlap`). A unit is unsharded while *either* pass uses or gathers it: each pass
releases the units that it has gathered, and the last release frees the unit. So no pass frees
weights that the other one uses, each pass has at most two units, and a unit that both use is
gathered once. The two passes switch at fixed points in the program, not by timing, so all ranks
start the same gathers in the same order. Only the backward pass writes gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.communication import gather_on_all_ranks
from megatron.core.distributed.model_parameters import Unit
from megatron.core.distributed.zero.sharded_params import Pass
from megatron.core.distributed.zero.stage import ZeroStage
from megatron.core.distributed.zero.stage3 import Zero3Buffer
from megatron.core.kernels.cpu.malloc import return_free_pages
from megatron.core.step_context.deferred_wgrad import defer_wgrad

_NUM_FIRST = 3
"""The remaining parameters of a chunk, its embedding and its first layer."""

_Location = tuple[Zero3Buffer, int]
"""A buffer, and the number of a unit in it."""


class ParameterUnits:
    """Gathers and frees the parameters of a model chunk around its computation.

    A parameter that is passed to a module as an argument (a tied weight) is unsharded for that
    module, too.
    """

    def __init__(self, units: Sequence[Unit], locations: dict[nn.Parameter, _Location]) -> None:
        """
        Args:
            units: result of `units_of`: the remaining parameters first, then in forward order.
            locations: buffer and unit number of each sharded parameter.
        """
        self._unit_of: dict[nn.Parameter, int] = {}
        self._locations: list[list[_Location]] = []
        """Sections of each unit: one per dtype, and one per tied weight."""
        for number, unit in enumerate(units):
            sharded = [p for p in unit.parameters if p in locations]
            # In the order of the parameters, not of a set: ranks start their gathers in one order.
            found = dict.fromkeys(locations[p] for p in sharded)
            self._locations.append(sorted(found, key=lambda location: location[1]))
            self._unit_of |= dict.fromkeys(sharded, number)
        self._buffers = list(dict.fromkeys(b for b, _ in chain.from_iterable(self._locations)))
        self._meshes = [buffer.flat.mesh for buffer in self._buffers]
        self._last = len(units) - 1
        self._read_late: set[int] = set()
        """Units with a weight that a later module has read, too: a tied weight."""
        self._has_backward = False
        """A backward pass follows the forward pass that has begun last."""
        self._has_next_forward = False
        """Another micro batch follows the running backward passes."""
        self._install_hooks(units)

    def _install_hooks(self, units: Sequence[Unit]) -> None:
        root, *others = units
        self._hook(root.entry, (0,))
        inside: set[nn.Module] = set()
        for unit in others:
            used = sorted({self._unit_of[p] for p in unit.entry.parameters() if p in self._unit_of})
            self._hook(unit.entry, tuple(used))
            inside.update(unit.entry.modules())
        for module in root.entry.modules():
            if module not in inside and not list(module.children()):
                own = {self._unit_of.get(p, 0) for p in module.parameters()}
                self._hook(module, (), tied=tuple(sorted(own - {0})))

    def _hook(self, module: nn.Module, used: tuple[int, ...], tied: tuple[int, ...] = ()) -> None:
        """Unshard the units of a module before it computes.

        Args:
            used: its own units.
            tied: units of other modules that share a weight with it.
        """

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            user = Pass.BACKWARD if _is_in_backward() else Pass.FORWARD
            if used == (0,) and user is Pass.FORWARD:
                self._has_backward = torch.is_grad_enabled()
                self.prefetch_first()
            self._gather(self._with_arguments((*used, *tied), args, kwargs), user)
            if used and user is Pass.FORWARD:
                if used[-1] < self._last:
                    self._start_gather(used[-1] + 1, user)
                self._prefetch(self._after(used[-1], Pass.FORWARD))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            numbers = self._with_arguments((*used, *tied), args, kwargs)
            self._after_forward(numbers, used, output)
            if used == (0,) and not _is_in_backward():
                self._end(Pass.FORWARD)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)

    def _with_arguments(self, used: tuple[int, ...], args: Any, kwargs: Any) -> tuple[int, ...]:
        passed = [
            self._unit_of[value]
            for value in (*args, *kwargs.values())
            if isinstance(value, nn.Parameter) and value in self._unit_of
        ]
        return (*used, *(number for number in passed if number not in used))

    def _after_forward(self, numbers: tuple[int, ...], used: tuple[int, ...], output: Any) -> None:
        """
        Args:
            numbers: units whose weights a module has used.
            used: the module's own units among them.
        """
        if not numbers:
            return
        unit = used[0] if used else None
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(numbers, unit))
        if _is_in_backward():
            return
        for number in numbers:
            # The backward pass reads first what forward has read last.
            is_late = number not in used
            self._release(number, Pass.FORWARD, is_late=is_late)
            if is_late:
                self._read_late.add(number)

    def _before_backward(self, numbers: tuple[int, ...], unit: int | None) -> None:
        """Gather units, allocate their gradients, and start to gather the next unit."""
        self._gather(numbers, Pass.BACKWARD)
        for number in numbers:
            for buffer, section in self._locations[number]:
                if defer_wgrad(partial(buffer.prepare_gradients, section)):
                    buffer.withhold_gradients(section)
                else:
                    buffer.prepare_gradients(section)
        if numbers[0] == 1:
            # The gradient of a large table is next; nearly all activations have been freed.
            return_free_pages()
        if unit is not None:
            if unit > 1:
                self._start_gather(unit - 1, Pass.BACKWARD)
            self._prefetch(self._after(unit or self._last, Pass.BACKWARD))

    def _after(self, number: int, user: Pass) -> list[int]:
        """Return the units that are gathered after a unit, in their order."""
        if user is Pass.FORWARD:
            backward = range(self._last - 1, 0, -1) if self._has_backward else ()
            return [*range(number + 1, self._last + 1), *sorted(self._read_late), *backward]
        forward = range(self._last + 1) if self._has_next_forward else ()
        return [*range(number - 1, 0, -1), *forward]

    def expect_forward(self, is_expected: bool) -> None:
        """Note whether another micro batch follows the backward passes that begin now.

        If so, the first units stay unsharded: the backward pass ends with them, and the next
        forward pass begins with them.
        """
        self._has_next_forward = is_expected
        sections: dict[Zero3Buffer, set[int]] = {b: set() for b in self._buffers}
        for buffer, section in chain.from_iterable(self._locations[:_NUM_FIRST]):
            sections[buffer].add(section)
        for buffer, first in sections.items():
            buffer.kept_after_backward = frozenset(first if is_expected else ())

    def _start_gather(self, number: int, user: Pass) -> None:
        for buffer, section in self._locations[number]:
            buffer.params.start_gather(section, user)

    def prefetch_first(self) -> None:
        """Prefetch the shards of the first units of a forward pass."""
        self._prefetch(range(self._last + 1))

    def _prefetch(self, numbers: Iterable[int]) -> None:
        """Prefetch the shards of units, in order, as long as memory allows."""
        for number in numbers:
            takes_more = [
                buffer.params.prefetch(section) for buffer, section in self._locations[number]
            ]
            if not all(takes_more):
                return

    def _gather(self, numbers: Sequence[int], user: Pass) -> None:
        for number in numbers:
            self._start_gather(number, user)
        for number in numbers:
            for buffer, section in self._locations[number]:
                buffer.params.gather(section, user)

    def _release(self, number: int, user: Pass, *, is_late: bool = False) -> None:
        is_first = number in (0, self._last) or is_late
        keep = user is Pass.FORWARD and is_first and torch.is_grad_enabled()
        for buffer, section in self._locations[number]:
            buffer.release(section, user, keep=keep)

    def _end(self, user: Pass) -> None:
        """Release units that a pass has gathered and not used, or gathered again after use."""
        for number in range(len(self._locations)):
            self._release(number, user)

    def end_backward(self) -> None:
        """Release the remaining units of a backward pass; a forward pass may be running."""
        self._end(Pass.BACKWARD)

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Inside, all parameters are unsharded; changes to them are lost.

        Raises:
            CheckpointError: on all ranks, if one of them fails, for example out of memory.
        """
        try:
            gather_on_all_ranks(self._allocate, self._meshes)
            for number in range(len(self._locations)):
                gather_on_all_ranks(partial(self._prefetch, [number]), self._meshes)
                gather_on_all_ranks(partial(self._gather, [number], Pass.FORWARD), self._meshes)
            yield
        finally:
            self._reshard()

    def _reshard(self) -> None:
        for buffer in self._buffers:
            buffer.params.prepare_update()

    def _allocate(self) -> None:
        self._reshard()  # the end of an earlier call may have failed on this rank alone
        for buffer, section in chain.from_iterable(self._locations):
            buffer.params.units[section].allocate()


def parameter_units(units: Sequence[Unit], stages: Sequence[ZeroStage]) -> ParameterUnits | None:
    """Return the units of the sharded parameters of `stages`; None if all parameters are whole."""
    locations: dict[nn.Parameter, _Location] = {}
    for stage in stages:
        if isinstance(stage, Zero3Buffer):
            for index, parameter in enumerate(stage.flat.parameters):
                locations[parameter] = stage, stage.params.unit_of[index]
    return ParameterUnits(units, locations) if locations else None


def _is_in_backward() -> bool:
    """Return whether a backward pass is running: a forward pass is then a recomputation."""
    return torch._C._current_graph_task_id() != -1
