"""Conversations as text: a chat template cut into what is given and what is to be learned.

Templates are those of Hugging Face models (Jinja), rendered in a sandbox and in a process of their
own (`_template_sandbox.py`). No torch import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.datasets.preprocessing.documents import (
    BadDocumentError,
    Texts,
    check_unicode,
)
from megatron.core.datasets.preprocessing.template_process import (
    RenderingLimitError,
    RenderingRefusedError,
    TemplateLimits,
    TemplateProcess,
)
from megatron.core.foundation.errors import ConfigError, DataError, shown
from megatron.core.foundation.json_text import parse_json

_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "tool": "tool"}
"""Roles of conversations that spell their messages {"from": ..., "value": ...}."""


class ChatTemplate:
    """A Jinja template that writes a conversation; picklable, for any thread.

    It is rendered in a process of its own, within `limits`.

    Args:
        source: the template.
        special_tokens: what it may call bos_token, eos_token and so on.
        origin: the file that it is from, for messages.
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
        self._process = TemplateProcess(source, special_tokens, limits or TemplateLimits())
        try:
            self._process.ask()
        except RenderingRefusedError as error:
            raise DataError(
                f"{origin} is not valid: {error}.",
                flags=["--chat-template", "--tokenizer-model"],
                fix="give a Jinja template as in a model's tokenizer_config.json",
            ) from error
        except RenderingLimitError as error:
            raise DataError(
                f"{origin} cannot be compiled: {error}.",
                rule="expressions of constants are computed when a template is compiled",
                flags=["--chat-template", "--tokenizer-model"],
                fix="use a template without such an expression, or raise the limit",
            ) from error

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._process.ask(request)
        except RenderingRefusedError as error:
            raise BadDocumentError("refused by the chat template", str(error)) from None
        except RenderingLimitError as error:
            reason = "over the limits of the chat template"
            raise BadDocumentError(reason, f"{self.origin}: {error}") from None

    def render(self, messages: Sequence[Mapping[str, object]], *, to_be_answered: bool) -> str:
        """Write messages; `to_be_answered` adds what is before an answer.

        Raises:
            BadDocumentError: the template refuses them, or takes more than its limits.
        """
        answer = self._ask({"messages": messages, "to_be_answered": to_be_answered})
        text: str = answer["text"]
        return text

    def segments(
        self, messages: Sequence[Mapping[str, object]], tools: Sequence[object] | None = None
    ) -> list[str]:
        """Cut a conversation into what is given and what is learned, in turn.

        An answer begins where the prompt for it ends and goes to the end of its message, so a
        model learns to end it. Each segment is tokenized by itself, as it is when the model is
        used: the prompt is text, the answer is generated after it.

        Args:
            messages: each with a role; parts of text are joined where the template takes text only.
            tools: what the model may call, by JSON schemas.
        Returns:
            texts that together are the rendered conversation; those at odd places are learned.
        Raises:
            BadDocumentError: the template writes an answer otherwise once others follow it, leaves
                out a text, tools or calls of tools, or writes a value that is no text.
        """
        request = {"messages": messages, "tools": tools, "segments": True}
        segments: list[str] = self._ask(request)["segments"]
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
            segments = self.segments(messages, tools)
            for segment in segments:
                check_unicode(segment)
            found[key] = segments
        return found


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


def find_chat_template(
    path: str | None, tokenizer_model: str | None, limits: TemplateLimits | None = None
) -> ChatTemplate:
    """Load the template of --chat-template, or the one that comes with the tokenizer.

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
    return ChatTemplate(source, tokens, origin=file_name or config, limits=limits)


def _default_template(found: Any) -> str | None:
    """Return the template of a tokenizer_config.json: one, or several by name."""
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found}
        found = named.get("default")
    return found if isinstance(found, str) else None
