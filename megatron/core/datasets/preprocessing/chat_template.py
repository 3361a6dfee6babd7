"""Conversations as text: a chat template, cut into given text and text to be learned.

Templates are Jinja, as in Hugging Face models. `_template_sandbox.py` renders them in a sandbox,
in a child process with limits of processor time and memory. No torch import.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.preprocessing.documents import (
    BadDocumentError,
    Texts,
    check_unicode,
)
from megatron.core.foundation.errors import ConfigError, DataError, shown
from megatron.core.foundation.json_text import read_json
from megatron.core.foundation.optional_imports import require
from megatron.core.settings.flags import flag

_SCRIPT = Path(__file__).with_name("_template_sandbox.py")
_LEAST_MIB = 64


@dataclass(frozen=True, kw_only=True)
class TemplateLimits:
    """Limits of rendering with a chat template."""

    seconds: float = flag(10.0, name="chat_template_seconds", metavar="S")
    """Limit of processor time for rendering one conversation (%(default)g); the usual time is a
    millisecond."""
    memory_mib: int = flag(1024, name="chat_template_mib", metavar="MIB")
    """Memory limit of the process that renders; a text may have one character for 16 bytes of it
    (%(default)s)."""

    def __post_init__(self) -> None:
        if not (0 < self.seconds < math.inf):
            raise ConfigError(
                f"--chat-template-seconds {self.seconds:g}: no time to render in.",
                rule="it is the processor time that one rendering may take",
                flags=["--chat-template-seconds"],
                fix="give a positive number of seconds, for example 10",
            )
        if self.memory_mib < _LEAST_MIB:
            raise ConfigError(
                f"--chat-template-mib {self.memory_mib} is less than Python itself needs.",
                rule=f"the process that renders gets at least {_LEAST_MIB} MiB",
                flags=["--chat-template-mib"],
                fix="--chat-template-mib 1024",
            )


_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""Roles of conversations that spell their messages {"from": ..., "value": ...}."""


class ChatTemplate:
    """A Jinja template that writes a conversation; picklable, for any thread.

    A child process renders it. A process that was forked, or that unpickles the template, starts a
    child of its own.

    Args:
        source: the template.
        special_tokens: values of bos_token, eos_token and so on in the template.
        origin: the file of the template, for messages.
    Raises:
        DataError: the template is no valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        origin: str = "the chat template",
        limits: TemplateLimits | None = None,
    ) -> None:
        self.source, self.origin = source, origin
        self._limits = limits or TemplateLimits()
        self._first_request = {
            "source": source,
            "special_tokens": dict(special_tokens),
            "seconds": self._limits.seconds,
            "memory_bytes": self._limits.memory_mib * 2**20,
        }
        self._forget_child()
        answer = self._answer(None)
        if problem := answer.get("refused") or answer.get("over"):
            raise DataError(
                f"{origin} {'is not valid' if 'refused' in answer else 'cannot be compiled'}: "
                f"{problem}.",
                rule="expressions of constants are computed when a template is compiled",
                flags=["--chat-template", "--tokenizer-model"],
                fix="give a Jinja template as in a model's tokenizer_config.json",
            )

    def __getstate__(self) -> dict[str, Any]:
        names = ("source", "origin", "_limits", "_first_request")
        return {name: self.__dict__[name] for name in names}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_child()

    def render(self, messages: Sequence[Mapping[str, object]], *, to_be_answered: bool) -> str:
        """Write messages; `to_be_answered` adds the beginning of an answer.

        Raises:
            BadDocumentError: the template refuses them, or takes more than its limits.
        """
        request = {"messages": messages, "to_be_answered": to_be_answered}
        text: str = self._checked_answer(request)["text"]
        return text

    def segments(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None
    ) -> list[str]:
        """Cut a conversation into given and learned text, in turn.

        An answer begins where the prompt for it ends and extends to the end of its message, so a
        model learns to end it. Each segment is tokenized by itself, as in inference: the prompt is
        text, the answer is generated after it.

        Args:
            messages: each with a role; parts of text are joined if the template takes only text.
            tools: JSON schemas of the functions that the model may call.
        Returns:
            texts that together are the rendered conversation; every second one is learned.
        Raises:
            BadDocumentError: the template writes an answer otherwise once others follow it, leaves
                out a text, tools or calls of tools, or writes a value that is not text.
        """
        request = {"messages": messages, "tools": tools, "segments": True}
        segments: list[str] = self._checked_answer(request)["segments"]
        return segments

    def __call__(self, document: Mapping[str, Any], keys: Sequence[str]) -> Texts:
        """Return the segments of the conversation under each key; see `documents.documents_of`."""
        found = {}
        for key in keys:
            messages, tools = messages_of(document, key), document.get("tools")
            for number, message in enumerate(messages, 1):
                content = message.get("content")
                for part in content if isinstance(content, list) else ():
                    if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                        detail = f"message {number}: {shown(part)}"
                        raise BadDocumentError("a part of a content is no text", detail)
            if not isinstance(tools, (list, type(None))):
                raise BadDocumentError("'tools' is no list", f"found {type(tools).__name__}")
            found[key] = self.segments(messages, tools)
            for segment in found[key]:
                check_unicode(segment)
        return found

    # --- the child process ------------------------------------------------------------------

    def _forget_child(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._end_child: Callable[[], object] = lambda: None
        self._lock, self._owner = threading.Lock(), os.getpid()

    def _checked_answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._answer(request)
        if "refused" in answer:
            raise BadDocumentError("refused by the chat template", answer["refused"])
        if "over" in answer:
            detail = f"{self.origin}: {answer['over']}"
            raise BadDocumentError("over the limits of the chat template", detail)
        return answer

    def _answer(self, request: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the child's answer to a request; None only compiles the template."""
        if self._owner != os.getpid():
            self._forget_child()
        with self._lock:
            if self._child is None or self._child.poll() is not None:
                require("jinja2", purpose="chat templates")
                self._end_child()
                self._child = subprocess.Popen(
                    [sys.executable, str(_SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
                self._end_child = weakref.finalize(self, _end, self._child, self._owner)
                if answer := self._exchange(self._child, self._first_request):
                    self._drop_child()
                    return answer
            return {} if request is None else self._exchange(self._child, request)

    def _exchange(
        self, child: subprocess.Popen[bytes], request: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a request and return the answer; drop a child that ended."""
        assert child.stdin is not None and child.stdout is not None
        try:
            # A parquet column may hold values besides JSON's types; a date becomes its text.
            line = json.dumps(request, default=str).encode() + b"\n"
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(line)
                child.stdin.flush()
            answered = child.stdout.readline()
            status = None if answered.endswith(b"\n") else child.wait()
        except BaseException:
            self._drop_child()
            raise
        over = f"it takes more than {self._limits.memory_mib} MiB of memory allow"
        over += " (--chat-template-mib)"
        if status is not None:
            self._drop_child()
            if status == -signal.SIGPROF:
                seconds = f"{self._limits.seconds:g} s of processor time (--chat-template-seconds)"
                return {"over": f"it took more than {seconds}"}
            ended = f"signal {-status}" if status < 0 else f"status {status}"
            return {"over": f"the process that renders ended with {ended}: {over}"}
        answer: dict[str, Any] = json.loads(answered)
        return {"over": over} if "over" in answer else answer

    def _drop_child(self) -> None:
        self._end_child()
        self._child = None


def _end(child: subprocess.Popen[bytes], owner: int) -> None:
    """End the child; a fork of its owner only closes its own copies of the pipes."""
    if os.getpid() == owner:
        child.kill()
        child.wait()
    else:
        child.returncode = 0
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent data of a broken pipe
                pipe.close()


def messages_of(document: Mapping[str, object], key: str) -> list[dict[str, Any]]:
    """Return the messages of one conversation, each with a role and its content.

    Raises:
        BadDocumentError: missing, empty, or not of that form.
    """
    if key not in document:
        raise BadDocumentError(f"no key {key!r}", f"keys are {sorted(document)[:8]}")
    value = document[key]
    if not isinstance(value, list) or not value:
        raise BadDocumentError(
            f"{key!r} is not a list of messages", f"found {type(value).__name__}"
        )
    messages = []
    for number, message in enumerate(value, 1):
        if isinstance(message, dict) and "from" in message and "value" in message:
            role = _ROLES.get(message["from"], message["from"])
            message = {"role": role, "content": message["value"]}
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadDocumentError(f"{key!r} is not a list of messages", f"message {number}")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise BadDocumentError(f"{key!r} is not a list of messages", f"message {number}")
        messages.append(message)
    return messages


def find_chat_template(
    path: str | None, tokenizer_model: str | None, limits: TemplateLimits | None = None
) -> ChatTemplate:
    """Load the template of --chat-template, or the template of the tokenizer.

    Raises:
        ConfigError: there is none.
    """
    source, tokens = None, {}
    folder = tokenizer_model or ""
    if folder and not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    config = os.path.join(folder, "tokenizer_config.json")
    if folder and os.path.isfile(config):
        settings = read_json(config, dict, "--tokenizer-model")
        source = _default_template(settings.get("chat_template"))
        for name, value in settings.items():
            text = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    beside = os.path.join(folder, "chat_template.jinja")
    file_name = path or (beside if folder and os.path.isfile(beside) else None)
    if file_name is not None:
        if not os.path.isfile(file_name):
            raise ConfigError(f"{file_name}: no such file.", flags=["--chat-template"])
        with open(file_name, encoding="utf-8") as file:
            source = file.read()
    if source is None:
        raise ConfigError(
            "no chat template.",
            rule="--sft writes conversations through the template of the model",
            flags=["--sft", "--chat-template", "--tokenizer-model"],
            fix="give a Jinja file: --chat-template chat_template.jinja",
        )
    return ChatTemplate(source, tokens, origin=file_name or config, limits=limits)


def _default_template(found: Any) -> str | None:
    """Return the template of a tokenizer_config.json: one, or several by name."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
