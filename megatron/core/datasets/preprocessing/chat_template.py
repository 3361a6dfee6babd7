"""Conversations as text: a chat template cut into what is given and what is to be learned.

Templates are those of Hugging Face models (Jinja), rendered in a sandbox. No torch import.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from megatron.core.capabilities import require
from megatron.core.datasets.preprocessing.documents import (
    BadDocumentError,
    Texts,
    check_unicode,
)
from megatron.core.errors import ConfigError, DataError
from megatron.core.json_text import parse_json

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""Roles of conversations that spell their messages {"from": ..., "value": ...}."""


class ChatTemplate:
    """A Jinja template that writes a conversation; picklable, compiled on first use.

    Args:
        source: the template.
        special_tokens: what it may call bos_token, eos_token and so on.
    Raises:
        DataError: the template is no valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self.special_tokens = dict(special_tokens)
        self._template: Any = None
        self._compiled()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_template": None}

    def _compiled(self) -> Any:
        if self._template is None:
            jinja = require("jinja2", purpose="--sft")
            environment = _sandbox()(
                trim_blocks=True,
                lstrip_blocks=True,
                extensions=["jinja2.ext.loopcontrols", _generation_extension()],
            )
            environment.filters["tojson"] = _to_json
            environment.globals["raise_exception"] = _raise_exception()
            # A template that writes today's date would give other bytes tomorrow.
            environment.globals["strftime_now"] = datetime.date(2024, 7, 26).strftime
            try:
                self._template = environment.from_string(self.source)
            except jinja.TemplateSyntaxError as error:
                raise DataError(
                    f"the chat template is not valid at line {error.lineno}: {error.message}.",
                    flags=["--chat-template", "--tokenizer-model"],
                    fix="give a Jinja template as in a model's tokenizer_config.json",
                ) from error
        return self._template

    def render(self, messages: Sequence[Mapping[str, Any]], *, to_be_answered: bool) -> str:
        """Write messages; `to_be_answered` adds what stands before an answer.

        Raises:
            BadDocumentError: the template refuses them.
        """
        try:
            text: str = self._compiled().render(
                messages=messages, add_generation_prompt=to_be_answered, **self.special_tokens
            )
        except Exception as error:  # Jinja's own and whatever an expression raises
            raise BadDocumentError("refused by the chat template", str(error)) from None
        return text

    def segments(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Cut a conversation into what is given and what is learned, in turn.

        An answer begins where the prompt for it ends and goes to the end of its message, so a
        model learns to end it. Each segment is tokenized by itself, as it is when the model is
        used: the prompt is text, the answer is generated after it.

        Returns:
            texts that together are the rendered conversation; those at odd places are learned.
        Raises:
            BadDocumentError: the template writes an answer otherwise once others follow it.
        """
        whole = self.render(messages, to_be_answered=False)
        segments, position = [], 0
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.render(messages[:at], to_be_answered=True)
            until = self.render(messages[: at + 1], to_be_answered=False)
            is_prefix = until.startswith(before) and whole.startswith(until)
            if not is_prefix or len(before) < position:
                raise BadDocumentError(
                    "refused by the chat template",
                    f"message {at + 1} is written otherwise when others follow it",
                )
            segments += [whole[position : len(before)], whole[len(before) : len(until)]]
            position = len(until)
        return [*segments, whole[position:]]

    def __call__(self, document: Mapping[str, Any], keys: Sequence[str]) -> Texts:
        """Return the segments of the conversation under each key; see `documents.documents_of`."""
        found = {}
        for key in keys:
            segments = self.segments(messages_of(document, key))
            for segment in segments:
                check_unicode(segment)
            found[key] = segments
        return found


def messages_of(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
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


def _settings_in(path: str, text: str) -> dict[str, Any]:
    try:
        settings = parse_json(text)
        if not isinstance(settings, dict):
            raise ValueError(f"it holds a {type(settings).__name__}")
    except ValueError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.",
            rule="it is a JSON object",
            flags=["--tokenizer-model"],
            fix="copy the file again",
        ) from None
    return settings


def find_chat_template(path: str | None, tokenizer_model: str | None) -> ChatTemplate:
    """Load the template of --chat-template, or the one that lies with the tokenizer.

    Raises:
        ConfigError: there is none.
    """
    source, tokens = None, {}
    folder = tokenizer_model or ""
    if folder and not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    config = os.path.join(folder, "tokenizer_config.json")
    if folder and os.path.isfile(config):
        with open(config, encoding="utf-8") as file:
            settings = _settings_in(config, file.read())
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
    return ChatTemplate(source, tokens)


def _default_template(found: Any) -> str | None:
    """Return the template of a tokenizer_config.json: one, or several by name."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _sandbox() -> type:
    """Return Jinja's sandbox, which also refuses `str.format` in whatever way it was reached.

    A format string reads attributes: `{0.__globals__}` of any Python function shows the module that
    it is from. The sandbox puts its own function in place of the method where a template asks for
    it by name; this holds where another way to the method is found.
    """
    base: Any = require("jinja2.sandbox", purpose="--sft").ImmutableSandboxedEnvironment

    def is_safe_callable(self: Any, obj: Any) -> bool:
        if getattr(obj, "__name__", None) in ("format", "format_map"):
            owner = getattr(obj, "__objclass__", None) or type(getattr(obj, "__self__", None))
            if issubclass(owner, str):
                return False
        return bool(base.is_safe_callable(self, obj))

    return type("Sandbox", (base,), {"is_safe_callable": is_safe_callable})


def _generation_extension() -> type:
    """Return a Jinja extension that lets `{% generation %}` blocks pass as their content."""
    base = require("jinja2.ext", purpose="--sft").Extension

    def parse(self: Any, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return type("Generation", (base,), {"tags": {"generation"}, "parse": parse})


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
