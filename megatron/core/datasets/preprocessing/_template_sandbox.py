"""Render chat templates in a process of their own, whose processor time and memory are limited.

A template is a program: it can loop for hours, and one expression (`'a' * 10**12`, `10**10**9`) can
take all memory or never return. No check of single operations finds all of these, so the kernel
holds the limits: a timer of processor time ends this process, an allocation over the limit fails.

`template_process.py` runs this file as a script, which imports Jinja and nothing of the package.
The first line of its input is a JSON object with `source`, `special_tokens`, `seconds` and
`memory_bytes`, each further one a request; each is answered by a line:

    {"messages": [...], "to_be_answered": bool}                     ->  {"text": ...}
    {"messages": [...], "tools": [...] or null, "segments": true}   ->  {"segments": [...]}
    anything                                          ->  {"refused": why} or {"over": which limit}
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

from jinja2 import TemplateSyntaxError, nodes  # noqa: E402
from jinja2.ext import Extension  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

MEMORY_PER_CHARACTER = 16
"""The text a template writes may have one character for so many bytes of the memory limit: it is
held several times while it is made and sent."""


_TEXT_FILTERS = frozenset({
    "string", "trim", "upper", "lower", "capitalize", "title", "replace", "center", "indent",
    "wordwrap", "striptags", "escape", "e", "forceescape",
})  # fmt: skip
"""Filters of Jinja that turn any value into text."""


class NotTextError(Exception):
    """The template writes a value that is no text, which Python would spell."""


def _as_text(value: Any) -> Any:
    """Return a value that may be written; refuse None, lists and objects."""
    if value is None or isinstance(value, (list, tuple, dict)):
        what = {"NoneType": "null", "dict": "an object"}.get(type(value).__name__, "a list")
        raise NotTextError(f"the template writes {what} as if it were text")
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which writes text only and refuses `str.format` however it was reached.

    A format string reads attributes: `{0.__globals__}` of any Python function shows the module that
    it is from. The sandbox puts its own function in place of the method where a template asks for
    it by name; this holds where another way to the method is found.
    """

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; check what `~` joins and what filters of text take."""
        found = super()._parse(source, name, filename)

        def checked(node: Any) -> nodes.Filter:
            return nodes.Filter(node, "checked_text", [], [], None, None, lineno=node.lineno)

        for node in [*found.find_all((nodes.Concat, nodes.Filter))]:
            if isinstance(node, nodes.Concat):
                node.nodes = [checked(one) for one in node.nodes]
            elif isinstance(node, nodes.Filter) and node.name in _TEXT_FILTERS and node.node:
                node.node = checked(node.node)
        return found

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
        finalize=_as_text,
    )
    found.filters["checked_text"] = _as_text
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception()
    # A template that writes today's date would give other bytes tomorrow.
    found.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
    return found


Messages = Sequence[Mapping[str, Any]]


_CALLS = ("tool_calls", "function_call")
"""Members of a message that call tools; the second is an older spelling."""


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

    def render(self, messages: Messages, *, to_be_answered: bool, tools: object = None) -> str:
        """Write messages; see `ChatTemplate.render`."""
        try:
            text = self._rendered(messages, to_be_answered, tools)
        except MemoryError:
            raise
        except (NotTextError, TypeError) as error:
            raise RefusedError(self._message_of(error, messages, tools) + str(error)) from None
        except Exception as error:  # Jinja's own and whatever an expression raises
            raise RefusedError(str(error)[:1000]) from None
        if len(text) > self.most_characters:
            raise TextLimitError
        return text

    def _rendered(self, messages: Messages, to_be_answered: bool, tools: object) -> str:
        with self._timer():
            text: str = self.template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=to_be_answered,
                **self.special_tokens,
            )
        return text

    def _message_of(self, error: Exception, messages: Messages, tools: object) -> str:
        """Return which message an error is about: the last of the shortest part that raises it."""
        for count in range(1, len(messages)):
            try:
                self._rendered(messages[:count], False, tools)
            except MemoryError:
                raise
            except Exception as found:
                if (type(found), str(found)) == (type(error), str(error)):
                    return f"message {count}: "
        return f"message {len(messages)}: "

    def _check_written(self, messages: Messages, tools: object, full: str) -> None:
        """Refuse a conversation of which the template leaves out what is no text.

        Args:
            full: the conversation as it was rendered.
        """
        parts: list[tuple[str, Messages, Any]] = [("tools", messages, None)] if tools else []
        for at, message in enumerate(messages):
            for key in (*_CALLS, "content"):
                if message.get(key) and not isinstance(message[key], str):
                    rest = {name: value for name, value in message.items() if name != key}
                    rest |= {"content": ""} if key == "content" else {}
                    without = [*messages[:at], rest, *messages[at + 1 :]]
                    parts.append((f"{key} of message {at + 1}", without, tools))
        for what, others, given in parts:
            rendered = None
            with contextlib.suppress(RefusedError):
                rendered = self.render(others, to_be_answered=False, tools=given)
            if rendered == full:
                raise RefusedError(f"the template does not write the {what}")

    def segments(self, messages: Messages, tools: object = None) -> list[str]:
        """Cut a conversation into what is given and learned; see `ChatTemplate.segments`."""
        full = self.render(messages, to_be_answered=False, tools=tools)
        self._check_written(messages, tools, full)
        segments, position = [], 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:at], to_be_answered=True, tools=tools)
            until = self.render(messages[: at + 1], to_be_answered=False, tools=tools)
            is_prefix = until.startswith(before) and full.startswith(until)
            if not is_prefix or len(before) < position:
                raise RefusedError(f"message {at + 1} is written otherwise when others follow it")
            segments += [full[position : len(before)], full[len(before) : len(until)]]
            position = len(until)
        return [*segments, full[position:]]

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is sent back for a request."""
        messages = request["messages"]
        plain = [_plain(message) for message in messages]
        why = ""
        for variant in [messages] if plain == messages else [messages, plain]:
            try:
                return self._answer(request, variant)
            except RefusedError as error:
                why = str(error)
        return {"refused": why}

    def _answer(self, request: Mapping[str, Any], messages: Messages) -> dict[str, Any]:
        if request.get("segments"):
            return {"segments": self.segments(messages, request.get("tools"))}
        return {"text": self.render(messages, to_be_answered=request["to_be_answered"])}


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message for a template that takes text only.

    Parts of text are joined. A message that calls tools need not have text.
    """
    content = message.get("content")
    if content is None and any(message.get(name) for name in _CALLS):
        return {**message, "content": ""}
    if isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        return {**message, "content": "".join(part["text"] for part in content)}
    return message


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
