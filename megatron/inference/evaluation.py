"""Score texts, and run EleutherAI's evaluation harness (lm_eval), in any layout.

`score` distributes the sequences over the replicas (dp), which compute log-probabilities with
`megatron.post_training.log_probs`. Every rank runs the harness on the same tasks, so all ranks
compute the same requests together and the harness needs no support for ranks.

Legend: b sequences, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.transport import torch_collectives
from megatron.inference.engine import Engine, Request, check_prompt
from megatron.inference.sampling import Sampling
from megatron.inference.session import ModelSession
from megatron.inference.text import continue_texts
from megatron.post_training.log_probs import compute_log_probs

PURPOSE = "tools/evaluate_harness.py"
DEFAULT_NEW_TOKENS = 256
"""The default of the harness's own models."""
_ACTING = ("until", "do_sample", "temperature", "top_k", "top_p")
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "repetition_penalty": (1,), "num_beams": (1,), "num_return_sequences": (1,), "min_p": (0,),
    "typical_p": (1,), "no_repeat_ngram_size": (0,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "length_penalty": (1,), "early_stopping": (False,),
    "use_cache": (True, False),
}  # fmt: skip
"""Setting -> values that leave the generated text unchanged."""


class Row(NamedTuple):
    """A sequence; its tokens from `first_scored` on are scored, each given all tokens before it."""

    tokens: Sequence[int]
    first_scored: int = 1


class Score(NamedTuple):
    """Each scored token's log-probability (natural), and whether it is the most likely token."""

    logprobs: list[float]
    is_greedy: list[bool]


def score(
    model: nn.Module | Sequence[nn.Module],
    rows: Sequence[Row],
    *,
    vocab_size: int,
    batch_size: int,
    groups: ProcessGroupCollection,
) -> list[Score]:
    """Score sequences; every rank returns all scores.

    Args:
        model: this rank's model chunk, or its list of chunks.
        rows: at least one; the same on every rank. `first_scored` is 1 or more.
        vocab_size: the model's number of classes.
        batch_size: sequences in a micro batch. They are padded to one length, so neighbours should
            have similar lengths.
    Communication:
        see `compute_log_probs`; also all-reduces of 2 x b x s numbers on dp.
    Raises:
        ConfigError: an id is outside the vocabulary; nothing was run.
    """
    for row in rows:
        problem = check_prompt(row.tokens, 1, vocab_size, len(row.tokens) + 1)
        if problem is not None:
            raise problem
    dp_size, dp_rank = groups.dp.size(), groups.dp.rank()
    # A pipeline is full with as many micro batches as stages.
    at_a_time = batch_size * dp_size * groups.pp.size()
    found: list[Score] = []
    for begin in range(0, len(rows), at_a_time):
        part = list(rows[begin : begin + at_a_time])
        width = max(max(len(row.tokens) for row in part) - 1, 1)
        table = torch.zeros(2, at_a_time, width, device=device.current_device())
        firsts = range(dp_rank * batch_size, at_a_time, dp_size * batch_size)
        scored = compute_log_probs(
            model,
            [_batch(part[first : first + batch_size], batch_size, width) for first in firsts],
            num_valid=vocab_size,
            pg_collection=groups,
        )
        for first, one in zip(firsts, scored, strict=True):
            table[0, first : first + batch_size] = one.log_probs
            table[1, first : first + batch_size] = one.is_greedy
        torch_collectives.all_reduce(table, groups.dp)
        for index, row in enumerate(part):
            logprobs, greedy = table[:, index, row.first_scored - 1 : len(row.tokens) - 1].tolist()
            found.append(Score(logprobs, [flag == 1.0 for flag in greedy]))
    return found


def _batch(rows: Sequence[Row], num_rows: int, width: int) -> dict[str, Tensor]:
    """Return tokens and labels [b, s], padded to `num_rows` sequences of `width` tokens."""
    tokens = torch.zeros(num_rows, width, dtype=torch.long)
    labels = torch.full((num_rows, width), IGNORED_LABEL)
    for index, row in enumerate(rows):
        ids = torch.tensor(row.tokens)
        tokens[index, : len(ids) - 1] = ids[:-1]
        labels[index, row.first_scored - 1 : len(ids) - 1] = ids[row.first_scored :]
    return {"tokens": tokens, "labels": labels}


def row_of_pair(context: Sequence[int], continuation: Sequence[int], longest: int) -> Row:
    """Return the `Row` that scores `continuation` after `context`, truncated at its beginning.

    Args:
        longest: number of positions of the model. The last token needs no position.
    """
    tokens = [*context, *continuation][-(longest + 1) :]
    return Row(tokens, max(1, len(tokens) - len(continuation)))


def rolling_rows(tokens: Sequence[int], prefix: int, longest: int) -> list[Row]:
    """Return windows that together score each of `tokens` once, with as much context as possible.

    Args:
        prefix: the token before the first of `tokens`.
    """
    full = [prefix, *tokens]
    rows, done = [], 1
    while done < len(full):
        end = min(len(full), done + longest)
        begin = max(0, end - longest - 1)
        rows.append(Row(full[begin:end], done - begin))
        done = end
    return rows


def harness_model(session: ModelSession[Any], *, batch_size: int) -> Any:
    """Return an `lm_eval.api.model.LM` that runs this model.

    Raises:
        MissingExtraError: lm_eval is not installed.
    """
    base: Any = require("lm_eval.api.model", purpose=PURPOSE).LM
    tokenizer, longest = session.tokenizer, session.max_sequence_length
    begin = tokenizer.around_a_text[0]
    known = [number for number in (*begin[-1:], tokenizer.bos) if number is not None]
    prefix = known[0] if known else tokenizer.special_id("eod", purpose=PURPOSE)

    def scored(rows: Sequence[Row]) -> list[Score]:
        # Sequences of similar length share a micro batch. The longest ones are first, so that the
        # run fails at once if memory does not suffice.
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index].tokens))
        found = score(
            session.model,
            [rows[index] for index in order],
            vocab_size=session.vocab_size,
            batch_size=batch_size,
            groups=session.groups,
        )
        placed = dict(zip(order, found, strict=True))
        return [placed[index] for index in range(len(rows))]

    def pair(context: str, continuation: str) -> Row:
        # Tokenizers join a space to the following word: move it to the continuation.
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return row_of_pair([prefix], tokenizer.tokenize_part(continuation), longest)
        full = tokenizer.tokenize_part(stripped + continuation)
        before = tokenizer.tokenize_part(stripped)
        return row_of_pair([*begin, *before], full[len(before) :], longest)

    class Model(base):  # type: ignore[misc]
        """The three kinds of requests of the harness."""

        def loglikelihood(self, requests: Any, **_options: Any) -> list[tuple[float, bool]]:
            """Score continuations: (log-probability, whether greedy sampling would generate it)."""
            if not requests:
                return []
            found = scored([pair(*request.args) for request in requests])
            return [(sum(one.logprobs), all(one.is_greedy)) for one in found]

        def loglikelihood_rolling(self, requests: Any, **_options: Any) -> list[float]:
            """Score whole texts."""
            parts = [
                rolling_rows(tokenizer.tokenize_part(request.args[0]), prefix, longest)
                for request in requests
            ]
            rows = [row for part in parts for row in part]
            found = iter(scored(rows) if rows else [])
            return [sum(sum(next(found).logprobs) for _ in part) for part in parts]

        def generate_until(self, requests: Any, **_options: Any) -> list[str]:
            """Continue prompts until one of their stop words."""
            for request in requests:
                check_generation(request.args[1])
            texts = []
            for request in requests:  # each has stop words and a length of its own
                context, how = request.args
                texts.append(_written(session, engine(), context, how, longest))
            return texts

    engines: list[Engine] = []

    def engine() -> Engine:
        if not engines:
            engines.append(Engine(session.with_cache(max_rows=1)))
        return engines[0]

    return Model()


def check_generation(how: Mapping[str, object]) -> None:
    """Refuse generation settings without an implementation: they would change the task's score.

    Args:
        how: the `generation_kwargs` of a task.
    Raises:
        ConfigError: names all such settings.
    """
    unknown = {
        name: value
        for name, value in how.items()
        if name not in _ACTING and name not in _LENGTHS
        and value is not None and value not in _WITHOUT_EFFECT.get(name, ())
    }  # fmt: skip
    if unknown:
        raise ConfigError(
            f"a task sets {', '.join(f'{n}={v!r}' for n, v in sorted(unknown.items()))}.",
            rule=f"generation supports {', '.join((*_ACTING, *_LENGTHS))}",
            flags=["--tasks"],
            fix="leave it out of the task's generation_kwargs, and report this with the score",
        )


def _written(
    session: ModelSession[Any], engine: Engine, context: str, how: dict[str, Any], longest: int
) -> str:
    tokenizer = session.tokenizer
    until = how.get("until") or []
    most = int(next((how[name] for name in _LENGTHS if name in how), DEFAULT_NEW_TOKENS))
    if not 0 < most < longest:
        raise ConfigError(
            f"a task generates up to {most} new tokens.",
            rule=f"the model has {longest} positions, and the prompt needs at least one",
            flags=["max_gen_toks"],
            fix=f"set max_gen_toks below {longest} in the task's generation_kwargs",
        )
    samples = how.get("do_sample", False)
    sampling = Sampling(
        temperature=float(how.get("temperature", 1.0)) if samples else 0.0,
        top_k=int(how.get("top_k", 0)),
        top_p=float(how.get("top_p", 1.0)),
        seed=session.run.schedule.seed,
    )
    tokens = tokenizer.tokenize(context)[-(longest - most) :]
    request = Request(
        tokens=tokens,
        max_new_tokens=most,
        sampling=sampling,
        stop_tokens=session.ends,
    )
    words = [until] if isinstance(until, str) else list(until)
    (found,) = continue_texts(engine, [request], tokenizer, words)
    return found.text
