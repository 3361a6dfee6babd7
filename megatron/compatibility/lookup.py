"""Let imports find the names of the two tables, in modules of ours and in modules that are not.

`install()` puts a finder in front of Python's own. It touches the modules of the tables alone:

- a module that exists gets a `__getattr__`, which is asked for names that the module lacks;
- a module that does not exist becomes an empty one with the same `__getattr__`.

Libraries that other distributions put into a folder `megatron` of their own are found beside this
package, wherever the two are installed.

Nothing is imported before it is asked for. A name that is in neither table is an `ImportError`, as
everywhere: code that tries an import and goes another way without it takes that way.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from megatron.compatibility.moved_names import ELSEWHERE, STAR_NAMES
from megatron.compatibility.unsupported_names import LACKING

_FOUND = ELSEWHERE | {
    module: names | ELSEWHERE.get(module, {}) for module, names in STAR_NAMES.items()
}
_NEIGHBOURS = frozenset({"megatron.bridge", "megatron.energon"})
"""Packages of megatron-bridge and megatron-energon."""


def install() -> None:
    """Make the names importable; a second call changes nothing."""
    if not any(isinstance(finder, NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, NameFinder())


def getter(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module of the tables."""
    elsewhere, lacking = _FOUND.get(module, {}), LACKING.get(module, {})

    def get(name: str) -> Any:
        if name in elsewhere:
            # Asked anew each time: some names are of values that change.
            home, _, attribute = elsewhere[name].partition(":")
            found = importlib.import_module(home)
            return getattr(found, attribute) if attribute else found
        if name not in lacking:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = vars(sys.modules[module])[name] = stand_in(module, name, lacking[name])
        return value

    return get


class _StandInType(ABCMeta):
    """The type of stand-ins: asking one for an attribute says why it has none."""

    _found: str
    _reason: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{cls._found} is not in this framework: {cls._reason}")


def stand_in(module: str, name: str, reason: str) -> type:
    """Return a class that can be imported, named in annotations and derived from, and not built."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        from megatron.core.foundation.errors import (
            ConfigError,  # needs no torch, but is not needed before
        )

        raise ConfigError(
            f"{module}.{name} is not in this framework.",
            rule="the name can be imported, so that code which never uses it runs",
            fix=reason,
        )

    return _StandInType(
        name,
        (),
        {
            "__new__": refuse,
            "__module__": module,
            "__doc__": f"Not in this framework: {reason}",
            "_found": f"{module}.{name}",
            "_reason": reason,
        },
    )


def is_stand_in(value: object) -> bool:
    """Return whether `value` is a name without its feature."""
    return isinstance(value, _StandInType)


def _with_parents(modules: Sequence[str]) -> frozenset[str]:
    """Return the modules and the packages that they are in."""
    parts = [module.split(".") for module in modules]
    return frozenset(".".join(p[:end]) for p in parts for end in range(1, len(p) + 1))


class NameFinder(MetaPathFinder):
    """Finds the modules of the tables, and the packages of other distributions."""

    modules = _with_parents([*_FOUND, *LACKING])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load `fullname` with its further names; None leaves it to Python."""
        if fullname in _NEIGHBOURS:
            folders = [os.path.join(entry, "megatron") for entry in sys.path]
            return PathFinder.find_spec(fullname, [*(path or ()), *folders], target)
        if fullname not in self.modules:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None:
            return ModuleSpec(fullname, _EmptyModule(), is_package=True)
        if isinstance(found.loader, SourceFileLoader):
            found.loader = _WithNames(fullname, found.loader.path)
        return found


class _WithNames(SourceFileLoader):
    """Loads a module of ours; then names that it lacks are looked up in the tables."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        own: Callable[[str], Any] | None = vars(module).get("__getattr__")
        ours = getter(module.__name__)

        def get(name: str) -> Any:
            if own is not None:
                try:
                    return own(name)
                except AttributeError:
                    pass
            return ours(name)

        vars(module)["__getattr__"] = get
        _export_with_star(module)


class _EmptyModule(Loader):
    """Makes a module of which nothing exists but its names."""

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Names of Megatron; see megatron.compatibility."
        vars(module)["__getattr__"] = getter(module.__name__)
        _export_with_star(module)


def _export_with_star(module: ModuleType) -> None:
    """Let `from module import *` give the further names of a module from which code takes all."""
    if module.__name__ in STAR_NAMES:
        own = [name for name in vars(module) if not name.startswith("_")]
        vars(module)["__all__"] = sorted({*own, *_FOUND[module.__name__]})
