"""Attention to the keys, or windows of keys, that an indexer chooses.

Blocks of queries are computed one after the other, and again in backward, so that memory holds the
[queries, keys] scores of one block only.

Legend: s sequence, b micro batch, n heads of this rank, d and e widths of key and value heads; of
the indexer j heads and i their width.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from megatron.core.context_parallel.partition import join_zigzag
from megatron.core.foundation.errors import refuse_given
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import key_range
from megatron.core.kernels.sparse_attention import (
    Choice,
    Compared,
    SparseSpec,
    attend_rows,
    choose,
    chosen_positions,
    hidden_keys,
    index_scores,
)
from megatron.core.kernels.windows import Windows
from megatron.core.packed_seq_params import Documents, PackedSeqParams
from megatron.core.parameters.keyed_draws import AttentionKeepMask
from megatron.core.step_context.context import attach_aux_loss
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import is_recomputing
from megatron.core.topology.group import Group
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention, without_padding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.indexer import (
    IndexedAttention,
    Indexer,
    IndexerLoss,
    IndexerSubmodules,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.rotary import Rotary, angles_of, positions_of_rank
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives

BLOCK_ELEMENTS = 2**24
"""Scores of a block, over the batch and the heads of the attention or of the indexer, whichever has
more heads."""


class SparseAttention(IndexedAttention, DotProductAttention):
    """Scaled dot-product attention to `dsa_indexer_topk` keys of each query.

    Communicates on `tp` if the indexer is trained, to sum the attention distribution over all
    heads; and on `cp`, whose ranks always gather keys, values and the indexer's keys (whatever
    `cp_comm_type` is).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        submodules: IndexerSubmodules,
        **options: Any,
    ) -> None:
        super().__init__(config, layer_number, attn_mask_type, attention_type, **options)
        self.topk, self.block_size = config.dsa_indexer_topk or 0, config.dsa_indexer_block_size
        kind = config.layer_kind(self.layer_number)
        self.owner = self.layer_number
        """Number of the layer whose indexer chooses the keys."""
        if kind.shares_keys:
            earlier = enumerate(config.layer_kinds()[: self.layer_number], 1)
            self.owner = max(n for n, other in earlier if other.has_indexer)
        self.indexer: Indexer | None = None
        self.indexer_loss = None
        if kind.has_indexer:
            self.indexer = Indexer(config, submodules, self.pg_collection)
            self.indexer_loss = IndexerLoss(self.layer_number) if config.trains_indexer else None

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        index_query: Tensor | None = None,
        index_weights: Tensor | None = None,
        index_key: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        chosen_keys: MutableMapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query, key: [s/cp, b, n, d]; value: [s/cp, b, n, e].
            index_query, index_weights, index_key: outputs of the indexer for the same tokens; None
                in a layer without one.
            chosen_keys: layer number -> positions of the keys that the layer has chosen in this
                pass, int32 [b, s/cp, most], -1 for none. A layer with an indexer adds its own.
            others: as in `DotProductAttention`.
        Returns:
            [s/cp, b, n*e].
        """
        rule = "the indexer chooses keys without a bias of their scores"
        refuse_given("SparseAttention", {"attention_bias": attention_bias}, rule=rule,
                     fix="leave it out")  # fmt: skip
        cp, b = self.context_groups.cp, query.shape[1]
        total = query.shape[0] * cp.size()
        compared = self._compared()
        if self.topk >= total and compared is Compared.NOTHING:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, None, packed_seq_params
            )
        mask_type = attn_mask_type or self.attn_mask_type
        options = self._options(query, mask_type, packed_seq_params, attention_mask, None)
        if options.max_logits is not None:
            query, key = without_padding(query, key, packed_seq_params)
        choice = self._choice(total, options.mask.document_ids, query.device)
        spec = self._spec(options, total, choice)
        keys: list[Any] = [
            None if x is None else whole_sequence(x, cp) for x in (key, value, index_key)
        ]
        shared, pool = None, 1
        if self.indexer is not None and self.indexer.pool_gate is not None:
            keys[2], pool = self.indexer.pooled(keys[2], choice.windows), self.block_size
        if self.indexer is None:
            assert chosen_keys is not None, "a layer that shares keys runs within a block"
            shared = chosen_keys[self.owner]
        positions: list[Tensor] = []
        counted = tokens_that_count(packed_seq_params)
        outs, losses = [], []
        most = max(query.shape[2], 0 if index_query is None else index_query.shape[2]) * b * total
        for local, rows in self._blocks(query.shape[0], max(1, BLOCK_ELEMENTS // most)):
            ((begin, end),) = rows.ranges
            _, last = key_range(begin, end, total, options.mask.window)
            hidden = hidden_keys(spec, begin, end, last, local, query.device)
            own = None if counted is None else counted[:, local]
            attend = partial(attend_rows, hidden=hidden, rows=rows, counted=own, spec=spec)
            of_queries = (query, index_query, index_weights)
            block: list[Any] = [None if x is None else x[local] for x in of_queries]
            seen: list[Any] = [
                None if x is None else x[: last // size]
                for x, size in zip(keys, (1, 1, pool), strict=True)
            ]
            chosen = None if shared is None else shared[:, local]
            if self.indexer is not None and chosen_keys is not None:
                chosen = chosen_positions(spec, hidden, block[1], block[2], seen[2])
                positions.append(chosen)
            tensors = (*block, *seen, options.sink, chosen)
            # Its dropout is keyed: it draws from no generator whose state would be restored.
            out, loss = recomputed(attend, *tensors, use_reentrant=False, preserve_rng_state=False)
            outs.append(out)
            losses.append(loss)
        if positions and chosen_keys is not None:
            chosen_keys[self.owner] = torch.cat(positions, 1)
        return self._with_loss(torch.cat(outs), losses, counted)

    def _choice(self, num_keys: int, ids: Tensor | None, device: torch.device) -> Choice:
        """Return how queries choose from the keys of documents [b, num_keys]."""
        if self.block_size == 1:
            return Choice(self.topk)
        by_key = not self.config.multi_latent_attention
        windows = Windows.of(num_keys, self.block_size, ids, device, has_parts=by_key)
        return Choice(self.topk, windows, self.config.dsa_indexer_local_blocks)

    def _spec(self, options: AttentionOptions, num_keys: int, choice: Choice) -> SparseSpec:
        """Return the options of all blocks; dropout is drawn for `num_keys` keys."""
        keep = 1.0 - options.dropout
        return SparseSpec(
            options=options,
            choice=choice,
            uses_relu=self.config.dsa_indexer_scoring_relu,
            compared=self._compared(),
            keep_mask=AttentionKeepMask.next(keep, num_keys) if options.dropout else None,
            sum_over_ranks=self._sum_over_heads,
        )

    def _with_loss(self, attended: Tensor, losses: list[Tensor], counted: Tensor | None) -> Tensor:
        """Attach the loss of the indexer, a mean over queries, to the output [s/cp, b, n*e].

        Args:
            losses: the sum over the queries of each block. counted: as in `attend_rows`.
        """
        if self._compared() is Compared.NOTHING:
            return attended
        cp = self.context_groups.cp
        num_tokens: Tensor | float = float(attended.shape[0] * attended.shape[1] * cp.size())
        if counted is not None:
            num_tokens = collectives.all_reduce(counted.sum().float(), cp).clamp(min=1)
        part = torch.stack(losses).sum() / num_tokens
        coefficient = self.config.dsa_indexer_loss_coeff
        assert coefficient is not None and self.indexer_loss is not None
        if not is_recomputing():
            self.indexer_loss.add(part)
        return attach_aux_loss(attended, coefficient * part, num_tokens)

    def attend_to_cache(
        self,
        query: Tensor,
        cached: Sequence[Tensor],
        extra: Sequence[Tensor],
        *,
        hidden: Tensor | None,
        chosen_keys: MutableMapping[int, Tensor] | None = None,
    ) -> Tensor:
        """Attend with new tokens to the chosen keys of a cache.

        Args:
            cached: keys, values, and the indexer's keys [b, 1, k, i], if the layer has an indexer.
            extra: the indexer's queries [s, b, j, i], weights [s, b, j], and new keys.
            chosen_keys: layer number -> bool [b, 1, s, 1, k], True where the layer's choice hides a
                key.
            others: as in `DotProductAttention`.
        """
        s, b, num_keys = query.shape[0], query.shape[1], cached[0].shape[2]
        indexer = self.indexer
        if self.topk < num_keys and indexer is None:
            assert chosen_keys is not None
            hidden = chosen_keys[self.owner]
        elif self.topk < num_keys and indexer is not None:
            index_keys = cached[2].squeeze(1).transpose(0, 1)
            choice = self._choice(num_keys, None, query.device)
            index_keys = indexer.pooled(index_keys, choice.windows)
            relu = self.config.dsa_indexer_scoring_relu
            scores = index_scores(extra[0], extra[1], index_keys, relu)
            if hidden is None:
                hidden = torch.zeros(b, s, num_keys, dtype=torch.bool, device=query.device)
            chosen = choose(scores, hidden.reshape(b, s, num_keys), choice)
            hidden = ~chosen.view(b, -1, s, 1, num_keys)
            if chosen_keys is not None:
                chosen_keys[self.owner] = hidden
        return super().attend_to_cache(query, cached, extra, hidden=hidden)

    def _compared(self) -> Compared:
        """Return the keys whose scores the indexer's loss compares in this call."""
        config = self.config
        if not (self.training and torch.is_grad_enabled() and self.indexer_loss is not None):
            return Compared.NOTHING
        return Compared.CHOSEN if config.dsa_indexer_use_sparse_loss else Compared.VISIBLE

    def _sum_over_heads(self, x: Tensor) -> Tensor:
        tp = self.pg_collection.tp
        return x if tp.size() == 1 else collectives.all_reduce(x.contiguous(), tp)

    def _blocks(self, num_rows: int, size: int) -> Iterator[tuple[slice, SequenceShard]]:
        """Yield slices of local tokens with their positions, which are consecutive."""
        cp, first = self.context_groups.cp, 0
        rows = SequenceShard.zigzag(num_rows * cp.size(), cp.rank(), cp.size())
        for begin, end in rows.ranges:
            for start in range(begin, end, size):
                stop = min(start + size, end)
                yield (
                    slice(first, first + stop - start),
                    SequenceShard(((start, stop),), rows.total),
                )
                first += stop - start


def tokens_that_count(packed: PackedSeqParams | None) -> Tensor | None:
    """Return bool [b, s/cp], False for padding; None without padding."""
    if isinstance(packed, Documents) and packed.padding_mask is not None:
        return ~packed.padding_mask
    return None


def whole_sequence(x: Tensor, cp: Group) -> Tensor:
    """Gather [s/cp, ...] to [s, ...] in ascending order of position.

    Communication:
        forward all-gather, backward reduce-scatter (sum), both on `cp`.
    """
    if cp.size() == 1:
        return x
    gathered = gather_from_sequence_parallel_region(x.contiguous(), group=cp)
    return join_zigzag(gathered.unflatten(0, (cp.size(), -1)), dim=1)


class _KeepsIndexKeys:
    def extra_cache_entries(self, extra: list[Tensor]) -> list[Tensor]:
        """Return the indexer's key as one head, [s, b, 1, i]."""
        return [extra[2].unsqueeze(2)] if extra else []


class SparseSelfAttention(_KeepsIndexKeys, SelfAttention):
    """Attention of groups of queries, each to the windows that a head of the indexer chooses."""

    core_attention: SparseAttention

    def get_rotated_qkv(
        self, hidden_states: Tensor, key_value_states: Tensor | None, positions: Tensor | None,
        rotary_pos_emb: Rotary,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return query [s, b, n/tp, d], key, value, the outputs of the indexer, and the gate if
        there is one."""
        query, key, value, *gate = super().get_rotated_qkv(
            hidden_states, key_value_states, positions, rotary_pos_emb
        )
        angles = angles_of(rotary_pos_emb, query.dtype, self.config) if self.uses_rotary else None
        indexer = self.core_attention.indexer
        assert indexer is not None
        return query, key, value, *indexer(hidden_states, hidden_states, angles), *gate


class SparseLatentAttention(_KeepsIndexKeys, MLASelfAttention):
    """Latent attention whose core also takes the outputs of an indexer."""

    core_attention: SparseAttention

    def extra_core_inputs(
        self, hidden_states: Tensor, of_query: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Return queries [s, b, j, i], weights [s, b, j] and key [s, b, i] of the indexer. A layer
        that shares the keys of another returns nothing."""
        if self.core_attention.indexer is None:
            return ()
        config, latent = self.config, hidden_states
        if config.q_lora_rank is not None:
            with torch.no_grad():
                latent = self.q_layernorm(of_query)
        if positions is None:
            positions = positions_of_rank(hidden_states, config, self.pg_collection)
        cos_sin = None
        if self.uses_rotary:
            dtype = torch.promote_types(hidden_states.dtype, torch.float32)
            interleaved = config.dsa_indexer_rope_interleaved
            cos_sin = self.rotary(positions, hidden_states.new_empty(0, dtype=dtype), interleaved)
        indexer = self.core_attention.indexer
        indexed: tuple[Tensor, ...] = indexer(hidden_states, latent, cos_sin, positions)
        return indexed
