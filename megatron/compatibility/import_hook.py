"""Make Megatron's names importable that this framework defines elsewhere or does not have.

`aliases.tsv` has one line per name: the module and the name in Megatron, then either the place
where this framework defines it (`module:attribute`) or the replacement. The module `*` means all
of `STAR_MODULES`, whose names other code imports with `from module import *`.

`install()` puts a finder before Python's own finders. It changes only the modules of the file:

- an existing module gets a `__getattr__`, which looks up names that the module lacks;
- a missing module becomes an empty one with the same `__getattr__`.

A name without a definition can be imported, used in annotations and subclassed; calling it raises
`ConfigError`, which names the replacement. Features whose import other code guards
(`try: import ...`) are not in the file: the `ImportError` selects the working branch.

The finder also finds packages of other distributions in a folder `megatron` (`_NEIGHBOURS`). A
module is imported when one of its names is first read.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABCMeta
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

STAR_MODULES = (
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.transformer_block",
)
Names = dict[str, dict[str, str]]
"""Module -> name -> its definition, or its replacement."""


def read_aliases() -> tuple[Names, Names]:
    """Return the names that are defined elsewhere, and the names without a definition."""
    aliases: Names = {}
    missing: Names = {}
    lines = Path(__file__).with_name("aliases.tsv").read_text().splitlines()
    for line in lines[1:]:
        listed, name, defined_in, instead = line.split("\t")
        for module in STAR_MODULES if listed == "*" else (listed,):
            table = aliases if defined_in else missing
            table.setdefault(module, {})[name] = defined_in or instead
    return aliases, missing


ALIASES, MISSING = read_aliases()
_NEIGHBOURS = frozenset({"megatron.bridge", "megatron.energon"})
"""Packages of megatron-bridge and megatron-energon."""


def install() -> None:
    """Make the names importable; a second call changes nothing."""
    if not any(isinstance(finder, NameFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, NameFinder())


def getter(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module."""
    aliases, missing = ALIASES.get(module, {}), MISSING.get(module, {})

    def get(name: str) -> Any:
        if name in aliases:
            # Not cached: some names have values that change.
            home, _, attribute = aliases[name].partition(":")
            found = importlib.import_module(home)
            return getattr(found, attribute) if attribute else found
        if name not in missing:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        value = vars(sys.modules[module])[name] = stand_in(module, name, missing[name])
        return value

    return get


class _StandInType(ABCMeta):
    """The type of missing names: reading an attribute raises an error with the replacement."""

    _found: str
    _reason: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{cls._found} is not in this framework: {cls._reason}")


def stand_in(module: str, name: str, reason: str) -> type:
    """Return a class that can be imported, annotated and subclassed; calling it raises."""

    def refuse(cls: type, *_: Any, **__: Any) -> Any:
        from megatron.core.foundation.errors import ConfigError

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
    """Return whether `value` is a name without a definition."""
    return isinstance(value, _StandInType)


def _with_parents(modules: Sequence[str]) -> frozenset[str]:
    """Return the modules and the packages that contain them."""
    parts = [module.split(".") for module in modules]
    return frozenset(".".join(p[:end]) for p in parts for end in range(1, len(p) + 1))


class NameFinder(MetaPathFinder):
    """Finds the modules of `aliases.tsv`, and the packages of other distributions."""

    modules = _with_parents([*ALIASES, *MISSING])

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec that adds the aliases to `fullname`; None leaves the import to Python."""
        if fullname in _NEIGHBOURS:
            folders = [os.path.join(entry, "megatron") for entry in sys.path]
            return PathFinder.find_spec(fullname, [*(path or ()), *folders], target)
        if fullname not in self.modules:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is None or found.origin is None:  # nothing, or a folder of a removed package
            return ModuleSpec(fullname, _EmptyModule(), is_package=True)
        if isinstance(found.loader, SourceFileLoader):
            found.loader = _WithNames(fullname, found.loader.path)
        return found


class _WithNames(SourceFileLoader):
    """Loads an existing module and adds the `__getattr__`."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if any(name.startswith(f"{module.__name__}.") for name in NameFinder.modules):
            vars(module).setdefault("__path__", [])  # Megatron's module is a package
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
    """Makes an empty module with the `__getattr__`."""

    def create_module(self, _spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Names of Megatron; see megatron.compatibility."
        vars(module)["__getattr__"] = getter(module.__name__)
        _export_with_star(module)


def _export_with_star(module: ModuleType) -> None:
    """Let `from module import *` include the aliases."""
    if module.__name__ in STAR_MODULES:
        own = [name for name in vars(module) if not name.startswith("_")]
        vars(module)["__all__"] = sorted({*own, *ALIASES[module.__name__]})
