"""The values that a pickle may hold, and what keeps them small enough to be used.

A dict key is small before it is hashed, and a whole value is a tree of a bounded number of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError

MAX_DEPTH = 100
MAX_KEY_PARTS = 256
MAX_KEY_DEPTH = 8
MAX_KEY_BYTES = 1 << 16
MAX_UNSALTED_KEYS = 1 << 17
"""Numbers in one dict or set: their hashes are known beforehand and can be made to collide, while
those of text are salted by Python."""
MAX_TUPLE_KEYS = 1 << 12
"""Likewise tuples, whose hashes are easier to make collide."""


class UnsafePickleError(DamagedCheckpointError):
    """A pickle names something that is not on the allowlist, or is not made by a normal writer."""


@dataclass(frozen=True)
class AllowedGlobal:
    """A global name that may occur, and what stands for it."""

    name: str
    make: Callable[[tuple[Any, ...]], Any] | None = None
    """Makes the value from the arguments of a call; None where a call is not on the allowlist."""
    value: Any = None
    """What the name itself stands for (a dtype); None where it waits for a call."""


class Record:
    """An instance of an allowed class, as data: the class's name, arguments and state."""

    __slots__ = ("_key", "args", "kind", "state")

    def __init__(self, kind: str, args: tuple[object, ...] = (), state: object = None) -> None:
        self.kind, self.args, self.state = kind, args, state
        self._key: tuple[Any, ...] | None = None
        """What it is equal by, once it was hashed: from then on it must not change."""

    @property
    def is_key(self) -> bool:
        """Whether it was hashed."""
        return self._key is not None

    def __getitem__(self, name: str) -> Any:
        """Return a field of the state."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise DamagedCheckpointError(f"a {self.kind} without field {name!r}.")
        return self.state[name]

    def get(self, name: str, default: object = None) -> Any:
        """Return a field of the state, or the default."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def _identity(self) -> tuple[Any, ...]:
        if self._key is not None:
            return self._key
        state = tuple(self.state.items()) if isinstance(self.state, dict) else self.state
        return self.kind, self.args, state

    def __hash__(self) -> int:
        # Kept, as the state is a dict that a later instruction can still reach. `is_key` saw it.
        self._key = self._identity()
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._identity() == other._identity()

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class AttributeDict(dict):
    """A dict that stands for an object whose attributes are its entries (a Namespace)."""


class OrderedEntries(dict):
    """A dict that stands for an OrderedDict; attributes of the object are dropped."""


def bound_collisions(target: Mapping[object, object] | set[object], key: object) -> None:
    """Refuse a further key whose hash the writer of the file can choose."""
    limit = MAX_TUPLE_KEYS if type(key) is tuple else MAX_UNSALTED_KEYS
    if type(key) not in (str, bytes, Record) and len(target) >= limit:
        raise ValueError(f"a {type(key).__name__} as a key beside {len(target)} others")


def is_key(key: object) -> bool:
    """Return whether a value may be a dict key: its hash is ours or a builtin's, and bounded.

    Parts are counted as often as a hash visits them, so a tuple of shared tuples is a large key.
    """
    todo = [(key, 1)]
    num_parts = num_bytes = 0
    while todo:
        value, depth = todo.pop()
        num_parts += 1
        if depth > MAX_KEY_DEPTH or num_parts + len(todo) > MAX_KEY_PARTS:
            return False
        if isinstance(value, (str, bytes)):
            num_bytes += len(value)
            if num_bytes > MAX_KEY_BYTES:
                return False
        elif isinstance(value, (tuple, Record)):
            children = value if isinstance(value, tuple) else _parts_of_key(value)
            if children is None or len(children) > MAX_KEY_PARTS:
                return False
            todo.extend((child, depth + 1) for child in children)
        elif isinstance(value, int):
            if not -(1 << 63) <= value < 1 << 64:
                return False
        elif value is not None and not isinstance(value, float):
            return False
    return True


def _parts_of_key(record: Record) -> tuple[Any, ...] | None:
    """Return what the hash of a record visits; None if that is too much."""
    state = record.state
    if len(record.args) > MAX_KEY_PARTS:
        return None
    if not isinstance(state, dict):
        return (*record.args, state)
    if len(state) > MAX_KEY_PARTS:
        return None
    return (*record.args, *state.keys(), *state.values())


def check_tree(root: object, what: str, max_parts: int) -> None:
    """Refuse what is not a tree of a sane size; no recursion, each container visited once.

    Parts are counted wherever they occur, as whoever walks or writes the tree meets them; 256
    characters of text or bytes are one.
    """
    sizes: dict[int, int] = {}
    depths: dict[int, int] = {}
    open_: set[int] = set()
    todo: list[tuple[Any, bool]] = [(root, False)]
    while todo:
        value, is_done = todo.pop()
        children = _children(value)
        if children is None or (id(value) in sizes and not is_done):
            continue
        if not is_done:
            if id(value) in open_:
                _refuse_tree(what, "a container that contains itself")
            open_.add(id(value))
            todo.append((value, True))
            todo.extend((child, False) for child in children)
            continue
        open_.discard(id(value))
        size = 1 + sum(sizes.get(id(child)) or _leaf_size(child) for child in children)
        sizes[id(value)] = size
        depths[id(value)] = 1 + max((depths.get(id(child), 0) for child in children), default=0)
        if size > max_parts:
            _refuse_tree(what, f"a value of more than {max_parts} parts")
        if depths[id(value)] > MAX_DEPTH:
            _refuse_tree(what, f"containers nested more than {MAX_DEPTH} deep")


def _leaf_size(value: Any) -> int:
    return 1 + len(value) // 256 if isinstance(value, (str, bytes)) else 1


def _children(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Record):
        return [*value.args, value.state]
    return None


def _refuse_tree(what: str, found: str) -> NoReturn:
    raise UnsafePickleError(
        f"CKPT_UNSAFE file={what}: {found} is not on the allowlist.",
        rule="a checkpoint of another program holds trees of plain data",
        fix="use another checkpoint",
    )
