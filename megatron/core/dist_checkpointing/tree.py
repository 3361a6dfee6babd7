"""Walk nested dicts and lists: the shape of every state dict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Path = tuple[Any, ...]


def leaves(tree: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) in order; anything that is not a dict or list is a leaf."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))
    else:
        yield path, tree


def map_leaves(change: Callable[[object], object], tree: object) -> Any:
    """Return a copy of the dicts and lists of `tree` with every leaf replaced by change(leaf)."""
    if isinstance(tree, dict):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_leaves(change, value) for value in tree]
    return change(tree)


class Absent:
    """Marks a leaf without a value."""


ABSENT = Absent()


def prune(tree: object) -> Any:
    """Drop ABSENT leaves, and containers that hold nothing else.

    In a list with other values None replaces an ABSENT leaf, so that positions stay valid.
    """
    if isinstance(tree, dict):
        kept = {key: prune(value) for key, value in tree.items()}
        kept = {key: value for key, value in kept.items() if value is not ABSENT}
        return kept if kept or not tree else ABSENT
    if isinstance(tree, list):
        items = [prune(value) for value in tree]
        if items and all(value is ABSENT for value in items):
            return ABSENT
        return [None if value is ABSENT else value for value in items]
    return tree


def merge(ours: object, theirs: object) -> Any:
    """Merge dicts by key and lists by position; leaves of `ours` win, except ABSENT ones."""
    if ours is ABSENT:
        return theirs
    if isinstance(ours, dict) and isinstance(theirs, dict):
        both = {key: merge(ours.get(key, ABSENT), value) for key, value in theirs.items()}
        return both | {key: value for key, value in ours.items() if key not in theirs}
    if isinstance(ours, list) and isinstance(theirs, list):
        length = max(len(ours), len(theirs))
        ours, theirs = (x + [ABSENT] * (length - len(x)) for x in (ours, theirs))
        return [merge(a, b) for a, b in zip(ours, theirs, strict=True)]
    return ours


def show_path(path: Path) -> str:
    """Return a path as text: model.layers[3].name."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "state"
