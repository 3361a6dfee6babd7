"""Bodies of requests: read with limits, checked field by field.

The interface is OpenAI's. What would change the answer and cannot be done is refused, so that no
client gets something else than it asked for.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.foundation.errors import MegatronError
from megatron.inference.sampling import Sampling
from megatron.inference.server.limits import Limits

_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[{]|[\]}]', re.DOTALL)
_IGNORED = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "parallel_tool_calls",
}  # fmt: skip
"""Fields that change no token."""


class BadRequest(Exception):
    """An answer with an error instead of a continuation."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict[str, Any]:
        """Return OpenAI's form of an error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True, kw_only=True)
class TextRequest:
    """What was asked for."""

    is_chat: bool
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or tokens; for a chat empty."""
    messages: tuple[dict[str, str], ...] = ()
    max_new_tokens: int | None
    """None: as many as fit."""
    sampling: Sampling
    count: int
    stop: tuple[str, ...]
    num_top_logprobs: int | None
    streams: bool
    includes_usage: bool
    echoes: bool = False


def parse_json(body: bytes, limits: Limits) -> dict[str, Any]:
    """Return the JSON object in a body.

    Raises:
        BadRequest: it is none, or nested too deeply.
    """
    if body.count(b"[") + body.count(b"{") > limits.json_depth:
        _check_depth(body, limits.json_depth)
    try:
        found = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest("the body is not a JSON object")
    return found


def _check_depth(body: bytes, most: int) -> None:
    depth = 0
    for mark in _MARKS.finditer(body):
        first = body[mark.start()]
        if first in b"[{":
            depth += 1
            if depth > most:
                raise BadRequest(f"the JSON is nested deeper than {most} levels")
        elif first in b"]}":
            depth -= 1


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


class _Fields:
    """The fields of a body: each is taken once, and none may be left."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = {name: value for name, value in body.items() if name not in _IGNORED}

    def take(self, name: str) -> Any:
        return self._left.pop(name, None)

    def number(self, name: str, default: float, lowest: float, highest: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise BadRequest(f"{name} is not a number", param=name)
        if not lowest <= value <= highest:
            raise BadRequest(f"{name} is not between {lowest:g} and {highest:g}", param=name)
        return float(value)

    def integer(self, name: str, default: int | None, lowest: int, highest: int) -> int | None:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadRequest(f"{name} is not an integer", param=name)
        if not lowest <= value <= highest:
            raise BadRequest(f"{name} is not between {lowest} and {highest}", param=name)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise BadRequest(f"{name} is not true or false", param=name)
        return bool(value)

    def refuse(self, name: str, *harmless: Any) -> None:
        """Take a field that only these values leave without effect."""
        value = self.take(name)
        if value is not None and not any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
        ):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")

    def end(self) -> None:
        if self._left:
            name = min(self._left)
            raise BadRequest(f"unknown field {name[:80]!r}", param=name[:80])


def read_request(
    body: dict[str, object], *, is_chat: bool, model: str, limits: Limits
) -> TextRequest:
    """Return what a body asks for.

    Raises:
        BadRequest: with the field that is wrong.
    """
    fields = _Fields(body)
    named = fields.take("model")
    if named != model:
        if not isinstance(named, str):
            raise BadRequest("model is not a string", param="model")
        message = f"there is no model {named[:80]!r}; this server has {model!r}"
        raise BadRequest(message, param="model", status=404, code="model_not_found")
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, str], ...] = ()
    if is_chat:
        messages = _messages(fields.take("messages"))
        most = fields.integer("max_tokens", None, 1, 1 << 31)
        most = fields.integer("max_completion_tokens", most, 1, 1 << 31)
        wants = fields.flag("logprobs")
        best = fields.integer("top_logprobs", 0, 0, limits.log_probs)
        num_top_logprobs = best if wants else None
        for name in ("tools", "functions"):
            fields.refuse(name, [])
        fields.refuse("tool_choice", "none", "auto")
        fields.refuse("response_format", {"type": "text"})
    else:
        prompts = _prompts(fields.take("prompt"))
        most = fields.integer("max_tokens", 16, 1, 1 << 31)
        num_top_logprobs = fields.integer("logprobs", None, 0, limits.log_probs)
        fields.refuse("suffix", "")
    echoes = not is_chat and fields.flag("echo")
    if echoes and num_top_logprobs is not None:
        raise BadRequest("log-probabilities of an echoed prompt are not supported", param="echo")
    count = fields.integer("n", 1, 1, limits.sequences)
    assert count is not None
    fields.refuse("best_of", count)
    if count * max(len(prompts), 1) > limits.sequences:
        raise BadRequest(f"more than {limits.sequences} continuations in one request", param="n")
    for name in ("presence_penalty", "frequency_penalty"):
        fields.refuse(name, 0, 0.0)
    fields.refuse("logit_bias", {})
    streams = fields.flag("stream")
    request = TextRequest(
        is_chat=is_chat,
        prompts=prompts,
        messages=messages,
        max_new_tokens=most,
        sampling=_sampling(fields),
        count=count,
        stop=_stop(fields.take("stop"), limits),
        num_top_logprobs=num_top_logprobs,
        streams=streams,
        includes_usage=_includes_usage(fields.take("stream_options"), streams),
        echoes=echoes,
    )
    fields.end()
    return request


def _sampling(fields: _Fields) -> Sampling:
    temperature = fields.number("temperature", 1.0, 0.0, 2.0)
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    top_k = fields.integer("top_k", 0, 0, 1 << 31)
    seed = fields.integer("seed", None, -(1 << 63), (1 << 63) - 1)
    assert top_k is not None
    try:
        return Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p or 1e-9,  # 0 is allowed there, and takes the most likely token
            seed=secrets.randbits(62) if seed is None else seed,
        )
    except MegatronError as error:
        raise BadRequest(error.found) from None


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{name} is not text", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{name} holds half of a surrogate pair", param=name) from None
    return value


def _list_of(value: Any, is_one: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(is_one, value))


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _prompts(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (_text(value, "prompt"),)
    if _list_of(value, _is_token):
        return (tuple(value),)
    if _list_of(value, lambda one: isinstance(one, str)):
        return tuple(_text(one, "prompt") for one in value)
    if _list_of(value, lambda one: _list_of(one, _is_token)):
        return tuple(tuple(one) for one in value)
    raise BadRequest("prompt is not a text, a list of texts, or one or more lists of token ids",
                     param="prompt")  # fmt: skip


def _messages(value: Any) -> tuple[dict[str, str], ...]:
    if not _list_of(value, lambda one: isinstance(one, dict)):
        raise BadRequest("messages is not a list of messages", param="messages")
    return tuple(_message(one) for one in value)


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    unknown = sorted(set(message) - {"role", "content", "name"})
    if unknown:
        raise BadRequest(f"a message has the field {unknown[0][:80]!r}", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part(one) for one in content)
    return {"role": _text(message.get("role"), "messages"), "content": _text(content, "messages")}


def _part(part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise BadRequest("a part of a message is not text", param="messages")
    return _text(part.get("text"), "messages")


def _stop(value: Any, limits: Limits) -> tuple[str, ...]:
    words: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
    if len(words) > limits.stop_words:
        raise BadRequest(f"more than {limits.stop_words} stop words", param="stop")
    found = tuple(_text(word, "stop") for word in words)
    if any(not 0 < len(word) <= limits.stop_characters for word in found):
        message = f"a stop word has 1 to {limits.stop_characters} characters"
        raise BadRequest(message, param="stop")
    return found


def _includes_usage(value: Any, streams: bool) -> bool:
    if value is None:
        return False
    if not streams or not isinstance(value, dict) or set(value) - {"include_usage"}:
        raise BadRequest("stream_options goes with stream and has include_usage",
                         param="stream_options")  # fmt: skip
    return value.get("include_usage") is True
