"""Continue prompts with a model in any layout.

Keys and values of what was written are kept. Where the ranks of a layout share the sequence
(sequence and context parallelism) there is no cache, and every new token runs the whole sequence
through the model: slow for long texts, right for looking at what a run has learned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.utils import evaluating
from megatron.inference.engine import Engine, Request, check_prompt, not_finite
from megatron.inference.forward import CachedModel, has_cache
from megatron.inference.recompute import Images, continue_without_cache
from megatron.inference.sampling import Sampling


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    vocab_size: int,
    max_sequence_length: int,
    sampling: Sampling | None = None,
    eod: int | Collection[int] | None = None,
    max_rows: int = 32,
    uses_cache: bool | None = None,
    sources: Sequence[Sequence[int]] | None = None,
    images: Sequence[Images] | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> list[list[int]]:
    """Return each prompt with its continuation, the same on every rank.

    Args:
        model: this rank's model chunk, or its list of chunks; or a `CachedModel`, whose cache
            and packed weights then serve for many calls.
        prompts: token ids, one or more rows of at least one token each; the same on every rank.
        max_new_tokens: added to each row at most.
        vocab_size: number of real tokens; logits of padding beyond it are ignored.
        max_sequence_length: longest row the model has positions for.
        sampling: how to choose; None takes the most likely token.
        eod: a row ends before this token, or before any of these; None never ends early.
        max_rows: rows of the cache; more prompts wait until others have ended.
        uses_cache: None keeps keys and values wherever the layout can.
        sources: for a T5, what its encoder reads for each prompt of the decoder (of one token, with
            which the decoder was trained to begin). There is then no cache.
        images: for a `VisionLanguageModel`, the patches and the grid of each image of each prompt,
            in the order of their tokens. There is then no cache either.
    Communication:
        see `CachedModel.next_tokens` and `continue_without_cache`.
    Raises:
        ConfigError: a prompt is empty or too long, or holds an id outside the vocabulary.
        NumericsError: the model's logits are not finite.
    """
    groups = resolve_groups(pg_collection)
    sampling = sampling or Sampling()
    ends = frozenset((eod,) if isinstance(eod, int) else eod or ())
    problems = [
        check_prompt(prompt, max_new_tokens, vocab_size, max_sequence_length)
        for prompt in prompts or [[]]
    ]
    if sources is not None:
        longest = max_sequence_length + 1  # nothing is added to a source
        problems += [check_prompt(row, 1, vocab_size, longest) for row in sources]
        problems.append(_number_of_sources(len(prompts), len(sources)))
    for problem in problems:
        if problem is not None:
            raise problem
    if isinstance(model, CachedModel):
        with evaluating(model.chunks):
            return _through_cache(model, prompts, max_new_tokens, sampling, ends)
    if uses_cache is None:
        uses_cache = sources is None and images is None and has_cache(model)
    with evaluating(model):
        if not uses_cache:
            return continue_without_cache(
                model,
                prompts,
                max_new_tokens=max_new_tokens,
                vocab_size=vocab_size,
                sampling=sampling,
                ends=ends,
                groups=groups,
                sources=sources,
                images=images,
            )
        cached = CachedModel(
            model,
            vocab_size=vocab_size,
            max_rows=min(max_rows, len(prompts)),
            max_length=max(map(len, prompts)) + max_new_tokens,
            groups=groups,
        )
        return _through_cache(cached, prompts, max_new_tokens, sampling, ends)


def _number_of_sources(num_prompts: int, num_sources: int) -> ConfigError | None:
    if num_prompts == num_sources:
        return None
    return ConfigError(
        f"{num_sources} texts for the encoder and {num_prompts} prompts for the decoder.",
        rule="the decoder continues one prompt for each text",
        fix="pass as many of both",
    )


def _through_cache(
    cached: CachedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    ends: frozenset[int],
) -> list[list[int]]:
    engine = Engine(cached)
    rows = [list(prompt) for prompt in prompts]
    row_of = {
        engine.add(
            Request(
                tokens=prompt,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                sequence=number,
                stop_tokens=ends,
            )
        ): rows[number]
        for number, prompt in enumerate(prompts)
    }
    while not engine.is_idle:
        for event in engine.step():
            if event.finish_reason == "error":
                raise not_finite()
            if event.finish_reason != "stop":
                row_of[event.request].append(event.token)
    return rows
