"""When sharded parameters are unsharded: hooks around the units of a model chunk.

    forward    gather unit k, start unit k+1 | compute | free unit k
    backward   gather unit k, start unit k-1 | compute | gradients complete: reduce, free unit k

One unit beyond the computing one is on its way, never more; the shards of those after it are
brought near where they are not in the device's memory, in the order in which they will be gathered:
those of the backward pass at the end of a forward pass, those of the next micro batch's forward
pass at the end of a backward pass, and those of the next step after the update.

What the end of a pass and the beginning of the next one need stays unsharded between them: the last
unit of a chunk, what belongs to the chunk itself, and a tied weight that the head has read, from
forward to backward; the first units from backward to the forward pass of another micro batch.
Inside backward (activation recompute) a forward pass frees nothing: the unit's backward pass
follows and does it.

The forward pass of one micro batch and the backward pass of another may overlap
(`core.step_context.overlap`). A unit is whole while *either* is in it or has it on its way:
each releases what it has asked for itself, and the last one to do so frees the unit. So neither
takes weights from the other, both have at most two units each, and where they meet a unit is
gathered once for both. Turns change at given places, not by the clock, so all ranks start the same
gathers in the same order; gradients belong to the one backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.core.dist_checkpointing.collective import as_checkpoint_error
from megatron.core.distributed.model_parameters import Unit
from megatron.core.distributed.zero.flat_param import Pass
from megatron.core.distributed.zero.stage3 import Zero3Buffer
from megatron.core.foundation.errors import MegatronError
from megatron.core.kernels.cpu.malloc import return_free_pages
from megatron.core.step_context.deferred_wgrad import defer_wgrad

_NUM_FIRST = 3
"""The rest of a chunk, its embedding and its first layer."""

_Location = tuple[Zero3Buffer, int]
"""A buffer, and the number of a unit in it."""


class ParameterUnits:
    """Gathers and frees the parameters of a model chunk around its computation.

    A parameter that is passed to a module as an argument (a tied weight) is unsharded there, too.
    """

    def __init__(self, units: Sequence[Unit], locations: dict[nn.Parameter, _Location]) -> None:
        """
        Args:
            units: as `units_of` returns them: the rest first, then in forward order.
            locations: where each sharded parameter is.
        """
        self._unit_of: dict[nn.Parameter, int] = {}
        self._locations: list[list[_Location]] = []
        """Sections of each unit: one per dtype, and one of each weight that is tied."""
        for number, unit in enumerate(units):
            sharded = [p for p in unit.parameters if p in locations]
            # In the order of the parameters, not of a set: ranks start their gathers in one order.
            found = dict.fromkeys(locations[p] for p in sharded)
            self._locations.append(sorted(found, key=lambda location: location[1]))
            self._unit_of |= dict.fromkeys(sharded, number)
        self._buffers = list(dict.fromkeys(b for b, _ in chain.from_iterable(self._locations)))
        self._last = len(units) - 1
        self._read_late: set[int] = set()
        """Units with a weight that a module after them has read, too: a tied one."""
        self._has_backward = False
        """The forward pass that has begun last is followed by a backward pass."""
        self._has_next_forward = False
        """The backward passes that run are followed by another micro batch."""
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
        """Let a module find its units unsharded.

        Args:
            used: its own units.
            tied: units of others, a weight of which it has as well.
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
            numbers: units whose weights a module has computed with.
            used: those of them that are its own.
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
            # What is read late is read early by the backward pass.
            is_late = number not in used
            self._release(number, Pass.FORWARD, is_late=is_late)
            if is_late:
                self._read_late.add(number)

    def _before_backward(self, numbers: tuple[int, ...], unit: int | None) -> None:
        """Gather units, give them places for gradients, and start the gather of another one."""
        self._gather(numbers, Pass.BACKWARD)
        for number in numbers:
            for buffer, section in self._locations[number]:
                if defer_wgrad(partial(buffer.prepare_gradients, section)):
                    buffer.withhold_gradients(section)
                else:
                    buffer.prepare_gradients(section)
        if numbers[0] == 1:
            # The gradient of a large table comes next, when nearly all activations are gone.
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
        """Say whether another micro batch follows the backward passes that begin now.

        What its forward pass begins with stays unsharded then: a backward pass ends with it.
        """
        self._has_next_forward = is_expected
        sections: dict[Zero3Buffer, set[int]] = {b: set() for b in self._buffers}
        for buffer, section in chain.from_iterable(self._locations[:_NUM_FIRST]):
            sections[buffer].add(section)
        for buffer, first in sections.items():
            buffer.kept_after_backward = frozenset(first if is_expected else ())

    def _start_gather(self, number: int, user: Pass) -> None:
        for buffer, section in self._locations[number]:
            buffer.start_gather(section, user)

    def prefetch_first(self) -> None:
        """Bring near what a forward pass begins with."""
        self._prefetch(range(self._last + 1))

    def _prefetch(self, numbers: Iterable[int]) -> None:
        """Bring the shards of units near, of the first ones as many as may be."""
        for number in numbers:
            takes_more = [buffer.prefetch(section) for buffer, section in self._locations[number]]
            if not all(takes_more):
                return

    def _gather(self, numbers: Sequence[int], user: Pass) -> None:
        for number in numbers:
            self._start_gather(number, user)
        for number in numbers:
            for buffer, section in self._locations[number]:
                buffer.gather(section, user)

    def _release(self, number: int, user: Pass, *, is_late: bool = False) -> None:
        is_first = number in (0, self._last) or is_late
        keep = user is Pass.FORWARD and is_first and torch.is_grad_enabled()
        for buffer, section in self._locations[number]:
            buffer.release(section, user, keep=keep)

    def _end(self, user: Pass) -> None:
        """Release what a pass has asked for without coming to it, or after it had done with it."""
        for number in range(len(self._locations)):
            self._release(number, user)

    def end_backward(self) -> None:
        """Release what the backward pass that ends has not; a forward pass may be running."""
        self._end(Pass.BACKWARD)

    @contextmanager
    def summon(self) -> Iterator[None]:
        """Inside, all parameters are unsharded; what is written to them is lost.

        Raises:
            CheckpointError: on all ranks, if one of them fails, for example for want of memory.
        """
        try:
            self._all_ranks(self._allocate)
            self._all_ranks(self._gather_all)
            yield
        finally:
            for buffer in self._buffers:
                buffer.wait_for_readers()

    def _all_ranks(self, step: Callable[[], None]) -> None:
        problem: MegatronError | None = None
        try:
            step()
        except Exception as error:
            problem = as_checkpoint_error(error, "gathering parameters")
        for buffer in self._buffers:
            problem = buffer.flat.mesh.agreed(problem)
        if problem is not None:
            raise problem

    def _allocate(self) -> None:
        for buffer, section in chain.from_iterable(self._locations):
            buffer.params.allocate(section)

    def _gather_all(self) -> None:
        """Gather all units, also those after one that this rank fails to unshard."""
        problems: list[Exception] = []
        for number in range(len(self._locations)):
            try:
                self._gather([number], Pass.FORWARD)
            except Exception as error:
                problems.append(error)
        if problems:
            raise problems[0]


def _is_in_backward() -> bool:
    """Return whether a backward pass is running: this is a recomputation then."""
    return torch._C._current_graph_task_id() != -1
