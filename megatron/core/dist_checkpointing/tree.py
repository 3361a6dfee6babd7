"""Walk nested dicts and lists: the shape of every state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) in order; anything that is not a dict or list is a leaf."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of the dicts and lists of `tree` with every leaf replaced by change(leaf)."""
    if isinstance(tree, dict):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(change, value) for value in tree]
    return change(tree)


class Absent:
    """Marks a leaf that `prune` drops from its container."""


ABSENT = Absent()


def prune(tree: Any) -> Any:
    """Drop the leaves that are ABSENT, and the containers that this leaves empty."""
    if isinstance(tree, dict):
        kept = {key: prune(value) for key, value in tree.items()}
        kept = {key: value for key, value in kept.items() if value is not ABSENT}
        return kept if kept or not tree else ABSENT
    if isinstance(tree, list):
        items = [value for value in map(prune, tree) if value is not ABSENT]
        return items if items or not tree else ABSENT
    return tree


def merge(ours: Any, theirs: Any) -> Any:
    """Return `theirs` laid under `ours`: dicts are joined, elsewhere `ours` wins."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        joined = {key: merge(ours[key], value) if key in ours else value
                  for key, value in theirs.items()}  # fmt: skip
        return joined | {key: value for key, value in ours.items() if key not in theirs}
    return ours


def show_path(path: Path) -> str:
    """Return a path as text: model.layers[3].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "state"
