"""Build objects from configs that name what to call, as the YAML files of Megatron-Bridge do.

A mapping with these keys is a call; other mappings and lists are built element by element:

    _target_   dotted name of a class, a function or a value
    _call_     false: return the target itself (default true)
    _partial_  true: return `functools.partial` of the target (default false)
    _args_     positional arguments

The other keys are keyword arguments. Only names that `target_allowlist` permits are imported.
Callers replace `_resolve_target` to add checks: it is looked up in this module for each call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, StrEnum
from typing import Any

from megatron.core.foundation.optional_imports import require

logger = logging.getLogger(__name__)


class InstantiationException(Exception):
    """A config cannot be built; the message names the target and its place in the config."""


class InstantiationMode(Enum):
    """Handling of keys that the target does not take: lenient drops them with a warning."""

    STRICT = "strict"
    LENIENT = "lenient"


class _Keys(StrEnum):
    TARGET = "_target_"
    CALL = "_call_"
    PARTIAL = "_partial_"
    ARGS = "_args_"


class TargetAllowlist:
    """The dotted names that configs may import: exact ones, and all that begin with a prefix."""

    def __init__(self, *prefixes: str) -> None:
        self.allowed_prefixes, self.allowed_exact, self._enabled = set(prefixes), set[str](), True
        self.remove_prefix = self.allowed_prefixes.discard
        self.add_exact, self.remove_exact = self.allowed_exact.add, self.allowed_exact.discard

    def add_prefix(self, prefix: str) -> None:
        """Permit all names that begin with `prefix`, which ends with a dot."""
        if not prefix.strip(".") or not prefix.endswith("."):
            raise ValueError(f"a prefix is a package with a dot at its end, not {prefix!r}")
        self.allowed_prefixes.add(prefix)

    def disable(self) -> None:
        """Permit every name, for configs from a trusted source; `enable` checks names again."""
        self._enabled = False

    def enable(self) -> None:
        """Check names again."""
        self._enabled = True

    def is_allowed(self, target: str) -> bool:
        """Return whether a config may import `target`."""
        listed = target in self.allowed_exact or target.startswith(tuple(self.allowed_prefixes))
        return listed or not self._enabled


target_allowlist = TargetAllowlist(
    "megatron.core.", "megatron.training.", "megatron.compatibility.", "torch.", "transformers.",
    "signal.",
)  # fmt: skip


def instantiate(
    config: object,
    *args: object,
    mode: InstantiationMode = InstantiationMode.LENIENT,
    **kwargs: object,
) -> Any:
    """Build what `config` describes; None stays None.

    Args:
        config: a mapping or a list, plain or of OmegaConf, whose interpolations are then resolved.
        args: positional arguments of the outermost call, instead of its `_args_`.
        kwargs: further keys of the outermost mapping; they replace its own.
    Raises:
        InstantiationException: a target is not permitted, cannot be imported or fails, or in
            strict mode does not take a key.
    """
    if type(config).__module__.startswith("omegaconf."):
        omegaconf = require("omegaconf", purpose="a config of OmegaConf").OmegaConf
        config = omegaconf.to_container(config, resolve=True)
    if isinstance(config, Mapping):
        config = {**config, **kwargs}
    elif config is not None and (kwargs or not isinstance(config, list)):
        raise InstantiationException(
            f"a config is a mapping, or a list without keyword arguments, not {config!r}"
        )
    return instantiate_node(config, *args, mode=mode)


def instantiate_node(
    node: object,
    *args: object,
    partial: bool = False,
    mode: InstantiationMode = InstantiationMode.LENIENT,
    full_key: str = "",
) -> Any:
    """Build one element; values that are neither mappings nor lists stay as they are.

    Args:
        full_key: the element's place in the config, for messages.
    """
    if isinstance(node, list):
        places = (f"{full_key}[{place}]" for place in range(len(node)))
        return [
            instantiate_node(item, mode=mode, full_key=place)
            for item, place in zip(node, places, strict=True)
        ]
    if not isinstance(node, Mapping):
        return node
    built = {
        key: instantiate_node(value, mode=mode, full_key=f"{full_key}.{key}".lstrip("."))
        for key, value in node.items()
    }
    if not _is_target(node):
        return built
    target = built.pop(_Keys.TARGET.value)
    calls, partial = built.pop(_Keys.CALL.value, True), built.pop(_Keys.PARTIAL.value, partial)
    in_order = built.pop(_Keys.ARGS.value, [])
    if not isinstance(calls, bool) or not isinstance(partial, bool):
        raise TypeError(f"{full_key}: _call_ and _partial_ are true or false")
    if not isinstance(in_order, Sequence) or isinstance(in_order, str):
        raise InstantiationException(f"{full_key}: _args_ is a list, not {in_order!r}")
    target = _resolve_target(target, full_key, check_callable=calls)
    if not calls and built:
        raise InstantiationException(f"{full_key}: {target} is not called, and has {sorted(built)}")
    if not calls:
        return target
    known = _filter_kwargs_for_target(target, built, full_key, mode)
    return _call_target(target, partial, args or in_order, known, full_key)


def _is_target(node: Any) -> bool:
    return isinstance(node, Mapping) and _Keys.TARGET.value in node


def _resolve_target(target: Any, full_key: str | int, check_callable: bool = True) -> Any:
    """Return the object of a dotted name, which must be permitted."""
    if isinstance(target, str):
        if not target_allowlist.is_allowed(target):
            raise InstantiationException(
                f"{full_key}: {target!r} is not a permitted target; names begin with "
                f"{', '.join(sorted(target_allowlist.allowed_prefixes))}. Add others with "
                "target_allowlist.add_prefix()"
            )
        try:
            target = _locate(target)
        except Exception as error:
            raise InstantiationException(f"{full_key}: {error}") from error
    if check_callable and not callable(target):
        raise InstantiationException(f"{full_key}: {target!r} cannot be called")
    return target


def _locate(path: str) -> Any:
    """Import the longest module of a dotted name, and read the rest as attributes."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that exists and itself imports a missing one is an error of that import.
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            continue
        try:
            return functools.reduce(getattr, parts[end:], found)
        except AttributeError as error:
            raise ImportError(f"{path!r} cannot be imported: {error}") from error
    raise ImportError(f"{path!r} cannot be imported: there is no module {parts[0]!r}")


def _filter_kwargs_for_target(
    target: Callable[..., Any], kwargs: dict[str, Any], full_key: str, mode: InstantiationMode
) -> dict[str, Any]:
    """Return the keyword arguments that the target takes; in strict mode the others are errors."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # a function of C code without a signature
        return kwargs
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return kwargs
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = {name: value for name, value in kwargs.items() if name in by_name}
    if len(known) < len(kwargs):
        name = _convert_target_to_string(target)
        message = f"{full_key}: {name} does not take {sorted(set(kwargs) - by_name)}"
        if mode is InstantiationMode.STRICT:
            raise InstantiationException(message)
        logger.warning("%s: dropped", message)
    return known


def _call_target(
    target: Callable[..., Any],
    partial: bool,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    full_key: str,
) -> Any:
    try:
        call = functools.partial(target, *args, **kwargs)
        return call if partial else call()
    except Exception as error:
        name = _convert_target_to_string(target)
        raise InstantiationException(f"{full_key}: {name} failed: {error!r}") from error


def _convert_target_to_string(target: Any) -> Any:
    return f"{target.__module__}.{target.__qualname__}" if callable(target) else target
