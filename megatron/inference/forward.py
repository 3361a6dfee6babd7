"""Run a model with a cache of keys and values once, through the stages of a pipeline.

Legend: b sequences, s new tokens, h hidden, v real vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.kernels.cpu.prepacked_weights import prepack
from megatron.core.pipeline_parallel.instructions import Placement
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.pipeline_parallel.p2p_communication import Message, P2PCommunicator
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tensor_parallel.parallel_parameters import ParallelLinear
from megatron.core.tensor_parallel.vocab_parallel_softmax import VocabShard, log_sum_of_units
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import torch_collectives
from megatron.core.utils import as_list, get_model_config, unwrap_model
from megatron.inference.sampling import Draw, choose_tokens, gather_logprobs


def has_cache(model: object) -> bool:
    """Return whether a model can use a cache: its layout must not split the sequence over ranks."""
    config = get_model_config(as_list(model)[0])
    return not config.sequence_parallel and config.context_parallel_size == 1


class CachedModel:
    """A model and its cache. All ranks make the same calls.

    Args:
        model: this rank's model chunk, or its list of chunks.
        vocab_size: number of real tokens; logits of padding beyond it are ignored.
        max_rows, max_length: size of the cache, in sequences and tokens.
        packs_weights: on the CPU, keep a second copy of the weights, laid out for few sequences.
            The copy is made at once; a weight that changes later is used without its copy.
    """

    def __init__(
        self,
        model: object,
        *,
        vocab_size: int,
        max_rows: int,
        max_length: int,
        groups: ProcessGroupCollection,
        packs_weights: bool = False,
    ) -> None:
        self.groups = groups
        self.vocab_size = vocab_size
        self.chunks = [unwrap_model(chunk) for chunk in as_list(model)]
        self.config = get_model_config(self.chunks[0])
        self.context = StaticInferenceContext(max_rows, max_length)
        self.context.materialize_only_last_token_logits = True
        if packs_weights and not self.config.layout_invariant_mode:
            for weight in self._weights():
                prepack(weight, is_for_one_row=max_rows == 1)
        self._rank = groups.pp.rank()
        shape = schedule_named(self.config.pipeline_schedule).shape
        self._placement = Placement(groups.pp.size(), len(self.chunks), shape)
        has_peers = self._placement.num_ranks > 1
        self._channel = P2PCommunicator(groups.pp, self.config) if has_peers else None

    def _weights(self) -> Iterator[Tensor]:
        """Yield the weights of linear layers and heads, tied heads included."""
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, ParallelLinear):
                    weight = getattr(module, "weight", None)
                    if weight is not None:
                        yield weight
            if getattr(chunk, "post_process", False) and chunk.output_layer.weight is None:
                yield chunk.shared_embedding_or_output_weight()

    @torch.inference_mode()
    def next_tokens(
        self,
        rows: Sequence[Sequence[int]],
        draws: Sequence[Draw],
        *,
        first_row: int,
        offsets: Sequence[int],
        num_top_logprobs: int | None = None,
    ) -> tuple[list[int], list[list[tuple[int, float]]] | None]:
        """Append new tokens to cached sequences, and choose the next token of each sequence.

        Args:
            rows: the new tokens of each sequence, at least one.
            draws: how to choose each token.
            first_row: the cache row of the first sequence; the others use the following rows.
            offsets: number of tokens of each sequence that the cache already holds.
            num_top_logprobs: also return log-probabilities of the chosen token and of this many
                most likely tokens.
        Returns:
            ids, and lists of (id, log-probability), the chosen token first, or None; the same on
            every rank.
        Communication:
            hidden states [s, b, h] from stage to stage on pp; an all-gather of [b, v] on tp on the
            last stage; a broadcast of ids and log-probabilities on pp.
        """
        lengths = [len(row) for row in rows]
        width = max(lengths)
        where = device.current_device()
        padded = [[*row, *[0] * (width - len(row))] for row in rows]
        tokens = torch.tensor(padded, device=where)
        positions = torch.tensor(offsets, device=where).unsqueeze(1)
        positions = positions if width == 1 else positions + torch.arange(width, device=where)
        self.context.set_rows(first_row, offsets, lengths)
        logits = self._run(tokens, positions)
        shape = (len(rows), 1 if num_top_logprobs is None else 1 + num_top_logprobs)
        ids = torch.zeros(shape, dtype=torch.long, device=where)
        logprobs = torch.zeros(shape, dtype=torch.float32, device=where)
        if logits is not None:
            real = logits[:, : self.vocab_size]
            chosen = choose_tokens(real, draws)
            if num_top_logprobs is None:
                ids = chosen.unsqueeze(1)
            else:
                normalizer = self._normalizer(logits)
                ids, logprobs = gather_logprobs(real, chosen, num_top_logprobs, normalizer)
        self._broadcast(ids)
        if num_top_logprobs is None:
            return ids[:, 0].tolist(), None
        self._broadcast(logprobs)
        listed = [
            list(zip(*pair, strict=True))
            for pair in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]
        return ids[:, 0].tolist(), listed

    def _normalizer(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the two terms of each row's logarithm of the sum of exponentials, [b, 1] each, in
        the order of `layout_invariant_mode`; None without it.

        logits: [b, padded v].
        """
        if not self.config.layout_invariant_mode:
            return None
        shard = VocabShard.of(logits.shape[-1], self.vocab_size, SINGLE_RANK)
        highest = logits[:, : self.vocab_size].float().amax(-1)
        log_sum = log_sum_of_units(logits, highest, shard, self.config.tensor_units)
        return highest.unsqueeze(1), log_sum.unsqueeze(1)

    def _run(self, tokens: Tensor, positions: Tensor) -> Tensor | None:
        """Return the logits [b, padded v] after each sequence; None before the last stage."""
        width = self.config.num_residual_streams * self.config.hidden_size
        shape = (tokens.shape[1], tokens.shape[0], width)
        hidden_states = tokens
        for number, chunk in enumerate(self.chunks):
            stage = self._placement.stage(self._rank, number)
            previous = self._placement.previous(self._rank, number)
            following = self._placement.next(self._rank, number)
            if previous is not None:
                if previous[0] != self._rank:
                    assert self._channel is not None
                    received = self._channel.receive(
                        [shape], previous[0], Message(False, 0, stage), requires_grad=False
                    )
                    hidden_states = received.wait()[0]
                chunk.set_input_tensor(hidden_states)
            output = chunk(tokens, positions, None, inference_context=self.context)
            if following is None:
                return gather_from_tensor_model_parallel_region(output[:, 0], self.groups.tp)
            hidden_states = output
            if following[0] != self._rank:
                assert self._channel is not None
                self._channel.send([output], following[0], Message(False, 0, stage + 1)).wait()
        return None

    def _broadcast(self, chosen: Tensor) -> None:
        if self._channel is not None:
            torch_collectives.broadcast(chosen, self.groups.pp, loss_rank(self.config))
