"""Render chat templates in a process of their own, whose processor time and memory are limited.

A template is a program: it can loop for hours, and one expression (`'a' * 10**12`, `10**10**9`) can
take all memory or never return. No check of single operations finds all of these, so the kernel
holds the limits: a timer of processor time ends this process, an allocation over the limit fails.

`template_process.py` runs this file as a script, which imports Jinja and nothing of the package.
The first line of its input is a JSON object with `source`, `special_tokens`, `seconds` and
`memory_bytes`, each further one a request; each is answered by a line:

    {"messages": [...], "to_be_answered": bool}    ->  {"text": ...}
    {"messages": [...], "segments": true}          ->  {"segments": [...]}
    anything                                       ->  {"refused": why} or {"over": which limit}
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import IO, Any

# The script's own folder: modules of the package are not to be found under bare names.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

from jinja2 import TemplateSyntaxError  # noqa: E402
from jinja2.ext import Extension  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

MEMORY_PER_CHARACTER = 16
"""The text a template writes may have one character for so many bytes of the memory limit: it is
held several times while it is made and sent."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses `str.format` in whatever way it was reached.

    A format string reads attributes: `{0.__globals__}` of any Python function shows the module that
    it is from. The sandbox puts its own function in place of the method where a template asks for
    it by name; this holds where another way to the method is found.
    """

    def is_safe_callable(self, obj: object) -> bool:
        """Return whether a template may call it."""
        if getattr(obj, "__name__", None) in ("format", "format_map"):
            owner = getattr(obj, "__objclass__", None) or type(getattr(obj, "__self__", None))
            if issubclass(owner, str):
                return False
        return super().is_safe_callable(obj)


class Generation(Extension):
    """Let `{% generation %}` blocks pass as their content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Any:
        """Return what is in the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception() -> Any:
    """Return the function by which a template refuses a conversation.

    Its globals are its own and hold `ValueError` alone, so that it leads to no module.
    """

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    names = {"__builtins__": {"ValueError": ValueError}}
    return FunctionType(raise_exception.__code__, names, "raise_exception")


def environment() -> Sandbox:
    """Return what Hugging Face's chat templates expect, in a sandbox."""
    found = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", Generation],
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception()
    # A template that writes today's date would give other bytes tomorrow.
    found.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
    return found


class RefusedError(Exception):
    """The template does not write these messages."""


class TextLimitError(Exception):
    """The text is longer than the limit of memory allows."""


class Renderer:
    """A compiled template, each use of which may take `seconds` of processor time."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], seconds: float, memory_bytes: int
    ) -> None:
        self.special_tokens, self.seconds = special_tokens, seconds
        self.most_characters = memory_bytes // MEMORY_PER_CHARACTER
        # Expressions of constants are computed while it is compiled.
        with self._timer():
            self.template = environment().from_string(source)

    @contextlib.contextmanager
    def _timer(self) -> Any:
        # SIGPROF keeps its default action, which no code of the template can defer.
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def render(self, messages: Sequence[Mapping[str, object]], *, to_be_answered: bool) -> str:
        """Write messages; see `ChatTemplate.render`."""
        try:
            with self._timer():
                text: str = self.template.render(
                    messages=messages, add_generation_prompt=to_be_answered, **self.special_tokens
                )
        except MemoryError:
            raise
        except Exception as error:  # Jinja's own and whatever an expression raises
            raise RefusedError(str(error)[:1000]) from None
        if len(text) > self.most_characters:
            raise TextLimitError
        return text

    def segments(self, messages: Sequence[Mapping[str, object]]) -> list[str]:
        """Cut a conversation into what is given and learned; see `ChatTemplate.segments`."""
        full = self.render(messages, to_be_answered=False)
        segments, position = [], 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:at], to_be_answered=True)
            until = self.render(messages[: at + 1], to_be_answered=False)
            is_prefix = until.startswith(before) and full.startswith(until)
            if not is_prefix or len(before) < position:
                raise RefusedError(f"message {at + 1} is written otherwise when others follow it")
            segments += [full[position : len(before)], full[len(before) : len(until)]]
            position = len(until)
        return [*segments, full[position:]]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is sent back for a request."""
        messages = request["messages"]
        try:
            if request.get("segments"):
                return {"segments": self.segments(messages)}
            return {"text": self.render(messages, to_be_answered=request["to_be_answered"])}
        except RefusedError as error:
            return {"refused": str(error)}


def _limit_memory(memory_bytes: int) -> None:
    for limit, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
        # Not every system has the limit, and an administrator's may be lower already.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compile the template of the first line, then answer each further line until the end."""
    renderer: Renderer | None = None
    for line in requests:
        try:
            request = json.loads(line)
            if renderer is None:
                _limit_memory(request["memory_bytes"])
                renderer = Renderer(**request)
                answer: dict[str, Any] = {"ready": True}
            else:
                answer = renderer.answer(request)
            # Lone surrogates are escaped; what follows the line is not taken for its end.
            encoded = json.dumps(answer).encode()
        except TemplateSyntaxError as error:
            encoded = json.dumps({"refused": f"line {error.lineno}: {error.message}"}).encode()
        except TextLimitError:
            encoded = b'{"over": "text"}'
        except MemoryError:
            encoded = b'{"over": "memory"}'
        except (RecursionError, ArithmeticError, ValueError, TypeError) as error:
            # Expressions of constants that cannot be computed, too deeply nested source.
            encoded = json.dumps({"refused": f"{type(error).__name__}: {error}"[:1000]}).encode()
        answers.write(encoded + b"\n")
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C is the parent's; this process ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
