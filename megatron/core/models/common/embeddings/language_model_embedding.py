"""Embeddings of token ids: words, learned positions and token types, with dropout.

Legend: s sequence, b micro-batch, h hidden, v padded vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.parameters.initialization import initialization_is_deferred
from megatron.core.parameters.keyed_draws import keyed_dropout
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.step_context.context import current_step
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import scatter_to_sequence_parallel_region
from megatron.core.tensor_parallel.parallel_parameters import device_of_parameters, empty_parameter
from megatron.core.tensor_parallel.vocab_embedding import exact_rows
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.transformer_config import TransformerConfig


class LanguageModelEmbedding(MegatronModule):
    """Sum of the embeddings of words, learned positions and token types, with dropout.

    Args:
        vocab_size: padded vocabulary, split over the tensor-parallel ranks.
        max_sequence_length: number of learned positions.
        position_embedding_type: "learned_absolute"; anything else adds no position here.
        num_tokentypes: number of token types (for example the two texts of a pair); 0 disables
            them.
        scatter_to_sequence_parallel: under sequence parallelism return this rank's sequence shard.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        vocab_size: int,
        max_sequence_length: int,
        position_embedding_type: str = "learned_absolute",
        num_tokentypes: int = 0,
        scatter_to_sequence_parallel: bool = True,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = resolve_groups(pg_collection)
        self.tp_group = resolve_group(tp_group, "tp", self.pg_collection)
        self.max_sequence_length = max_sequence_length
        self.add_position_embedding = position_embedding_type == "learned_absolute"
        self.scatters = config.sequence_parallel and scatter_to_sequence_parallel
        # Without positions to add, one reduce-scatter sums over ranks and splits the sequence.
        adds_rows = self.add_position_embedding or num_tokentypes > 0
        self.reduce_scatter_embeddings = self.scatters and not adds_rows
        assert config.embedding_init_method
        self.word_embeddings = VocabParallelEmbedding(
            num_embeddings=vocab_size,
            embedding_dim=config.hidden_size,
            init_method=config.embedding_init_method,
            reduce_scatter_embeddings=self.reduce_scatter_embeddings,
            config=config,
            tp_group=self.tp_group,
            pg_collection=self.pg_collection,
        )
        if config.embed_layernorm:
            self.word_norm = NORMS[config.normalization](
                config.hidden_size,
                config.layernorm_epsilon,
                # After a reduce-scatter a rank norms s/tp tokens, otherwise all of them.
                sequence_parallel=self.reduce_scatter_embeddings,
                zero_centered_gamma=config.layernorm_zero_centered_gamma,
                is_exact=config.layout_invariant_mode,
                dtype=config.params_dtype,
                device=device_of_parameters(config),
            )
        if self.add_position_embedding:
            self.position_embeddings = self._table(max_sequence_length)
        self.num_tokentypes = num_tokentypes
        if num_tokentypes:
            self.tokentype_embeddings = self._table(num_tokentypes)

    def _table(self, length: int) -> nn.Embedding:
        config = self.config
        weight = empty_parameter(config, length, config.hidden_size)
        embedding = nn.Embedding(length, config.hidden_size, _weight=weight)
        init_method = config.embedding_init_method
        set_param_meta(embedding.weight, ParamMeta(init_method=init_method))
        if config.perform_initialization and not initialization_is_deferred():
            assert init_method is not None
            with torch.no_grad():
                init_method(embedding.weight)
        return embedding

    def _words(self, input_ids: Tensor) -> Tensor:
        """[b, s/cp] -> [s/cp, b, h], or [s/cp/tp, b, h] if the lookup ends in a reduce-scatter."""
        # Transposing ids instead of embeddings gives [s, b, h] without a copy.
        ids = input_ids if self.reduce_scatter_embeddings else input_ids.t()
        words = self.word_embeddings(ids)
        factor = self.config.embedding_multiplier
        if self.config.use_mup:
            factor *= self.config.mup_embedding_mult
        # Round the factor to the dtype of the weights, as in the training of published models.
        if factor != 1.0:
            words = words * torch.tensor(factor, dtype=words.dtype)
        return self.word_norm(words) if self.config.embed_layernorm else words

    def embed_words(self, input_ids: Tensor) -> Tensor:
        """Embed without positions and dropout: [b, s/cp] -> [s/cp, b, h] ([s/cp/tp, b, h])."""
        hidden = self._words(input_ids)
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if self.scatters and not self.reduce_scatter_embeddings:
            hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        tokentype_ids: Tensor | None = None,
        *,
        stack: tuple[str, ...] = (),
    ) -> Tensor:
        """Embed tokens.

        Args:
            input_ids: [b, s/cp], this rank's zigzag shard.
            position_ids: [b, s/cp], or [1, s/cp] for all samples; default the absolute positions of
                these tokens.
            tokentype_ids: [b, s/cp], if the model has token types; default type 0.
            stack: name of the stack, for models that embed for several; it separates their dropout.
        Returns:
            [s/cp, b, h]; under sequence parallelism this rank's shard, [s/cp/tp, b, h].
        """
        if not self.num_tokentypes:
            rule = "the tokens of this model have words and positions, no types"
            given = {"tokentype_ids": tokentype_ids}
            refuse_given("LanguageModelEmbedding", given, rule=rule, fix="leave it out")
        rows = sequence_shard_of_rank(
            input_ids.shape[1], cp=self.pg_collection.microbatch_cp, sp=SINGLE_RANK
        )
        length = rows.total
        hidden = self._words(input_ids)
        if self.add_position_embedding:
            # With dynamic context parallelism a sequence has several samples, and `position_ids`
            # restart in each.
            is_one_sample = position_ids is None or current_step().cp_group is None
            if is_one_sample and length > self.max_sequence_length:
                raise ConfigError(
                    f"a sequence of {length} tokens for {self.max_sequence_length} learned"
                    " positions.",
                    rule="every position of the sequence has a learned embedding",
                    flags=["--max-position-embeddings", "--seq-length"],
                    fix=f"use --max-position-embeddings {length}",
                )
            if position_ids is None:
                table = self.position_embeddings.weight
                pieces = [table[begin:end] for begin, end in rows.ranges]
                positions = (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).unsqueeze(1)
            elif self.config.layout_invariant_mode:
                positions = exact_rows(position_ids.t(), self.position_embeddings.weight)
            else:
                positions = self.position_embeddings(position_ids.t())
            hidden = hidden + positions
        if self.num_tokentypes:
            types = torch.zeros_like(input_ids) if tokentype_ids is None else tokentype_ids
            hidden = hidden + self.tokentype_embeddings(types.t())
        if self.config.fp32_residual_connection:
            hidden = hidden.float()
        if self.scatters:
            rows = rows.shard(self.tp_group.rank(), self.tp_group.size())
            if not self.reduce_scatter_embeddings:
                hidden = scatter_to_sequence_parallel_region(hidden, group=self.tp_group)
        with rng_state().in_scope("embedding", *stack, rows=rows):
            return keyed_dropout(hidden, self.config.hidden_dropout, self.training)
