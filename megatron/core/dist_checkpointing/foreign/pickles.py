"""Read pickles as data: an interpreter that imports nothing and calls nothing but its own table.

A pickle is a program for a stack machine; two of its instructions name Python objects to import
and call. Here a name is looked up in a table of plain constructors (`admitted`), and a name that
is not in it ends the reading with its file and offset. The standard library's opcode parser cuts
the stream (`pickletools.genops`); it builds nothing.

What a pickle may hold: None, numbers, text, bytes, lists, tuples, dicts, sets, and `Record`s of
admitted kinds. The result is a tree: cycles, deep nesting and trees that grow exponentially out
of shared parts are refused.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError

MAX_DEPTH = 100
MAX_LEAVES = 50_000_000
MAX_LINE = 1 << 16


class UnsafePickleError(DamagedCheckpointError):
    """A pickle names something that is not admitted, or is not made by a normal writer."""


@dataclass(frozen=True)
class Admitted:
    """A global name that may occur, and what stands for it."""

    name: str
    make: Callable[[tuple[Any, ...]], Any] | None = None
    """Makes the value from the arguments of a call; None where a call is not admitted."""
    value: Any = None
    """What the name itself stands for (a dtype); None where it waits for a call."""


class Record:
    """An instance of an admitted class, as data: the class's name, arguments and state."""

    __slots__ = ("_is_key", "args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...] = (), state: Any = None) -> None:
        self.kind, self.args, self.state = kind, args, state
        self._is_key = False

    def __getitem__(self, name: str) -> Any:
        """Return a field of the state."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise DamagedCheckpointError(f"a {self.kind} without field {name!r}.")
        return self.state[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the state, or the default."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default

    def _identity(self) -> tuple[Any, ...]:
        state = tuple(self.state.items()) if isinstance(self.state, dict) else self.state
        return self.kind, self.args, state

    def __hash__(self) -> int:
        self._is_key = True  # from here on it must not change
        return hash(self._identity())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._identity() == other._identity()

    def __repr__(self) -> str:
        return f"<{self.kind}>"


class AttributeDict(dict):
    """A dict that stands for an object whose attributes are its entries (a Namespace)."""


class OrderedEntries(dict):
    """A dict that stands for an OrderedDict; attributes of the object are dropped."""


def load_pickle(
    stream: bytes | BinaryIO,
    admitted: Callable[[str], Admitted | None],
    *,
    what: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the value of the pickle that begins at the stream's position.

    Args:
        stream: the bytes, or a file; a file is left behind the pickle.
        admitted: looks "module name" up.
        what: the file, for messages.
        persistent: makes a value from a persistent id; None refuses them.
    Raises:
        UnsafePickleError: the pickle holds something that is not admitted.
        DamagedCheckpointError: it is not a pickle, or does not end.
    """
    file = io.BytesIO(stream) if isinstance(stream, bytes) else stream
    machine = _Machine(admitted, what, persistent, file.tell())
    try:
        for opcode, argument, position in pickletools.genops(file):
            machine.position = position or 0
            machine.run(opcode.name, argument)
    except (UnsafePickleError, DamagedCheckpointError):
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise DamagedCheckpointError(
            f"{what} is damaged at byte {machine.position}: "
            f"{type(error).__name__}: {error!s:.200}.",
            rule="the records of a foreign checkpoint are pickles of plain data",
            fix="use another checkpoint",
        ) from None
    _check_tree(machine.result, what)
    return machine.result


class _Machine:
    """The stack machine of the pickle protocols 0 to 5, less what plain data does not need."""

    def __init__(
        self,
        admitted: Callable[[str], Admitted | None],
        what: str,
        persistent: Callable[[Any], Any] | None,
        position: int,
    ) -> None:
        self.admitted, self.what, self.persistent = admitted, what, persistent
        self.position = position
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.result: Any = None

    def run(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        if name in _LITERALS:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in _HANDLERS:
            _HANDLERS[name](self, argument)
        elif name not in ("PROTO", "FRAME"):
            self.refuse(f"the instruction {name}")

    def refuse(self, found: str, rule: str = "") -> NoReturn:
        raise UnsafePickleError(
            f"CKPT_UNSAFE file={self.what} offset={self.position}: {found} is not admitted.",
            rule=rule
            or "foreign checkpoints may hold tensors and plain containers; nothing in "
            "them is imported or called",
            fix="if you trust the file, load it with the program that wrote it and save the "
            "weights alone",
        )

    def marked(self) -> list[Any]:
        """Return what was pushed since the last mark."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            self.refuse("a global whose name is not text")
        full = f"{module} {name}"
        known = self.admitted(full)
        if known is None:
            self.refuse(f"the global {module}.{name}")
        self.stack.append(known if known.value is None else known.value)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Admitted) or function.make is None:
            name = function.name.replace(" ", ".") if isinstance(function, Admitted) else ""
            self.refuse(f"a call of {name or type(function).__name__}")
        if type(arguments) is not tuple:
            self.refuse("a call whose arguments are no tuple")
        try:
            self.stack.append(function.make(arguments))
        except (UnsafePickleError, DamagedCheckpointError) as error:
            self.refuse(f"{function.name.replace(' ', '.')}: {error.found}")
        except (ValueError, TypeError, IndexError, KeyError, AssertionError, OverflowError):
            self.refuse(f"{function.name.replace(' ', '.')} with these arguments")

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Record):
            if value._is_key:
                self.refuse(f"a change of a {value.kind} that is a key already")
            value.state = state
        elif isinstance(value, AttributeDict):
            if not isinstance(state, dict) or any(type(name) is not str for name in state):
                self.refuse("attributes that are not names with values")
            value.update(state)
        elif not isinstance(value, OrderedEntries):
            self.refuse(f"state for a {type(value).__name__}")

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            self.refuse(f"items for a {type(target).__name__}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not _is_key(key):
                self.refuse(f"a dict key of type {type(key).__name__}")
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            self.refuse(f"appending to a {type(target).__name__}")
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set or not all(_is_key(item) for item in items):
            self.refuse(f"adding to a {type(target).__name__}")
        target.update(items)

    def mark(self) -> None:
        self.outer.append(self.stack)
        self.stack = []

    def last(self, count: int) -> tuple[Any, ...]:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        return items

    def push_marked(self, kind: Callable[[list[Any]], Any]) -> None:
        items = kind(self.marked())
        self.stack.append(items)

    def drop_marked(self) -> None:
        self.marked()

    def frozen_set(self) -> None:
        items = self.marked()
        if not all(_is_key(item) for item in items):
            self.refuse("a frozenset of things that are no keys")
        self.stack.append(frozenset(items))

    def dict_of_marked(self) -> None:
        pairs = self.marked()
        self.stack.append({})
        self.set_items(pairs)

    def persistent_value(self) -> None:
        identifier = self.stack.pop()
        if self.persistent is None:
            self.refuse("a persistent id")
        try:
            self.stack.append(self.persistent(identifier))
        except DamagedCheckpointError as error:
            self.refuse(f"a persistent id: {error.found}")

    def stop(self) -> None:
        if len(self.stack) != 1 or self.outer:
            raise ValueError("values are left on the stack")
        self.result = self.stack.pop()

    def memoize(self, index: int) -> None:
        # A dict, not a table: an index of 2^32 costs one entry.
        self.memo[index] = self.stack[-1]

    def drop(self) -> None:
        """Undo a push, or a mark that nothing was pushed after."""
        if self.stack:
            self.stack.pop()
        else:
            self.stack = self.outer.pop()


_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8",
    "STRING", "BINSTRING", "SHORT_BINSTRING",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set,
}  # fmt: skip
_HANDLERS: dict[str, Callable[[_Machine, Any], None]] = {
    "MARK": lambda m, _: m.mark(),
    "STOP": lambda m, _: m.stop(),
    "POP": lambda m, _: m.drop(),
    "POP_MARK": lambda m, _: m.drop_marked(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "PUT": lambda m, index: m.memoize(index),
    "BINPUT": lambda m, index: m.memoize(index),
    "LONG_BINPUT": lambda m, index: m.memoize(index),
    "MEMOIZE": lambda m, _: m.memoize(len(m.memo)),
    "GET": lambda m, index: m.stack.append(m.memo[index]),
    "BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "LONG_BINGET": lambda m, index: m.stack.append(m.memo[index]),
    "TUPLE": lambda m, _: m.push_marked(tuple),
    "TUPLE1": lambda m, _: m.stack.append(m.last(1)),
    "TUPLE2": lambda m, _: m.stack.append(m.last(2)),
    "TUPLE3": lambda m, _: m.stack.append(m.last(3)),
    "LIST": lambda m, _: m.push_marked(list),
    "DICT": lambda m, _: m.dict_of_marked(),
    "FROZENSET": lambda m, _: m.frozen_set(),
    "APPEND": lambda m, _: m.extend(list(m.last(1))),
    "APPENDS": lambda m, _: m.extend(m.marked()),
    "ADDITEMS": lambda m, _: m.add(m.marked()),
    "SETITEM": lambda m, _: m.set_items(list(m.last(2))),
    "SETITEMS": lambda m, _: m.set_items(m.marked()),
    "GLOBAL": lambda m, name: m.find(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.find(*m.last(2)),
    "REDUCE": lambda m, _: m.call(),
    "NEWOBJ": lambda m, _: m.call(),
    "BUILD": lambda m, _: m.build(),
    "BINPERSID": lambda m, _: m.persistent_value(),
}


def _is_key(value: Any) -> bool:
    """Return whether a value may be a dict key: its hash is ours or a builtin's, and bounded."""
    if isinstance(value, tuple):
        return len(value) < 1000 and all(_is_key(item) for item in value)
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64
    if isinstance(value, Record):
        fields = value.state.values() if isinstance(value.state, dict) else (value.state,)
        return all(_is_key(item) for item in (*value.args, *fields))
    return value is None or isinstance(value, (str, bytes, float))


def _check_tree(root: Any, what: str) -> None:
    """Refuse what is not a tree of a sane size; no recursion, each container visited once."""
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
        sizes[id(value)] = 1 + sum(sizes.get(id(child), 1) for child in children)
        depths[id(value)] = 1 + max((depths.get(id(child), 0) for child in children), default=0)
        if sizes[id(value)] > MAX_LEAVES:
            _refuse_tree(what, f"a value of more than {MAX_LEAVES} parts")
        if depths[id(value)] > MAX_DEPTH:
            _refuse_tree(what, f"containers nested more than {MAX_DEPTH} deep")


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
        f"CKPT_UNSAFE file={what}: {found} is not admitted.",
        rule="a foreign checkpoint holds trees of plain data",
        fix="use another checkpoint",
    )
