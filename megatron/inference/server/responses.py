"""Answers in OpenAI's form: whole, or in chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from megatron.core.tokenizers.base import TextTokenizer
from megatron.inference.server.protocol import TextRequest
from megatron.inference.text import Continuation

Logprobs = list[tuple[int, float]]


class Response:
    """How one request is answered.

    Args:
        tokenizer: has `detokenize`, for the texts of single tokens.
        num_prompt_tokens: of all prompts.
    """

    def __init__(
        self, request: TextRequest, model: str, tokenizer: TextTokenizer, num_prompt_tokens: int
    ) -> None:
        self.request, self.tokenizer = request, tokenizer
        self.num_prompt_tokens = num_prompt_tokens
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._offsets: dict[int, int] = {}
        self._common = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }

    def full(self, found: Sequence[Continuation], prefixes: Sequence[str]) -> dict[str, Any]:
        """Return the answer to a request that does not stream.

        Args:
            prefixes: what is before each text (an echoed prompt).
        """
        choices = []
        for index, (one, prefix) in enumerate(zip(found, prefixes, strict=True)):
            choice: dict[str, Any] = {"index": index, "finish_reason": one.finish_reason}
            choice["logprobs"] = self._logprobs(index, one.logprobs)
            if self.request.is_chat:
                choice["message"] = {"role": "assistant", "content": one.text}
            else:
                choice["text"] = prefix + one.text
            choices.append(choice)
        kind = "chat.completion" if self.request.is_chat else "text_completion"
        num_new = sum(len(one.tokens) for one in found)
        return {**self._common, "object": kind, "choices": choices, "usage": self.usage(num_new)}

    def chunk(
        self,
        index: int,
        text: str,
        logprobs: Sequence[Logprobs],
        finish_reason: str | None,
        is_first: bool,
    ) -> dict[str, Any]:
        """Return a piece of the stream of one continuation."""
        choice: dict[str, Any] = {"index": index, "finish_reason": finish_reason}
        choice["logprobs"] = self._logprobs(index, logprobs)
        if self.request.is_chat:
            choice["delta"] = {"role": "assistant"} if is_first else {}
            if text or is_first:
                choice["delta"]["content"] = text
        else:
            choice["text"] = text
        return {**self._common, "object": self._kind_of_chunk(), "choices": [choice]}

    def usage_chunk(self, num_new: int) -> dict[str, Any]:
        """Return the last piece of a stream whose client wants the counts."""
        kind = self._kind_of_chunk()
        return {**self._common, "object": kind, "choices": [], "usage": self.usage(num_new)}

    def usage(self, num_new: int) -> dict[str, int]:
        """Return the counts of tokens."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.num_prompt_tokens + num_new,
        }

    def _kind_of_chunk(self) -> str:
        return "chat.completion.chunk" if self.request.is_chat else "text_completion"

    def _logprobs(self, index: int, logprobs: Sequence[Logprobs]) -> dict[str, Any] | None:
        if self.request.num_top_logprobs is None:
            return None
        if self.request.is_chat:
            return {"content": [self._entry(step) for step in logprobs]}
        tokens = [self._text(step[0][0]) for step in logprobs]
        # A stream continues where its last piece ended.
        *offsets, self._offsets[index] = accumulate(
            map(len, tokens), initial=self._offsets.get(index, 0)
        )
        return {
            "tokens": tokens,
            "token_logprobs": [step[0][1] for step in logprobs],
            "top_logprobs": [{self._text(t): value for t, value in step[1:]} for step in logprobs],
            "text_offset": offsets,
        }

    def _entry(self, step: Logprobs) -> dict[str, Any]:
        entries = []
        for token, value in step:
            text = self._text(token)
            entries.append({"token": text, "logprob": value, "bytes": list(text.encode())})
        return {**entries[0], "top_logprobs": entries[1:]}

    def _text(self, token: int) -> str:
        return self.tokenizer.detokenize([token])
