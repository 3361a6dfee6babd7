"""Read pickles as data: an interpreter that imports nothing and calls nothing but its own table.

A pickle is a program for a stack machine; two of its instructions name Python objects to import
and call. Here a name is looked up in a table of plain constructors
(`pickle_allowlist`), and a name that is not in it ends the reading with its file and offset. The
standard library's opcode parser cuts the stream (`pickletools.genops`); it builds nothing.

What a pickle may hold: None, numbers, text, bytes, lists, tuples, dicts, sets, and `Record`s of
allowed kinds. The result is a tree: cycles, deep nesting and trees that grow exponentially out
of shared parts are refused.

Time and memory are proportional to the pickle's length. An instruction may name a value that it
does not hold (the memo), so what an instruction costs besides is bounded: a key is small before it
is hashed, and what calls copy, and the parts of the result counted wherever they occur, are at
most `COPIES_PER_BYTE` and `PARTS_PER_BYTE` times the bytes read, beyond a fixed number.
"""

from __future__ import annotations

import io
import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.pickled_values import (
    AllowedGlobal,
    AttributeDict,
    OrderedEntries,
    Record,
    UnsafePickleError,
    bound_collisions,
    check_tree,
    is_key,
)

MAX_LINE = 1 << 16
MAX_NAME = 1 << 10
COPIES_PER_BYTE = 8
FREE_COPIES = 1 << 17
PARTS_PER_BYTE = 64
FREE_PARTS = 1 << 20


def load_pickle(
    stream: bytes | BinaryIO,
    find_class: Callable[[str], AllowedGlobal | None],
    *,
    what: str,
    persistent: Callable[[object], object] | None = None,
) -> Any:
    """Return the value of the pickle that begins at the stream's position.

    Args:
        stream: the bytes, or a file; a file is left behind the pickle.
        find_class: looks "module name" up.
        what: the file, for messages.
        persistent: makes a value from a persistent id; None refuses them.
    Raises:
        UnsafePickleError: the pickle holds something that is not on the allowlist.
        DamagedCheckpointError: it is not a pickle, or does not end.
    """
    file = io.BytesIO(stream) if isinstance(stream, bytes) else stream
    machine = _Machine(find_class, what, persistent, file.tell())
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
            rule="the records of a checkpoint of another program are pickles of plain data",
            fix="use another checkpoint",
        ) from None
    check_tree(machine.result, what, PARTS_PER_BYTE * machine.num_bytes + FREE_PARTS)
    return machine.result


class _Machine:
    """The stack machine of the pickle protocols 0 to 5, less what plain data does not need."""

    def __init__(
        self,
        find_class: Callable[[str], AllowedGlobal | None],
        what: str,
        persistent: Callable[[Any], Any] | None,
        position: int,
    ) -> None:
        self.find_class, self.what, self.persistent = find_class, what, persistent
        self.begin = self.position = position
        self.copied = 0
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

    @property
    def num_bytes(self) -> int:
        """Bytes of the pickle up to the instruction that is executed."""
        return self.position - self.begin

    def spend(self, count: int) -> None:
        """Count parts that an instruction copies from values that are there already."""
        self.copied += count
        if self.copied > COPIES_PER_BYTE * self.num_bytes + FREE_COPIES:
            self.refuse(
                f"copying {self.copied} parts in {self.num_bytes} bytes",
                rule="what the instructions of a pickle copy is bounded by its length",
            )

    def refuse(self, found: str, rule: str = "") -> NoReturn:
        raise UnsafePickleError(
            f"CKPT_UNSAFE file={self.what} offset={self.position}: {found} is not on the "
            "allowlist.",
            rule=rule
            or "checkpoints of other programs may hold tensors and plain containers; nothing in "
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
        if len(module) + len(name) > MAX_NAME:
            self.refuse(f"a global whose name has {len(module) + len(name)} characters")
        full = f"{module} {name}"
        known = self.find_class(full)
        if known is None:
            self.refuse(f"the global {module:.200}.{name:.200}")
        self.stack.append(known if known.value is None else known.value)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, AllowedGlobal) or function.make is None:
            name = _dotted(function) if isinstance(function, AllowedGlobal) else ""
            self.refuse(f"a call of {name or type(function).__name__}")
        if type(arguments) is not tuple:
            self.refuse("a call whose arguments are no tuple")
        self.spend(len(arguments) + sum(len(a) for a in arguments if isinstance(a, _SIZED)))
        try:
            self.stack.append(function.make(arguments))
        except (UnsafePickleError, DamagedCheckpointError) as error:
            self.refuse(f"{_dotted(function)}: {error.found}")
        except (ValueError, TypeError, IndexError, KeyError, AssertionError, OverflowError):
            self.refuse(f"{_dotted(function)} with these arguments")

    def build(self) -> None:
        state, value = self.stack.pop(), self.stack[-1]
        if isinstance(value, Record):
            if value.is_key:
                self.refuse(f"a change of a {value.kind:.200} that is a key already")
            value.state = state
        elif isinstance(value, AttributeDict):
            if not isinstance(state, dict) or any(type(name) is not str for name in state):
                self.refuse("attributes that are not names with values")
            self.spend(len(state))
            value.update(state)
        elif not isinstance(value, OrderedEntries):
            self.refuse(f"state for a {type(value).__name__}")

    def set_items(self, pairs: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(pairs) % 2:
            self.refuse(f"items for a {type(target).__name__}")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            if not is_key(key):
                self.refuse(f"a dict key of type {type(key).__name__}, or of this size,")
            bound_collisions(target, key)
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            self.refuse(f"appending to a {type(target).__name__}")
        target.extend(items)

    def add(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set or not all(is_key(item) for item in items):
            self.refuse(f"adding to a {type(target).__name__}")
        self.put(target, items)

    def put(self, target: set[Any], items: list[Any]) -> None:
        for item in items:
            bound_collisions(target, item)
            target.add(item)

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
        if not all(is_key(item) for item in items):
            self.refuse("a frozenset of things that are no keys")
        found: set[Any] = set()
        self.put(found, items)
        self.stack.append(frozenset(found))

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


def _dotted(known: AllowedGlobal) -> str:
    return known.name[:400].replace(" ", ".")


_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
