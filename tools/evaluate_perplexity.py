"""Perplexity of a trained model on a corpus or a text, in any layout.

    torchrun --nproc-per-node 4 tools/evaluate_perplexity.py --load checkpoints \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --corpus held-out_text_document --window 1024 --stride 512

The tokens are split into windows. Each token except the first is predicted once, from the tokens
before it in its window: at least window - stride tokens, except at the beginning. A smaller stride
gives more context and costs more. The result is equal in every layout, up to the rounding of sums.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.foundation.errors import ConfigError, DataError
from megatron.inference.evaluation import Row, score
from megatron.inference.session import ModelSession, open_session
from megatron.resilience.failure import failures_reported
from megatron.resilience.status import RunStatus
from megatron.training.launch.printing import is_rank_0
from megatron.training.setup.distributed import shut_down
from pretrain_gpt import model_provider

AT_A_TIME = 64
"""Micro batches per rank between two reports of progress."""


@dataclass(frozen=True, kw_only=True)
class PerplexityFlags:
    """Perplexity."""

    corpus: str | None = None
    """Path of a .bin/.idx pair, without the suffix."""
    text: Path | None = None
    """A text file, tokenized as one document."""
    window: int | None = None
    """Tokens per window; --seq-length by default."""
    stride: int | None = None
    """Tokens between windows; by default the window."""
    max_tokens: int | None = None
    """Number of tokens of the corpus to evaluate, from its beginning."""


def tokens_of(session: ModelSession[PerplexityFlags]) -> tuple[list[int], int | None]:
    """Return the tokens, and the number of bytes of their text if it is known."""
    options = session.options
    if (options.corpus is None) == (options.text is None):
        raise ConfigError(
            f"--corpus and --text: {'both' if options.corpus else 'neither'} given.",
            rule="the perplexity of either a corpus of tokens or a text is computed",
            flags=["--corpus", "--text"],
            fix="give one of the two",
        )
    if options.text is not None:
        try:
            text = options.text.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"{options.text} cannot be read: {error}.",
                rule="a text is a UTF-8 file",
                flags=["--text"],
                fix="name a text file",
            ) from error
        tokens = session.tokenizer.tokenize(text)
        is_all = options.max_tokens is None or options.max_tokens >= len(tokens)
        return tokens[: options.max_tokens], len(text.encode()) if is_all else None
    corpus = IndexedDataset(options.corpus)
    tokens = []
    for number in range(len(corpus)):
        tokens += corpus[number].tolist()
        if options.max_tokens is not None and len(tokens) >= options.max_tokens:
            return tokens[: options.max_tokens], None
    return tokens, None


def windows(num_tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield (begin, end, first scored token in the window); every token but the first once."""
    scored = 1
    for begin in range(0, num_tokens, stride):
        end = min(begin + window, num_tokens)
        if end <= scored:
            return
        # The next window also predicts the token at its start, so it begins one token earlier.
        yield begin, end, scored - begin
        scored = end


def check_windows(window: int, stride: int, longest: int) -> None:
    """Raise unless windows overlap by at least one token and fit the model.

    Raises:
        ConfigError: otherwise.
    """
    if not 1 <= stride < window <= longest + 1:
        raise ConfigError(
            f"windows of {window} tokens every {stride}.",
            rule="a window begins inside the previous window, so that every token is predicted; "
            f"the model has {longest} positions, and the last token of a window needs none",
            flags=["--window", "--stride"],
            fix=f"use --window {longest + 1} --stride {max(longest // 2, 1)}",
        )


def main() -> None:
    """Load the model, score the tokens, print the result."""
    status = RunStatus.of_this_process()
    with failures_reported(status):
        session = open_session(model_provider, PerplexityFlags)
        options = session.options
        window = options.window or session.run.model.seq_length + 1
        stride = options.stride or window - 1
        check_windows(window, stride, session.max_sequence_length)
        tokens, num_bytes = tokens_of(session)
        rows = [
            Row(tokens[begin:end], first)
            for begin, end, first in windows(len(tokens), window, stride)
        ]
        if not rows:
            raise DataError(
                f"{len(tokens)} tokens are too few.",
                rule="the first token has no context, so it is not predicted",
                flags=["--corpus", "--text"],
                fix="give at least two tokens",
            )
        batch_size = session.run.schedule.micro_batch_size
        total, count = 0.0, 0
        chunk = AT_A_TIME * batch_size
        for begin in range(0, len(rows), chunk):
            for found in score(
                session.model,
                rows[begin : begin + chunk],
                vocab_size=session.vocab_size,
                batch_size=batch_size,
                groups=session.groups,
            ):
                total -= math.fsum(found.logprobs)
                count += len(found.logprobs)
            if is_rank_0() and begin + chunk < len(rows):
                print(f" {count} tokens, perplexity {math.exp(total / count):.4f}", flush=True)
        if is_rank_0():
            report = {"tokens": count, "loss": total / count}
            report["perplexity"] = math.exp(total / count)
            if num_bytes:
                report["bits_per_byte"] = total / math.log(2) / num_bytes
            print(json.dumps(report), flush=True)
        shut_down()


if __name__ == "__main__":
    main()
