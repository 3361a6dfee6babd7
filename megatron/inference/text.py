"""From tokens to text while they come, and until a stop word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.tokenizers.base import TextTokenizer
from megatron.inference.engine import Engine, Request, Token, not_finite

CONTEXT_TOKENS = 6
"""Tokens before a piece that are decoded with it: what a token looks like depends on them."""


class TextStream:
    """The text of one continuation, piece by piece.

    Pieces end at whole characters, and nothing is given out that may turn out to begin a stop
    word.

    Args:
        tokenizer: has `detokenize`.
        prompt: tokens before the continuation.
        stop: words that end the text; they are not part of it.
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
        """Take a token; return what can be shown now. Sets `stopped` at a stop word."""
        self._tokens.append(token)
        return self._show(self._new_text(is_last=False), is_last=False)

    def finish(self) -> str:
        """Return what was held back."""
        return "" if self.stopped else self._show(self._new_text(is_last=True), is_last=True)

    def _new_text(self, is_last: bool) -> str:
        known = self._tokenizer.detokenize(self._tokens[self._begin : self._read])
        text = self._tokenizer.detokenize(self._tokens[self._begin :])
        # A character of several tokens shows as a replacement until its last one has come.
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
    """Return the length of the longest end of `text` that begins `word`, shorter than it."""
    longest = min(len(text), len(word) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0)


@dataclass
class Continuation:
    """What a model wrote after a prompt."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    """Without the token that ended it."""
    finish_reason: str = "length"
    """"stop" at a stop word or stop token, "length" at the limit."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per token, if asked for: (id, log-probability) of it and of the best ones."""


def continue_texts(
    engine: Engine, requests: Sequence[Request], tokenizer: TextTokenizer, stop: Sequence[str] = ()
) -> list[Continuation]:
    """Continue all requests; every rank makes the same call and gets all results.

    Raises:
        ConfigError: a request does not fit; nothing was run.
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
