"""Continuous batching: when a sequence ends, a waiting sequence takes its row of the cache.

Every rank runs the same engine on the same requests. All ranks have the same requests and the same
chosen tokens, so they take the same steps without further communication.

Running sequences always use the first rows of the cache: when one ends, the sequence in the last
used row moves to its row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.core.foundation.errors import ConfigError, NumericsError
from megatron.inference.forward import CachedModel
from megatron.inference.sampling import NO_TOKEN, Draw, Sampling

NOT_FINITE = "the model's logits are not finite: its weights are broken, or its precision too low"

PREFILL_TOKENS = 4096
"""Most tokens, padding included, in a pass over more than one prompt. It bounds the memory of the
pass and the time for which running sequences wait."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A sequence to continue."""

    tokens: Sequence[int]
    """At least one."""
    max_new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    sequence: int = 0
    """With the seed, the key of its random draws."""
    stop_tokens: frozenset[int] = frozenset()
    """The sequence ends with any of these."""
    num_top_logprobs: int | None = None
    """List the log-probabilities of the chosen token and of this many most likely tokens; None
    lists no log-probabilities."""


@dataclass(frozen=True)
class Token:
    """The next token of one sequence."""

    request: int
    """The number that `Engine.add` returned."""
    token: int
    finish_reason: str | None
    """"stop" or "length" with the last token; "error" if the logits are not finite, so there is no
    token. A stop token is not part of the text."""
    logprobs: list[tuple[int, float]] | None = None
    """(id, log-probability) of the chosen token, then of the most likely tokens."""


@dataclass
class _Row:
    number: int
    request: Request
    length: int = 0
    """Tokens in the cache."""
    num_new: int = 0
    last: int = 0


class Engine:
    """Continue queued sequences, in batches that change at every step.

    Args:
        model: its cache limits the number of running sequences and their length.
    """

    def __init__(self, model: CachedModel) -> None:
        self.model = model
        self.max_rows = model.context.max_batch_size
        self.max_length = model.context.max_sequence_length
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []
        self._count = 0

    @property
    def is_idle(self) -> bool:
        """Whether a step would do nothing."""
        return not self._waiting and not self._running

    def check(self, request: Request) -> ConfigError | None:
        """Return the error of a request that cannot be run, or None."""
        return check_prompt(
            request.tokens, request.max_new_tokens, self.model.vocab_size, self.max_length
        )

    def add(self, request: Request) -> int:
        """Queue a sequence; return its number.

        Raises:
            ConfigError: see `check`.
        """
        problem = self.check(request)
        if problem is not None:
            raise problem
        self._count += 1
        self._waiting.append(_Row(self._count, request))
        return self._count

    def cancel(self, number: int) -> None:
        """Remove a sequence; do nothing if it has ended."""
        self._waiting = deque(row for row in self._waiting if row.number != number)
        for index, row in enumerate(self._running):
            if row.number == number:
                self._remove(index)
                return

    def step(self) -> list[Token]:
        """Run one pass: the prompts of newly admitted sequences, else one token of every row."""
        admitted = self._admit()
        if admitted:
            first = len(self._running)
            self._running += admitted
            rows: list[Sequence[int]] = [row.request.tokens for row in admitted]
        elif self._running:
            first, admitted = 0, self._running
            rows = [[row.last] for row in admitted]
        else:
            return []
        listed = [n for row in admitted if (n := row.request.num_top_logprobs) is not None]
        chosen, logprobs = self.model.next_tokens(
            rows,
            [
                Draw(row.request.sampling, row.request.sequence, row.length + len(new))
                for row, new in zip(admitted, rows, strict=True)
            ],
            first_row=first,
            offsets=[row.length for row in admitted],
            num_top_logprobs=max(listed) if listed else None,
        )
        tokens, ended = [], []
        for index, (row, token) in enumerate(zip(admitted, chosen, strict=True)):
            row.length += len(rows[index])
            row.num_new += 1
            row.last = token
            reason = None
            if token == NO_TOKEN:
                reason = "error"
            elif token in row.request.stop_tokens:
                reason = "stop"
            elif row.num_new == row.request.max_new_tokens:
                reason = "length"
            wanted = row.request.num_top_logprobs
            mine = (
                logprobs[index][: 1 + wanted]
                if logprobs is not None and wanted is not None
                else None
            )
            tokens.append(Token(row.number, token, reason, mine))
            if reason is not None:
                ended.append(first + index)
        for index in reversed(ended):
            self._remove(index)
        return tokens

    def _admit(self) -> list[_Row]:
        """Take prompts from the queue until rows or `PREFILL_TOKENS` are used up."""
        admitted: list[_Row] = []
        width = 0
        while self._waiting and len(self._running) + len(admitted) < self.max_rows:
            width = max(width, len(self._waiting[0].request.tokens))
            if admitted and width * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            admitted.append(self._waiting.popleft())
        return admitted

    def _remove(self, index: int) -> None:
        last = self._running.pop()
        if index < len(self._running):
            self._running[index] = last
            self.model.context.move_row(len(self._running), index, last.length)


def not_finite() -> NumericsError:
    """Return the error for logits that are not finite; all ranks raise it."""
    return NumericsError(
        f"{NOT_FINITE}.",
        rule="a token is chosen among finite logits",
        flags=["--load", "--load-hf", "--fp16"],
        fix="use another checkpoint; a model that was trained in bf16 is used with --bf16",
    )


def check_prompt(
    tokens: Sequence[int], max_new_tokens: int, vocab_size: int, max_length: int
) -> ConfigError | None:
    """Return why a prompt cannot be continued, or None."""
    if not tokens:
        return ConfigError(
            "a prompt is empty.",
            rule="the model continues at least one token",
            flags=["--prompt"],
            fix="begin with a word, or with the end-of-document token",
        )
    if max_new_tokens < 1 or len(tokens) + max_new_tokens > max_length:
        return ConfigError(
            f"{len(tokens)} prompt tokens and {max_new_tokens} new ones do not fit the model's "
            f"{max_length} positions.",
            rule="prompt and continuation, of one token at least, share the context",
            flags=["--max-new-tokens", "--max-position-embeddings"],
            fix=f"use at most --max-new-tokens {max_length - len(tokens)}"
            if len(tokens) < max_length
            else f"shorten the prompt to {max_length - 1} tokens",
        )
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        return ConfigError(
            f"token id {wrong} is outside the vocabulary of {vocab_size}.",
            rule="texts use the tokenizer the model was trained with",
            flags=["--tokenizer-type", "--tokenizer-model", "--vocab-file"],
            fix="pass the tokenizer flags of the training run",
        )
    return None
