"""Turn tokens into text as the model chooses them, until a stop word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.tokenizers.base import TextTokenizer
from megatron.inference.engine import Engine, Request, Token, not_finite

CONTEXT_TOKENS = 6
"""A token is decoded together with this many preceding tokens, because its text depends on them."""


class TextStream:
    """The text of one continuation, in pieces.

    A piece ends at a whole character. Text that may be the beginning of a stop word is held back.

    Args:
        prompt: tokens before the continuation.
        stop: words that end the text and are not part of it.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-CONTEXT_TOKENS:])
        self._begin, self._read = 0, len(self._tokens)
        self._stop = [word for word in stop if word]
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; return the text that can be shown now. A stop word sets `stopped`."""
        self._tokens.append(token)
        return self._show(self._new_text(is_last=False), is_last=False)

    def finish(self) -> str:
        """Return the text that was held back."""
        return "" if self.stopped else self._show(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool) -> str:
        known = self._tokenizer.detokenize(self._tokens[self._begin : self._read])
        text = self._tokenizer.detokenize(self._tokens[self._begin :])
        # An incomplete character of several tokens decodes to the replacement character.
        if not is_last and (text.endswith("\ufffd") or len(text) <= len(known)):
            return ""
        self._begin, self._read = self._read, len(self._tokens)
        return text[len(known) :]

    def _show(self, new: str, is_last: bool) -> str:
        text = self._held + new
        found = [at for word in self._stop if (at := text.find(word)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if is_last else max((_overlap(text, word) for word in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, word: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `word`."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


@dataclass
class Continuation:
    """The continuation of a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Without the stop token."""
    finish_reason: str = "length"
    """"stop" at a stop word or stop token, "length" at the limit."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Of each token, if requested: (id, log-probability) of it and of the most likely tokens."""


def continue_texts(
    engine: Engine, requests: Sequence[Request], tokenizer: TextTokenizer, stop: Sequence[str] = ()
) -> list[Continuation]:
    """Continue all requests; every rank makes the same call and returns all results.

    Raises:
        ConfigError: a request is invalid; nothing was run.
        NumericsError: the model's logits are not finite.
    """
    for request in requests:
        problem = engine.check(request)
        if problem is not None:
            raise problem
    found = [Continuation() for _ in requests]
    work = {
        engine.add(request): (TextStream(tokenizer, request.tokens, stop), result)
        for request, result in zip(requests, found, strict=True)
    }
    while not engine.is_idle:
        for token in engine.step():
            if token.finish_reason == "error":
                raise not_finite()
            stream, result = work[token.request]
            take(token, stream, result)
            if stream.stopped and token.finish_reason is None:
                engine.cancel(token.request)
    return found


def take(token: Token, stream: TextStream, result: Continuation) -> str:
    """Add a token to a continuation; return the text that can be shown now."""
    if token.finish_reason == "stop":
        piece = stream.finish()
    else:
        result.tokens.append(token.token)
        if token.logprobs is not None:
            result.logprobs.append(token.logprobs)
        piece = stream.push(token.token)
        if token.finish_reason is not None and not stream.stopped:
            piece += stream.finish()
    if token.finish_reason is not None or stream.stopped:
        is_stop = stream.stopped or token.finish_reason == "stop"
        result.finish_reason = "stop" if is_stop else "length"
    result.text += piece
    return piece
