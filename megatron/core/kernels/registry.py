"""Choosing a kernel by its features.

A table lists the kernels of one operation for each type of device, in order of preference. A
request contains the device, the dtype, and the features needed beyond the plain case. The first
kernel that supports all of them is chosen, and the reasons against the kernels before it are kept.
A fused kernel or a vendor's library is one more entry.

Nothing here imports torch: a choice can be made, and tested, for a device that is not present.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from megatron.core.foundation.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Run = TypeVar("Run", bound=Callable[..., object], covariant=True)

OTHER_DEVICES = "accelerator"
"""The kernels of a device type that has no list of its own."""


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Request:
    """The requirements of a layer.

    Attributes:
        device: torch's name of the device type ("cpu", "cuda").
        dtype: torch's name of the activations' dtype ("bfloat16").
        needs: features beyond the plain case, by the operation's names for them.
        is_planned: the device belongs to another machine: libraries that this installation lacks
            may be installed there, so they rule out no kernel.
    """

    device: str
    dtype: str
    needs: frozenset[str] = frozenset()
    is_planned: bool = False

    @staticmethod
    def of(x: Tensor, needs: Iterable[str] = ()) -> Request:
        """Return the request for a tensor of any shape: its device and dtype."""
        return Request(x.device.type, dtype_name(x.dtype), frozenset(needs))


@dataclass(frozen=True)
class Kernel(Generic[Run]):
    """One way to compute an operation.

    Attributes:
        name: as it is printed.
        run: computes it; the operation defines the arguments.
        supports: features that it supports.
        dtypes: dtypes that it computes in; None is all.
        missing: returns why this installation cannot run it, or None.
        library: it belongs to a library that not every installation has.
        excludes: sets of features that it supports one by one, but not together.
    """

    name: str
    run: Run
    supports: frozenset[str] = frozenset()
    dtypes: frozenset[str] | None = None
    missing: Callable[[], str | None] | None = None
    library: bool = False
    excludes: tuple[frozenset[str], ...] = ()

    def refusal(self, request: Request) -> str | None:
        """Return why the kernel cannot serve the request; None if it can."""
        lacking = sorted(request.needs - self.supports)
        if lacking:
            return f"does not support {', '.join(lacking)}"
        for together in self.excludes:
            if together <= request.needs:
                return f"does not support {' with '.join(sorted(together))}"
        if self.dtypes is not None and request.dtype not in self.dtypes:
            return f"computes in {', '.join(sorted(self.dtypes))}, not in {request.dtype}"
        return None if self.missing is None or request.is_planned else self.missing()


@dataclass(frozen=True)
class Choice(Generic[Run]):
    """The chosen kernel, and (name, reason) of each kernel that was passed over.

    Attributes:
        if_installed: preferred kernels of libraries that a planned device may have.
    """

    kernel: Kernel[Run]
    passed_over: tuple[tuple[str, str], ...] = ()
    if_installed: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The kernel's name, after the names of preferred kernels "if installed"."""
        libraries = (f"{name} if installed" for name in self.if_installed)
        return ", else ".join((*libraries, self.kernel.name))

    @property
    def reasons(self) -> str:
        """Why other kernels were passed over; empty if this kernel is the first of its table."""
        names: dict[str, list[str]] = {}
        for name, reason in self.passed_over:
            names.setdefault(reason, []).append(name)
        return "; ".join(
            f"{', '.join(who)}{':' if len(who) > 1 else ''} {reason}"
            for reason, who in names.items()
        )


@dataclass(frozen=True, eq=False)
class KernelTable(Generic[Run]):
    """The kernels of one operation.

    Attributes:
        operation: name of the operation, as it is printed.
        kernels: device type -> kernels, the preferred one first; `OTHER_DEVICES` -> kernels of
            every device that is not named.
        fix: advice to the user if no kernel fits.
        flags: flags that decide which features are needed.
        chosen: earlier choices.
    """

    operation: str
    kernels: dict[str, tuple[Kernel[Run], ...]]
    fix: str = "leave out one of them"
    flags: tuple[str, ...] = ()
    chosen: dict[tuple[Request, tuple[str, ...]], Choice[Run]] = field(default_factory=dict)

    def of_device(self, device: str) -> tuple[Kernel[Run], ...]:
        """Return the kernels of a device type in order of preference."""
        return self.kernels.get(device) or self.kernels[OTHER_DEVICES]

    def choose(self, request: Request, preferred: tuple[str, ...] = ()) -> Choice[Run]:
        """Return the kernel to use; a repeated request returns the cached choice.

        Args:
            preferred: names of kernels to try first, in this order, before the others.
        Raises:
            ConfigError: no kernel of the device serves the request.
        """
        found = self.chosen.get((request, preferred))
        if found is None:
            found = self.chosen[request, preferred] = self._choose(request, preferred)
        return found

    def _choose(self, request: Request, preferred: tuple[str, ...]) -> Choice[Run]:
        listed = self.of_device(request.device)
        first = [kernel for name in preferred for kernel in listed if kernel.name == name]
        passed_over: list[tuple[str, str]] = []
        if_installed: list[str] = []
        for kernel in (*first, *(kernel for kernel in listed if kernel not in first)):
            reason = kernel.refusal(request)
            if reason is not None:
                passed_over.append((kernel.name, reason))
            elif kernel.library and request.is_planned:
                if_installed.append(kernel.name)
            else:
                return Choice(kernel, tuple(passed_over), tuple(if_installed))
        raise ConfigError(
            f"no kernel for {self.operation} on {request.device} supports"
            f" {', '.join(sorted(request.needs)) or request.dtype} together.",
            rule="; ".join(f"{name} {reason}" for name, reason in passed_over),
            flags=list(self.flags),
            fix=self.fix,
        )
