"""Read the pickled `.metadata` of torch's distributed checkpoints as data: nothing is executed.

`torch.load` reads no bare pickle. A pickle is a program for a stack machine; two of its
instructions name Python objects to import and call. Here an allowed name is replaced by an inert
class whose instances (`Record`) keep their arguments and state; any other name raises an error with
its file and offset. `pickletools.genops` splits the stream into instructions; it builds nothing.

Time and memory are proportional to the pickle's length. An instruction may repeat a value that is
stored elsewhere (the memo), so everything that an instruction costs is bounded: a key is cheap to
hash, and the parts of the result, counted wherever they occur, are at most
`PARTS_PER_BYTE` times the bytes read, in addition to a fixed number.
"""

from __future__ import annotations

import io
import pickletools
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import NoneType, SimpleNamespace
from typing import Any, NoReturn

import torch

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError

MAX_DEPTH = 100
MAX_ARGUMENTS = 64
MAX_NAME = 1 << 10
MAX_NUMBER_KEYS = 1 << 17
"""Most numbers that are keys of one dict: a hostile file can make the hashes of numbers collide,
while Python salts the hashes of text."""
PARTS_PER_BYTE = 64
FREE_PARTS = 1 << 20
_INERT = re.compile(
    r"(?:torch\.distributed\.checkpoint|megatron|deepspeed|transformer_engine|apex"
    r"|nvidia_resiliency_ext|modelopt|numpy|pathlib)(?:\.[A-Za-z_]\w*)* [A-Za-z_][\w.]*"
    r"|signal [A-Z]\w*"
    r"|argparse Namespace|torch\.serialization _get_layout|torch device",
    re.ASCII,
)
"""Classes and enums of programs that write checkpoints; their instances are kept as inert data."""


class UnsafePickleError(DamagedCheckpointError):
    """A file names an object that is not on the allowlist, or is unlike any writer's output."""


class Record:
    """An instance of an allowed class, as data: the class's name, arguments and state.

    Records are compared by identity, so a record is a cheap key whatever it contains.
    """

    kind = ""
    """module.name of the class."""
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: object) -> Record:
        """Make an instance; `NEWOBJ` calls this alone."""
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Any:
        """Return a field of the state."""
        if not isinstance(self.state, dict) or name not in self.state:
            raise DamagedCheckpointError(f"a {self.kind} without field {name!r}.")
        return self.state[name]

    def get(self, name: str, default: object = None) -> Any:
        """Return a field of the state, or the default."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


@lru_cache(maxsize=1 << 12)
def inert_class(name: str) -> type[Record] | None:
    """Return the class of records that replaces "module name"; None if it is on no list."""
    if _INERT.fullmatch(name) is None:
        return None
    return type(name.split()[1], (Record,), {"kind": name.replace(" ", ".")})


def load_pickle(data: bytes, *, what: str) -> Any:
    """Return the value of a pickle of protocol 2 or later.

    Args:
        what: the file, for messages.
    Raises:
        UnsafePickleError: the pickle holds something that is not on the allowlist.
        DamagedCheckpointError: it is not a pickle, or does not end.
    """
    machine = _Machine(what)
    try:
        for opcode, argument, position in pickletools.genops(io.BytesIO(data)):
            machine.position = position or 0
            machine.run(opcode.name, argument)
    except DamagedCheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise DamagedCheckpointError(
            f"{what} is damaged at byte {machine.position}: "
            f"{type(error).__name__}: {error!s:.200}.",
            rule="the metadata of a checkpoint of another program is a pickle of plain data",
            fix="use another checkpoint",
        ) from None
    check_tree(machine.result, what, PARTS_PER_BYTE * len(data) + FREE_PARTS)
    return machine.result


class _Machine:
    """The stack machine of pickles, without the instructions that plain data does not need."""

    def __init__(self, what: str) -> None:
        self.what, self.position = what, 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}  # not a list: an index of 2^32 costs one entry
        self.result: Any = None

    def run(self, name: str, argument: Any) -> None:
        """Execute one instruction."""
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name == "MARK":
            self.outer.append(stack)
            self.stack = []
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if argument is None else argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(self.last(int(name[-1]))))
        elif name == "TUPLE":
            items = self.marked()
            self.stack.append(tuple(items))
        elif name in ("APPEND", "APPENDS"):
            items = self.last(1) if name == "APPEND" else self.marked()
            self.target(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = self.last(2) if name == "SETITEM" else self.marked()
            self.set_items(self.target(dict), pairs[::2], pairs[1::2])
        elif name == "GLOBAL":
            self.find(*argument.split(" ", 1))
        elif name == "STACK_GLOBAL":
            self.find(*self.last(2))
        elif name in ("REDUCE", "NEWOBJ"):
            self.call(*self.last(2))
        elif name == "BUILD":
            state, value = self.last(1)[0], self.stack[-1]
            if not isinstance(value, Record):
                self.refuse(f"state for a {type(value).__name__}")
            value.state = state
        elif name == "STOP":
            (self.result,) = stack
            if self.outer:
                raise ValueError("values are left on the stack")
        elif name not in ("PROTO", "FRAME"):
            self.refuse(f"the instruction {name}")

    def refuse(self, found: str) -> NoReturn:
        refuse(self.what, found, self.position)

    def last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise ValueError("the stack is empty")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def marked(self) -> list[Any]:
        """Return the values that were pushed since the last mark."""
        items, self.stack = self.stack, self.outer.pop()
        return items

    def target(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            self.refuse(f"items for a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def set_items(self, target: dict[Any, Any], keys: list[Any], values: list[Any]) -> None:
        """Add items whose keys are cheap to hash, each and all together."""
        is_salted = all(isinstance(key, (str, bytes, Record)) for key in keys)
        if not is_salted and len(target) + len(keys) > MAX_NUMBER_KEYS:
            self.refuse("so many numbers as keys")
        for key, value in zip(keys, values, strict=True):
            is_small = isinstance(key, int) and key.bit_length() <= 64
            if not (is_small or isinstance(key, (str, bytes, Record, float, NoneType))):
                self.refuse(f"a dict key of type {type(key).__name__}, or of this size,")
            target[key] = value

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str or " " in module:
            self.refuse("a global whose name is not text")
        if len(module) + len(name) > MAX_NAME:
            self.refuse(f"a global whose name has {len(module) + len(name)} characters")
        found: Any = _CALLS.get(f"{module} {name}") or inert_class(f"{module} {name}")
        if module == "torch" and name in _VALUES:
            found = getattr(torch, name)
        if found is None:
            self.refuse(f"the global {module:.200}.{name:.200}")
        self.stack.append(found)

    def call(self, function: Any, arguments: Any) -> None:
        is_class = isinstance(function, type) and issubclass(function, Record)
        if not is_class and function not in _CALLS.values():
            self.refuse(f"a call of a {type(function).__name__}")
        if type(arguments) is not tuple or len(arguments) > MAX_ARGUMENTS:
            self.refuse("a call with these arguments")
        try:
            self.stack.append(function(*arguments))
        except TypeError:
            self.refuse(f"{function.__name__} with these arguments")


def _size(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if len(sizes) > MAX_ARGUMENTS or any(type(n) is not int for n in sizes):
        raise TypeError("sizes are integers")
    return tuple(sizes)


def _ordered() -> dict[Any, Any]:
    return {}


_CALLS = {"torch Size": _size, "collections OrderedDict": _ordered}
_VALUES = {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
_VALUES |= {"strided", "contiguous_format", "preserve_format"}
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple, "EMPTY_LIST": list, "EMPTY_DICT": dict,
}  # fmt: skip


def check_tree(root: object, what: str, max_parts: int) -> None:
    """Refuse a value that is not a tree of reasonable size; each container is visited once.

    A part that occurs several times counts each time, because code that walks or writes the tree
    visits it each time; 256 characters of text or bytes are one part.
    """
    known: dict[int, tuple[int, int]] = {}

    def measure(value: Any, depth: int) -> tuple[int, int]:
        """Return (parts, height)."""
        children = _children(value)
        if children is None:
            return 1 + (len(value) // 256 if isinstance(value, (str, bytes)) else 0), 0
        if id(value) not in known:
            if depth > MAX_DEPTH:  # also a container that contains itself
                refuse(what, f"containers nested more than {MAX_DEPTH} deep")
            measured = [measure(child, depth + 1) for child in children]
            parts = 1 + sum(parts for parts, _ in measured)
            height = 1 + max((height for _, height in measured), default=0)
            if parts > max_parts or height > MAX_DEPTH:
                refuse(what, f"a value of {parts} parts, nested {height} deep,")
            known[id(value)] = parts, height
        return known[id(value)]

    measure(root, 0)


def _children(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Record):
        return [*value.args, value.state]
    return [vars(value)] if isinstance(value, (Namespace, SimpleNamespace)) else None


def refuse(what: str, found: str, offset: int | None = None) -> NoReturn:
    """Raise the error for a file with an object that is not on the allowlist."""
    where = "" if offset is None else f" offset={offset}"
    raise UnsafePickleError(
        f"CKPT_UNSAFE file={what}{where}: {found} is not on the allowlist.",
        rule="checkpoints of other programs may hold tensors and plain containers; nothing in them "
        "is imported or called",
        fix="if you trust the file, load it with the program that wrote it and save the weights "
        "alone",
    )
