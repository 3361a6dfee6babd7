"""Continue prompts with a model in any layout.

The engine caches keys and values. There is no cache if the layout splits the sequence over ranks
(sequence and context parallelism) or the model has an encoder: each new token then runs the whole
sequence through the model. Both paths choose the same tokens, so the slow path tests the cache.

Legend: b sequences, s positions, v padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import get_batch_on_this_cp_rank, sequence_shard_of_rank
from megatron.core.datasets.images.grid import Grid, text_and_image_positions
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import torch_collectives
from megatron.core.utils import as_list, evaluating, get_model_config, unwrap_model
from megatron.inference.engine import Engine, Request, check_prompt, not_finite
from megatron.inference.forward import CachedModel, has_cache
from megatron.inference.sampling import NO_TOKEN, Draw, Sampling, choose_tokens

Images = Sequence[tuple[Tensor, Grid]]
"""The patches [p, ...] and the grid of each image of a prompt."""


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
        model: this rank's model chunk, or its list of chunks; or a `CachedModel`, so that many
            calls use the same cache and packed weights.
        prompts: token ids, one or more prompts of at least one token; the same on every rank.
        max_new_tokens: most tokens that are added to a prompt.
        vocab_size: number of real tokens; logits of padding beyond it are ignored.
        max_sequence_length: number of positions of the model.
        sampling: how to choose; None chooses the most likely token.
        eod: a sequence ends before this token, or before any of these; if None, it ends only at
            `max_new_tokens`.
        max_rows: sequences in the cache; further prompts wait until others have ended.
        uses_cache: None uses a cache wherever the layout supports it.
        sources: for a T5, the encoder's input for each prompt of the decoder (a prompt is only the
            decoder's start token). No cache is used.
        images: for a `VisionLanguageModel`, the patches and the grid of each image of each prompt,
            in the order of the image tokens. No cache is used.
    Communication:
        with a cache, see `CachedModel.next_tokens`; else for each new token the forward-only
        schedule, an all-reduce of b x v/tp logits on cp, an all-gather of b x v on tp, and a
        broadcast of b ids on pp.
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
        if len(prompts) != len(sources):
            problems.append(
                ConfigError(
                    f"{len(sources)} texts for the encoder, {len(prompts)} for the decoder.",
                    rule="the decoder continues one prompt for each text",
                    fix="pass the same number of both",
                )
            )
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
            return _continue_without_cache(
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


def _continue_without_cache(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    vocab_size: int,
    sampling: Sampling,
    ends: Collection[int],
    groups: ProcessGroupCollection,
    sources: Sequence[Sequence[int]] | None = None,
    images: Sequence[Images] | None = None,
) -> list[list[int]]:
    chunks = as_list(model)
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    # Interleaved schedules need a multiple of pp micro batches; others need one.
    num_parts = groups.pp.size() if len(chunks) > 1 else 1
    num_rows = -(-len(prompts) // num_parts) * num_parts
    cp_size = groups.cp.size()
    pieces = groups.tp.size() * (2 * cp_size if cp_size > 1 else 1)
    tokens = _padded(prompts, num_rows, longest + max_new_tokens, pieces)
    given = None
    if sources is not None:
        given = _padded(sources, num_rows, max(map(len, sources)), pieces)
        is_token = _padded([[1] * len(row) for row in sources], num_rows, given.shape[1], pieces)
        is_token[:, 0] = 1  # also of the padding sequences
        given = torch.stack((given, is_token), 1)
    seen = None if images is None else [*images, *([()] * (num_rows - len(images)))]

    ended_at = [length + max_new_tokens for length in lengths]
    for position in range(min(lengths), longest + max_new_tokens):
        logits = _last_logits(
            chunks, tokens, given, position - 1, num_parts, vocab_size, groups, seen
        )
        chosen = torch.zeros(num_rows, dtype=torch.long, device=tokens.device)
        if logits is not None:
            draws = [Draw(sampling, row, position) for row in range(num_rows)]
            chosen = choose_tokens(logits, draws)
        if groups.pp.size() > 1:
            torch_collectives.broadcast(chosen, groups.pp, loss_rank(get_model_config(chunks[0])))
        for row, token in enumerate(chosen[: len(prompts)].tolist()):
            if lengths[row] <= position < ended_at[row]:
                if token == NO_TOKEN:
                    raise not_finite()
                tokens[row, position] = token
                if token in ends:
                    ended_at[row] = position
        if position + 1 >= max(ended_at):
            break
    return [tokens[row, : ended_at[row]].tolist() for row in range(len(prompts))]


def _padded(rows: Sequence[Sequence[int]], num_rows: int, width: int, multiple: int) -> Tensor:
    """Return [num_rows, s], padded with zeros; s is `width` rounded up to a multiple."""
    width = -(-width // multiple) * multiple
    padded = torch.zeros((num_rows, width), dtype=torch.long, device=device.current_device())
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded


@torch.no_grad()
def _last_logits(
    chunks: Sequence[Any],
    tokens: Tensor,
    sources: Tensor | None,
    position: int,
    num_parts: int,
    vocab_size: int,
    groups: ProcessGroupCollection,
    images: Sequence[Images] | None = None,
) -> Tensor | None:
    """Return the logits [b, v] after `position` on ranks of the last stage, None on other ranks.

    Args:
        images: the images of each sequence; None for a model without images.
        sources: [b, 2, s], the encoder's input ids and its mask of tokens; None without encoder.
    """
    parts = tokens.chunk(num_parts)
    read: Sequence[Any] = [None] * num_parts if sources is None else sources.chunk(num_parts)
    if images is not None:
        size = len(tokens) // num_parts
        read = [images[n * size : (n + 1) * size] for n in range(num_parts)]
    held = sequence_shard_of_rank(tokens.shape[1] // groups.cp.size(), cp=groups.cp, sp=SINGLE_RANK)
    index = held.index_of(position)

    def collect(output: Tensor, **_options: bool) -> Tensor:
        own = output[:, index or 0].contiguous()
        if groups.cp.size() > 1:
            # One context-parallel rank holds the position; the others add zeros.
            own = own if index is not None else torch.zeros_like(own)
            torch_collectives.all_reduce(own, groups.cp)
        logits = gather_from_tensor_model_parallel_region(own, groups.tp)
        return logits[:, :vocab_size]

    def forward_step(iterator: Iterator[tuple[Tensor, Any]], chunk: Any) -> tuple[Tensor, Any]:
        rows, source = next(iterator)
        if images is not None:
            return _with_images(chunk, rows, source), collect
        if source is not None:
            return chunk(source[:, 0], rows, source[:, 1]), collect
        batch = get_batch_on_this_cp_rank({"tokens": rows}, groups.cp)
        return chunk(batch["tokens"], held.positions(tokens.device)[None], None), collect

    iterators = [zip(parts, read, strict=True) for _ in chunks]
    length = tokens.shape[1]
    collected = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=list(chunks) if len(chunks) > 1 else chunks[0],
        num_microbatches=num_parts,
        seq_length=length if sources is None else sources.shape[2],
        decoder_seq_length=None if sources is None else length,
        micro_batch_size=len(parts[0]),
        forward_only=True,
        collect_non_loss_data=True,
        pg_collection=groups,
    )
    return torch.cat(collected) if collected else None


def _with_images(chunk: Any, rows: Tensor, images: Sequence[Images]) -> Tensor:
    """Run token ids [b, s] and their images through a chunk of a `VisionLanguageModel`."""
    vision = unwrap_model(chunk).vision_config
    every = [image for row in images for image in row]
    positions = [
        text_and_image_positions(
            row == vision.image_token_id, [grid for _, grid in own], vision.spatial_merge_size
        )
        for row, own in zip(rows.cpu(), images, strict=True)
    ]
    output: Tensor = chunk(
        rows,
        torch.stack(positions, 1).to(rows.device),
        None,
        patches=torch.cat([patches for patches, _ in every]).to(rows.device) if every else None,
        image_grid_thw=[grid for _, grid in every],
    )
    return output
