"""Attention to a window of tokens and to compressed entries, each of them made of m tokens.

DeepSeek-AI, "DeepSeek-V4", section 2.3. All heads share one key, which is their value too: the
normed latent of a token. An entry is a weighted sum of the latents of a window of m tokens, with a
softmax weight for each channel. In layers with an indexer (CSA, m = 4) a window also covers the m
tokens before it, and a query attends to the entries with the highest scores; in other layers (HCA,
m = 128) it attends to all entries of earlier tokens. Positions are rotated back in the output of
attention, because the values are rotated.

Legend: s sequence, b micro batch, h hidden, n heads of this rank, d width of a head, p of its
rotary part, m tokens and w number of windows; of the indexer j heads and i their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recomputed

from megatron.core.foundation.errors import refuse_given
from megatron.core.kernels.block_mask import key_range
from megatron.core.kernels.sparse_attention import (
    Choice,
    attend_rows,
    choose_keys,
    hidden_keys,
    index_scores,
)
from megatron.core.kernels.windows import Windows, softmax_sum
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer, device_of_parameters
from megatron.core.transformer.dot_product_attention import DotProductAttention, without_padding
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.indexer import IndexerSubmodules
from megatron.core.transformer.multi_latent_attention import (
    LatentRotary,
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    latent_frequencies,
)
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.rotary import positions_of, rotate_last
from megatron.core.transformer.sparse_attention import (
    BLOCK_ELEMENTS,
    SparseAttention,
    tokens_that_count,
    whole_sequence,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


class Compressor(ReplicatedLinear):
    """Project tokens to latents and weights, and sum the latents of windows to entries.

    Its parameters are replicated. Args: as in `ReplicatedLinear`, and
        output_size: width of an entry. ratio: tokens of a window.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, ratio: int,
        **options: Any,
    ) -> None:  # fmt: skip
        self.overlaps = ratio == config.csa_indexed_ratio
        width = output_size * (1 + self.overlaps)
        super().__init__(input_size, 2 * width, config=config, **options)
        self.position_bias = self.new_parameter(ratio, width, init_method=None, split_dim=None)
        self.norm = NORMS[config.normalization](
            output_size,
            config.layernorm_epsilon,
            zero_centered_gamma=config.layernorm_zero_centered_gamma,
            dtype=config.params_dtype,
            device=device_of_parameters(config),
        )

    def entries(self, projected: Tensor, windows: Windows) -> Tensor:
        """Return the entries [w, b, d] of the projection of a whole sequence [s, b, c]."""
        latents, logits = windows.tokens(projected).chunk(2, -1)
        logits = logits + self.position_bias.unsqueeze(1)
        if self.overlaps:
            # The first half of the channels belongs to the entry of the window after it.
            (earlier, latents), (others, logits) = latents.chunk(2, -1), logits.chunk(2, -1)
            earlier, others = (F.pad(x, (0, 0) * 3 + (1, 0))[:-1] for x in (earlier, others))
            others = others.masked_fill(~windows.follows.t()[:, None, :, None], float("-inf"))
            latents, logits = torch.cat((earlier, latents), 1), torch.cat((others, logits), 1)
        entries: Tensor = self.norm(softmax_sum(latents, logits))
        return entries


@dataclass
class CompressedAttentionSubmodules(IndexerSubmodules):
    """Parts of the core: the compressor, and in some layers an indexer."""

    compressor: ModuleSpec | type | Any = None


class CompressedAttention(SparseAttention):
    """Scaled dot-product attention to a window, and to entries of windows before it.

    Communicates on `tp` and `cp` as `SparseAttention` does.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType,
        attention_type: str, submodules: CompressedAttentionSubmodules, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            config, layer_number, attn_mask_type, attention_type, submodules, **options
        )
        self.ratio = config.layer_kind(self.layer_number).compress_ratio
        base = config.csa_compress_rotary_base if self.ratio else config.rotary_base
        self.rotary = LatentRotary(latent_frequencies(config, base, is_stretched=self.ratio > 0))
        self.compressor: Compressor | None = None
        if self.ratio:
            self.compressor = build_module(
                submodules.compressor, config.hidden_size, config.v_head_dim, config=config,
                init_method=config.init_method, tp_group=self.pg_collection.tp,
            )  # fmt: skip

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        projected: Tensor | None = None,
        index_query: Tensor | None = None,
        index_weights: Tensor | None = None,
        index_projected: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [s/cp, b, n, d]; key: [s/cp, b, 1, d], which is also the value.
            projected: [s/cp, b, c], the compressor's projection of the same tokens; None in a layer
                without entries.
            index_query, index_weights: outputs of the indexer; index_projected: its compressor's
                projection. None in a layer without one.
            others: as in `DotProductAttention`; `attention_mask` and `attention_bias` are refused.
        Returns:
            [s/cp, b, n*d].
        """
        given = {"attention_mask": attention_mask, "attention_bias": attention_bias}
        rule = "masks and biases have a column for each token, and entries are made of several"
        refuse_given("CompressedAttention", given, rule=rule, fix="leave it out")
        if self.compressor is None:
            return DotProductAttention.forward(
                self, query, key, value, None, attn_mask_type, None, packed_seq_params
            )
        cp, b = self.context_groups.cp, query.shape[1]
        total = query.shape[0] * cp.size()
        count = total // self.ratio
        mask_type = attn_mask_type or self.attn_mask_type
        options = self._options(query, mask_type, packed_seq_params, None, None)
        if options.max_logits is not None:
            query, key = without_padding(query, key, packed_seq_params)
        keys = whole_sequence(key, cp)
        assert projected is not None
        windows = Windows.of(total, self.ratio, options.mask.document_ids, query.device)
        entries = self._entries(self.compressor, whole_sequence(projected, cp), windows)
        entries = copy_to_tensor_model_parallel_region(entries, self.pg_collection.tp)
        entries = entries.unsqueeze(2)
        index_entries = None
        if self.indexer is not None and index_projected is not None:
            whole = whole_sequence(index_projected, cp)
            index_entries = self._entries(self.indexer.linear_wk, whole, windows)
        spec = self._spec(options, count + total, Choice(self.topk))

        def attend(
            begin: int, end: int, first: int, query: Tensor, index_query: Tensor | None,
            index_weights: Tensor | None, entries: Tensor, keys: Tensor,
            index_entries: Tensor | None, sink: Tensor | None, **block: Any,
        ) -> tuple[Tensor, Tensor]:  # fmt: skip
            last = first + len(keys)
            hidden = hidden_keys(spec, begin, end, last, slice(None), query.device, first)
            of_entries = windows.hidden(begin, end, len(entries))
            batch = max(len(hidden), len(of_entries))
            hidden = torch.cat([x.expand(batch, -1, -1) for x in (of_entries, hidden)], -1)
            joined = torch.cat((entries, keys))
            return attend_rows(
                query, index_query, index_weights, joined, joined, index_entries, sink, None,
                hidden=hidden, spec=spec, **block,
            )  # fmt: skip

        counted = tokens_that_count(packed_seq_params)
        outs, losses = [], []
        heads = max(query.shape[2], 0 if index_query is None else index_query.shape[2])
        budget = max(1, BLOCK_ELEMENTS // (heads * b))
        left = options.mask.window[0]
        width = count + (total if left < 0 else min(left, total))
        size = max(1, min(budget // max(width, 1), int(budget**0.5)))
        for local, rows in self._blocks(query.shape[0], size):
            ((begin, end),) = rows.ranges
            first, last = key_range(begin, end, total, options.mask.window)
            seen = end // self.ratio
            if spec.keep_mask is not None:  # dropout is drawn for all keys
                first, seen = 0, count
            own = None if counted is None else counted[:, local]
            block = partial(attend, begin, end, first, rows=rows, counted=own)
            of_queries = [
                None if x is None else x[local] for x in (query, index_query, index_weights)
            ]
            indexed = None if index_entries is None else index_entries[:seen]
            tensors = (*of_queries, entries[:seen], keys[first:last], indexed, options.sink)
            out, loss = recomputed(block, *tensors, use_reentrant=False, preserve_rng_state=False)
            outs.append(out)
            losses.append(loss)
        return self._with_loss(torch.cat(outs), losses, counted)

    def attend_to_cache(  # type: ignore[override]
        self,
        query: Tensor,
        cached: Sequence[Tensor],
        extra: Sequence[Tensor],
        *,
        hidden: Tensor | None,
    ) -> Tensor:
        """Attend with new tokens to the keys of a cache, and to the entries of its tokens.

        Args:
            cached: keys and values [b, 1, k, d], and projections of tokens [b, 1, k, c]: of the
                compressor and of the indexer's compressor, if the layer has them.
            extra: inputs of the core in addition to query, key and value.
            others: as in `DotProductAttention`.
        """
        keys = cached[0]
        s, b, k = query.shape[0], query.shape[1], keys.shape[2]
        count = k // self.ratio if self.ratio else 0
        if count:
            if hidden is None:
                hidden = torch.zeros(b, 1, s, 1, k, dtype=torch.bool, device=keys.device)
            # The last key that a query sees is its own.
            positions = (torch.arange(k, device=keys.device) * ~hidden).amax(-1)
            windows = Windows.of(k, self.ratio, None, keys.device)
            projected, *others = (x.squeeze(1).transpose(0, 1) for x in cached[2:])
            entries = self._entries(self.compressor, projected, windows)
            hidden_entries = windows.begins + self.ratio > positions.view(b, s, 1) + 1
            if self.indexer is not None:
                index_key = self._entries(self.indexer.linear_wk, others[0], windows)
                relu = self.config.dsa_indexer_scoring_relu
                scores = index_scores(extra[1], extra[2], index_key, relu)
                hidden_entries = ~choose_keys(scores, hidden_entries, self.topk)
            hidden = torch.cat((hidden_entries.view(b, 1, s, 1, count), hidden), -1)
            keys = torch.cat((entries.transpose(0, 1).unsqueeze(1), keys), 2)
        return DotProductAttention.attend_to_cache(self, query, (keys, keys), extra, hidden=hidden)

    def _entries(self, compressor: Any, projected: Tensor, windows: Windows) -> Tensor:
        """Return the rotated entries [w, b, d] of the projection [s, b, c] of a sequence."""
        entries = compressor.entries(projected, windows).unsqueeze(2)
        return self.rotated(entries, windows.begins.t()).squeeze(2)

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the last channels of x [s, b, n, d] at positions [s, 1 or b]."""
        cos, sin = self.rotary(positions, x, self.config.rope_interleave)
        return self.turned(x, cos, sin)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the last p channels of x [s, b, n, d] by angles [s, 1 or b, 1, p]."""
        how = {"interleaved": self.config.rope_interleave, "fuses": self.config.apply_rope_fusion}
        return rotate_last(x, cos, sin, **how)


class GroupedProjection(ParallelLayer):
    """Project each group of heads separately to r channels; ranks own whole groups.

    Args:
        input_size: channels of all heads; output_size: of all groups after the projection.
    """

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, num_groups: int,
        init_method: Any, tp_group: Any,
    ) -> None:  # fmt: skip
        super().__init__(config, tp_group=tp_group)
        self.num_groups = divide(num_groups, self.tp_size)
        shape = divide(output_size, self.tp_size), divide(input_size, num_groups)
        self.weight = self.new_parameter(*shape, init_method=init_method, split_dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return [s, b, g/tp * r] of the heads [s, b, n*d] of this rank."""
        heads, weight = x.unflatten(-1, (self.num_groups, -1)), self.weight
        weight = weight.unflatten(0, (self.num_groups, -1))
        return torch.einsum("sbgi,gri->sbgr", heads, weight).flatten(-2)


class CompressedSelfAttention(MLASelfAttention):
    """Projections around `CompressedAttention`: queries from a latent, one key for all heads, and
    the low-rank output projection of groups of heads."""

    core_attention: CompressedAttention

    def build_projections(self, submodules: MLASelfAttentionSubmodules) -> None:
        """Build the projections."""
        config, heads = self.config, self.config.num_attention_heads
        head, rank = config.v_head_dim, config.q_lora_rank
        assert rank is not None
        self.num_late_inputs = 2
        self.output_width = config.o_groups * config.o_lora_rank
        self.softmax_scale = config.attention_scale(head)
        column = {"gather_output": False, "bias": False, "skip_bias_add": False}
        of_norms: dict[str, Any] = {
            "is_sharded": config.sequence_parallel,
            "eps": config.latent_norm_epsilon,
        }
        self.linear_q_down_proj = self.linear(
            submodules.linear_q_down_proj, config.hidden_size, rank
        )
        self.q_layernorm = self.norm(submodules.q_layernorm, rank, **of_norms)
        self.linear_q_up_proj = self.linear(
            submodules.linear_q_up_proj, rank, heads * head, **column
        )
        norm = L2Norm if config.qk_layernorm else IdentityOp
        self.head_norm = norm(head, of_norms["eps"] or config.layernorm_epsilon)
        self.linear_kv_down_proj = self.linear(
            submodules.linear_kv_down_proj, config.hidden_size, head
        )
        self.kv_layernorm = self.norm(submodules.kv_layernorm, head, **of_norms)
        self.linear_group_proj = self.linear(
            submodules.linear_group_proj, heads * head, self.output_width,
            num_groups=config.o_groups,
        )  # fmt: skip
        self._dropped = None

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Project and rotate.

        Args:
            hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
            positions: [s, b] in the sequence; default the positions of this rank's tokens.
        Returns:
            query [s/cp, b, n, d], key and value [s/cp, b, 1, d], the further inputs of
            `CompressedAttention.forward`, cosine and sine of the positions.
        """
        rule = "self-attention projects keys and values from the queries' own sequence"
        given = {"key_value_states": key_value_states}
        refuse_given("CompressedSelfAttention", given, rule=rule, fix="leave it out")
        latent = self.q_layernorm(self.linear_q_down_proj(hidden_states)[0])
        query, _ = self.linear_q_up_proj(latent)
        query = self.head_norm(query.unflatten(-1, (self.num_attention_heads_per_partition, -1)))
        key = self.kv_layernorm(self.linear_kv_down_proj(hidden_states)[0])
        key = self._for_all_heads(key).unsqueeze(2)
        if positions is None:
            positions = positions_of(len(query), query.device, self.pg_collection.microbatch_cp)
        core = self.core_attention
        cos, sin = core.rotary(positions, query, self.config.rope_interleave)
        query, key = core.turned(query, cos, sin), core.turned(key, cos, sin)
        extra: list[Tensor] = []
        if core.compressor is not None:
            projected, _ = core.compressor(hidden_states)
            if self.config.sequence_parallel:
                # All ranks compute the same entries, so backward keeps a rank's own tokens.
                projected = gather_from_sequence_parallel_region(
                    projected, False, group=self.pg_collection.tp
                )
            extra.append(projected)
        if core.indexer is not None:
            index_query, weights, index_projected = core.indexer(hidden_states, latent, None)
            extra += [core.rotated(index_query, positions), weights, index_projected]
        return query, key, key, *extra, cos, sin

    def extra_cache_entries(self, extra: list[Tensor]) -> list[Tensor]:
        """Return the projections of compressors as one head, [s, b, 1, c]."""
        return [x.unsqueeze(2) for x in (*extra[:1], *extra[3:])]

    def after_core(self, attended: Tensor, *late: Tensor) -> Tensor:
        """Rotate the heads [s, b, n/tp * d] back, and project each group of heads."""
        cos, sin = late
        heads = attended.unflatten(-1, (self.num_attention_heads_per_partition, -1))
        return self.linear_group_proj(self.core_attention.turned(heads, cos, -sin).flatten(-2))
