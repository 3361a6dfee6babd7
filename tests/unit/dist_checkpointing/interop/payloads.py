"""Hostile pickles, written by hand: what a loader must end on, without doing what it says."""

import io
import os
import pickle
import struct
import subprocess
from pathlib import Path
from typing import Any

import torch


class Runs:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple:
        return self.function, self.arguments


def text(value: str) -> bytes:
    """Push text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name(module: str, attribute: str) -> bytes:
    """Push a global by the old instruction."""
    return f"c{module}\n{attribute}\n".encode()


def calls(canary: Path) -> dict[str, bytes]:
    """Pickles that name a function or class, by every instruction that can."""
    command = f"touch {canary}"
    nested = pickle.dumps(Runs(os.system, command))
    saved = io.BytesIO()
    torch.save(Runs(os.system, command), saved)
    return {
        **{f"reduce, protocol {p}": pickle.dumps(Runs(os.system, command), p) for p in range(6)},
        "popen": pickle.dumps(Runs(subprocess.Popen, ["touch", str(canary)])),
        "eval": pickle.dumps(Runs(eval, f"open({str(canary)!r}, 'w')")),
        "exec": pickle.dumps(Runs(exec, f"open({str(canary)!r}, 'w')")),
        "open": pickle.dumps(Runs(open, str(canary), "w")),
        "getattr": b"\x80\x02" + name("builtins", "getattr") + name("os", "system")
        + text("__call__")
        + b"\x86R.",
        "import": b"\x80\x02" + name("builtins", "__import__") + text("os") + b"\x85R.",
        "importlib": b"\x80\x02" + name("importlib", "import_module") + text("os") + b"\x85R.",
        "obj": b"(" + name("os", "system") + text(command) + b"o.",
        "inst": b"(" + text(command) + b"ios\nsystem\n.",
        "newobj": b"\x80\x02" + name("subprocess", "Popen") + text(command) + b"\x85\x81.",
        "newobj_ex": b"\x80\x04" + name("subprocess", "Popen") + b")}\x92.",
        "stack global": b"\x80\x04" + text("posix") + text("system") + b"\x93"
        + text(command) + b"\x85R.",
        "stack global of numbers": b"\x80\x04K\x01K\x02\x93.",
        "dotted name": b"\x80\x04" + text("torch") + text("os.system") + b"\x93"
        + text(command) + b"\x85R.",
        "name with a blank": b"\x80\x04" + text("torch Size") + text("x") + b"\x93)R.",
        "extension code 1": b"\x80\x02\x82\x01.",
        "extension code 2": b"\x80\x02\x83\x01\x00.",
        "extension code 4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "persistent id as text": b"Pos.system\n.",
        "persistent id": b"\x80\x02" + text(command) + b"Q.",
        "nested pickle": b"\x80\x02" + name("pickle", "loads") + b"B"
        + struct.pack("<I", len(nested)) + nested + b"\x85R.",
        "nested torch.save": b"\x80\x02" + name("torch.storage", "_load_from_bytes") + b"B"
        + struct.pack("<I", len(saved.getvalue())) + saved.getvalue() + b"\x85R.",
        "torch.load": b"\x80\x02" + name("torch", "load") + text(str(canary)) + b"\x85R.",
        "a class of torch": b"\x80\x02" + name("torch.nn.modules.linear", "Linear") + b")\x81.",
        "code object": b"\x80\x02" + name("types", "CodeType") + b")R.",
        "attribute getter": b"\x80\x02" + name("operator", "attrgetter")
        + text("system") + b"\x85R.",
        "partial": b"\x80\x02" + name("functools", "partial") + name("os", "system") + b"\x85R.",
        "reconstructor": b"\x80\x02" + name("copyreg", "_reconstructor")
        + name("subprocess", "Popen") + name("builtins", "object") + b"N\x87R.",
        "hooks of a tensor": b"\x80\x02" + name("torch._utils", "_rebuild_tensor_v2")
        + b"(" + name("os", "system") + b"K\x00)))" + b"tR.",
        "codec": b"\x80\x02" + name("_codecs", "encode") + text("x") + text("rot13") + b"\x86R.",
        "int of long text": b"\x80\x02" + name("builtins", "int") + text("9" * 99) + b"\x85R.",
        "out of band buffer": b"\x80\x05\x97.",
        "list as arguments": b"\x80\x02" + name("torch", "Size") + b"]R.",
        "call of a number": b"\x80\x02K\x01)R.",
        "lookalike of an allowed module": b"\x80\x02" + name("megatron;os", "system")
        + text(command) + b"\x85R.",
    }  # fmt: skip


def short(value: str) -> bytes:
    """Push text of less than 256 bytes."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def _called(module: str, attribute: str) -> bytes:
    """Push a global by the newer instruction."""
    return short(module) + short(attribute) + b"\x93"


def amplifiers() -> dict[str, bytes]:
    """Small pickles whose instructions cost much each: they name again what the memo holds."""
    shared = b")" + b"2\x86" * 60  # a tuple of 2^60 parts, in 60 pairs
    record = _called("megatron.core", "X")
    many = b"(" + b"K\x01" * 10_000
    bad = b"\x80\x04"

    def repeated(value: bytes, use: bytes) -> bytes:
        """`value` in memo 0, and a list of 100,000 times `use`."""
        return bad + value + b"\x940](" + use * 30_000 + b"e."

    text_of_1_mb = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)
    ordered, namespace = _called("collections", "OrderedDict"), _called("argparse", "Namespace")
    names = b"}(" + b"".join(short(f"n{i}") + b"N" for i in range(3_000)) + b"u"
    return {
        "key of shared tuples": bad + b"}" + shared + b"Ns.",
        "items of shared tuples": bad + b"}(" + shared + b"Nu.",
        "old dict of shared tuples": bad + b"(" + shared + b"Nd.",
        "member of shared tuples": bad + b"\x8f(" + shared + b"\x90.",
        "frozen member of shared tuples": bad + b"(" + shared + b"\x91.",
        "record of shared tuples": bad + b"}" + record + shared + b"\x85RNs.",
        "record with a state of shared tuples": bad + b"}" + record + b")R" + shared + b"bNs.",
        "record with an attribute of shared tuples": bad + b"}" + record + b")R}"
        + short("a") + shared + b"sbNs.",
        "ordered dict of shared tuples": bad + ordered + b"]" + shared + b"N\x86a\x85R.",
        "set made of shared tuples": bad + _called("builtins", "set") + b"]" + shared
        + b"a\x85R.",
        "tuple of wide tuples": bad + b"}((" + b"N" * 900 + b"t" + b"2" * 899 + b"tNs.",
        "doubling device": bad + _called("torch", "device") + b"\x940" + short("x" * 64)
        + b"\x940" + b"h\x00h\x01h\x01\x86Rq\x010" * 40 + b"h\x01.",
        "doubling path": bad + _called("pathlib", "PosixPath") + b"\x940" + short("x" * 64)
        + b"\x940" + b"h\x00h\x01h\x01\x86Rq\x010" * 40 + b"h\x01.",
        "persistent id of shared tuples": bad + shared + b"Q.",
        "encoded text again and again": repeated(
            text_of_1_mb + b"\x940" + short("latin1") + b"\x940" + _called("_codecs", "encode"),
            b"h\x02h\x00h\x01\x86R",
        ),
        "ordered dict again and again": repeated(
            b"](" + b"".join(short(f"n{i}") + b"N\x86" for i in range(3_000)) + b"e\x940"
            + ordered,
            b"h\x01h\x00\x85R",
        ),
        "namespace again and again": repeated(names + b"\x940" + namespace, b"h\x01)Rh\x00b"),
        "size again and again": repeated(
            b"]" + many + b"e\x940" + _called("torch", "Size"), b"h\x01h\x00\x85R"
        ),
        "long name again and again": repeated(text_of_1_mb, b"h\x00h\x00\x930"),
        "a wide list in a wide list": bad + b"]" + many + b"e\x940](" + b"h\x00" * 10_000 + b"e.",
        "a long text in a wide list": bad + text_of_1_mb + b"\x940](" + b"h\x00" * 40_000 + b"e.",
        "long text as keys": bad + text_of_1_mb + b"\x940}(" + b"h\x00N" * 100_000 + b"u.",
        "numbers as keys": bad + b"}("
        + b"".join(b"J" + struct.pack("<i", i) + b"N" for i in range(140_000)) + b"u.",
        "tuples as keys": bad + b"}("
        + b"".join(b"J" + struct.pack("<i", i) + b"\x85N" for i in range(5_000)) + b"u.",
    }  # fmt: skip


def bombs() -> dict[str, bytes]:
    """Pickles that name nothing, and would cost memory, time or the stack."""
    # Each list holds the one before it twice.
    doubling = b"\x80\x02]q\x00" + b"".join(
        b"]q" + bytes([i]) + b"(h" + bytes([i - 1]) + b"h" + bytes([i - 1]) + b"e"
        for i in range(1, 60)
    )
    return {
        "deep lists": b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b".",
        "deep tuples": b"\x80\x02)" + b"\x85" * 5000 + b".",
        "deep marks": b"\x80\x02" + b"(" * 100000 + b".",
        "doubling lists": b"\x80\x02(" + doubling[2:] + b"l.",
        "doubling tuples": b"\x80\x02)" + b"2\x86" * 60 + b".",
        "list in itself": b"\x80\x02]q\x00h\x00a.",
        "dict in itself": b"\x80\x02}q\x00K\x01h\x00s.",
        "huge text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 62) + b"x.",
        "huge frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N",
        "huge number": b"\x80\x02\x8b" + struct.pack("<i", 1 << 20) + b"\x7f" * (1 << 20) + b".",
        "number of many digits": b"L" + b"9" * 100_000 + b"L\n.",
        "line without end": b"I" + b"1" * 200_000,
        "unknown memo": b"\x80\x02h\x05.",
        "empty stack": b"\x80\x02a.",
        "pop of nothing": b"\x80\x020.",
        "tuple of nothing": b"\x80\x02\x87.",
        "no end": b"\x80\x02]",
        "two values": b"\x80\x02]].",
        "unknown instruction": b"\x80\x02\xff.",
        "unhashable key": b"\x80\x02}]K\x01s.",
        "unhashable member": b"\x80\x04\x8f(]\x90.",
        "odd number of items": b"\x80\x02}(K\x01u.",
        "state for a number": b"\x80\x02K\x01}b.",
        "state for a list": b"\x80\x02]}b.",
        "items for a tuple": b"\x80\x02)(K\x01e.",
        "text that is no text": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
        "nothing": b"",
    }
