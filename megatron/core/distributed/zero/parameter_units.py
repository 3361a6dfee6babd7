"""When sharded parameters are unsharded: hooks around the units of a model chunk.

    forward    gather unit k, start unit k+1 | compute | free unit k
    backward   gather unit k, start unit k-1 | compute | gradients complete: reduce, free unit k

One unit beyond the computing one is on its way, never more; the shards of the next after it are
brought near where they are not in the device's memory. The last unit of a chunk, and what
belongs to the chunk itself, stay unsharded between forward and backward, which needs them first.
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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.model_parameters import Unit
from megatron.core.distributed.zero.flat_param import Pass
from megatron.core.distributed.zero.stage3 import Zero3Buffer
from megatron.core.kernels.cpu.malloc import return_free_pages
from megatron.core.step_context.deferred_wgrad import defer_wgrad

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
        self._last = len(units) - 1
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
                for number in range(3):
                    self._prefetch(number)
            self._gather(self._with_arguments((*used, *tied), args, kwargs), user)
            if used and used[-1] < self._last and user is Pass.FORWARD:
                self._start_gather(used[-1] + 1, user)
                self._prefetch(used[-1] + 2)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            numbers = self._with_arguments((*used, *tied), args, kwargs)
            before_that = used[0] - 1 if used and used[0] > 1 else None
            self._after_forward(numbers, before_that, output)
            if used and used[-1] == self._last and torch.is_grad_enabled():
                self._prefetch(self._last - 1)  # backward comes to it second
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

    def _after_forward(
        self, numbers: tuple[int, ...], before_that: int | None, output: Any
    ) -> None:
        if not numbers:
            return
        if torch.is_grad_enabled():
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._before_backward(numbers, before_that))
        if _is_in_backward():
            return
        for number in numbers:
            self._release(number, Pass.FORWARD)

    def _before_backward(self, numbers: tuple[int, ...], before_that: int | None) -> None:
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
        if before_that is not None:
            self._start_gather(before_that, Pass.BACKWARD)
            self._prefetch(before_that - 1)

    def _start_gather(self, number: int, user: Pass) -> None:
        for buffer, section in self._locations[number]:
            buffer.start_gather(section, user)

    def _prefetch(self, number: int) -> None:
        """Bring the shards of a unit near, which is gathered after the one that is on its way."""
        if 0 <= number <= self._last:
            for buffer, section in self._locations[number]:
                buffer.prefetch(section)

    def _gather(self, numbers: Sequence[int], user: Pass) -> None:
        for number in numbers:
            self._start_gather(number, user)
        for number in numbers:
            for buffer, section in self._locations[number]:
                buffer.gather(section, user)

    def _release(self, number: int, user: Pass) -> None:
        keep = user is Pass.FORWARD and number in (0, self._last) and torch.is_grad_enabled()
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
        """Inside, all parameters are unsharded; what is written to them is lost."""
        self._gather(range(len(self._locations)), Pass.FORWARD)
        try:
            yield
        finally:
            for buffer in dict.fromkeys(
                buffer for locations in self._locations for buffer, _ in locations
            ):
                buffer.wait_for_readers()


def _is_in_backward() -> bool:
    """Return whether a backward pass is running: this is a recomputation then."""
    return torch._C._current_graph_task_id() != -1
