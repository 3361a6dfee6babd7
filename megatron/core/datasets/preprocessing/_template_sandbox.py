"""Render chat templates in a process whose processor time and memory are limited.

A template is a program: it can loop for hours, and one expression (`'a' * 10**12`, `10**10**9`) can
use all memory or never return. No check of single operations finds all of these, so the kernel
enforces the limits: a timer of processor time ends this process, and an allocation over the limit
fails. Jinja's sandbox keeps the template from calling anything else.

`chat_template.py` runs this file as a script, which imports Jinja and no module of the package.
The first line of its input is a JSON object with `source`, `special_tokens`, `seconds` and
`memory_bytes`. Each further line is a request; the script answers each with one line:

    {"messages": [...], "to_be_answered": bool}                     ->  {"text": ...}
    {"messages": [...], "tools": [...] or null, "segments": true}   ->  {"segments": [...]}
    a request that fails                   ->  {"refused": why} or {"over": "memory"}
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

# Modules in the script's own folder must not be found under bare names.
sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]

from jinja2 import TemplateSyntaxError, nodes  # noqa: E402
from jinja2.ext import Extension  # noqa: E402
from jinja2.parser import Parser  # noqa: E402
from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: E402

MEMORY_PER_CHARACTER = 16
"""A rendered text may have one character for so many bytes of the memory limit: several copies of
it exist while it is made and sent."""

_TEXT_FILTERS = frozenset({
    "string", "trim", "upper", "lower", "capitalize", "title", "replace", "center", "indent",
    "wordwrap", "striptags", "escape", "e", "forceescape",
})  # fmt: skip
"""Filters of Jinja that turn any value into text."""
_CALLS = ("tool_calls", "function_call")
"""Members of a message that call tools; the second is an older spelling."""

Messages = Sequence[Mapping[str, Any]]


class RefusedError(Exception):
    """The template refuses or omits a part of these messages."""


class NotTextError(Exception):
    """The template writes a value that is not text, for example None."""


def _as_text(value: Any) -> Any:
    """Return a value that may be written; refuse None, lists and objects."""
    if value is None or isinstance(value, (list, tuple, dict)):
        what = {"NoneType": "null", "dict": "an object"}.get(type(value).__name__, "a list")
        raise NotTextError(f"the template writes {what} as if it were text")
    return value


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox; templates may write only text."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Parse a template; check the operands of `~` and of filters of text."""
        found = super()._parse(source, name, filename)

        def checked(node: Any) -> nodes.Filter:
            return nodes.Filter(node, "checked_text", [], [], None, None, lineno=node.lineno)

        for node in [*found.find_all((nodes.Concat, nodes.Filter))]:
            if isinstance(node, nodes.Concat):
                node.nodes = [checked(one) for one in node.nodes]
            elif isinstance(node, nodes.Filter) and node.name in _TEXT_FILTERS and node.node:
                node.node = checked(node.node)
        return found


class GenerationBlocks(Extension):
    """Replace `{% generation %}` blocks by their content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Any:
        """Return the content of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def environment() -> Sandbox:
    """Return the environment that Hugging Face's chat templates expect, in a sandbox."""
    found = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", GenerationBlocks],
        finalize=_as_text,
    )
    found.filters |= {"checked_text": _as_text, "tojson": _to_json}
    # A template that writes today's date would give other bytes tomorrow.
    date = datetime.date(2024, 7, 26)
    found.globals |= {"raise_exception": _raise_exception, "strftime_now": date.strftime}
    return found


class Renderer:
    """A compiled template; each use may take `seconds` of processor time."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], seconds: float, memory_bytes: int
    ) -> None:
        self.special_tokens, self.seconds = special_tokens, seconds
        self.most_characters = memory_bytes // MEMORY_PER_CHARACTER
        for limit, most in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_CORE, 0)):
            # Some systems lack the limit, and an administrator's limit may already be lower.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, (most, most))
        # Jinja computes expressions of constants when it compiles them.
        with self._timer():
            self.template = environment().from_string(source)

    @contextlib.contextmanager
    def _timer(self) -> Iterator[None]:
        # SIGPROF keeps its default action, which no code of the template can defer.
        signal.setitimer(signal.ITIMER_PROF, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def render(self, messages: Messages, *, to_be_answered: bool, tools: object = None) -> str:
        try:
            text = self._rendered(messages, to_be_answered, tools)
        except MemoryError:
            raise
        except (NotTextError, TypeError) as error:
            raise RefusedError(self._message_of(error, messages, tools) + str(error)) from None
        except Exception as error:  # Jinja's own, and any error of an expression
            raise RefusedError(str(error)[:1000]) from None
        if len(text) > self.most_characters:
            raise MemoryError
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
        """Return which message causes an error: the last of the shortest part that raises it."""
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
        """Refuse a conversation if the template leaves out tools, calls or parts of it.

        Args:
            full: the rendered conversation.
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
        """Return the answer to a request."""
        messages = request["messages"]
        plain = [_plain(message) for message in messages]
        refusal = RefusedError()
        for variant in [messages] if plain == messages else [messages, plain]:
            try:
                if request.get("segments"):
                    return {"segments": self.segments(variant, request.get("tools"))}
                return {"text": self.render(variant, to_be_answered=request["to_be_answered"])}
            except RefusedError as error:
                refusal = error
        return {"refused": str(refusal)}


def _plain(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message for a template that takes only text.

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


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Compile the template of the first line, then answer each further line until the end."""
    renderer: Renderer | None = None
    for line in requests:
        answer: dict[str, Any] = {}
        try:
            request = json.loads(line)
            if renderer is None:
                renderer = Renderer(**request)
            else:
                answer = renderer.answer(request)
            # JSON escapes lone surrogates and ends of lines within a text.
            encoded = json.dumps(answer).encode()
        except TemplateSyntaxError as error:
            encoded = json.dumps({"refused": f"line {error.lineno}: {error.message}"}).encode()
        except MemoryError:
            encoded = b'{"over": "memory"}'
        except (RecursionError, ArithmeticError, ValueError, TypeError) as error:
            # Expressions of constants that cannot be computed, too deeply nested source.
            encoded = json.dumps({"refused": f"{type(error).__name__}: {error}"[:1000]}).encode()
        answers.write(encoded + b"\n")
        answers.flush()


if __name__ == "__main__":
    # Ctrl-C is handled by the parent; this process ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)
