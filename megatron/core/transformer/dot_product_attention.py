"""Core attention of the local backend: softmax(q k^T * scale + mask) v.

The kernel is chosen for each call from `kernels.attention.ATTENTION`.

Legend: s sequence, b micro-batch, n heads, g key/value groups, d head dim; heads are this rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import attend_in_units, context_parallel_attention
from megatron.core.context_parallel.attention import ContextParallelGroups
from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.attention import choose_attention
from megatron.core.kernels.attention_options import AttentionKernel, AttentionOptions
from megatron.core.kernels.batch_invariant_attention import (
    batch_invariant_attention,
    batch_invariant_kernel,
)
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.torch_attention import kv_cache_attention
from megatron.core.packed_seq_params import Documents, PackedSeqParams
from megatron.core.parameters.param_meta import in_rows
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.context import current_step
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer, device_of_parameters
from megatron.core.tensor_parallel.unit_products import in_full_vectors
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

CAUSAL_TYPES = (
    AttnMaskType.causal,
    AttnMaskType.padding_causal,
    AttnMaskType.causal_bottom_right,
)


PADDING_SCORE = 1e4
"""Scores of padding are minus this number before scaling; the largest fp16 number is 65504."""


class DotProductAttention(MegatronModule):
    """Scaled dot-product attention over this rank's heads.

    Its only parameter is `softmax_offset` [n/tp], with `softmax_type` "learnable".

    Communicates only under context parallelism, on `cp` or its levels `hcp`.

    Args:
        cp_comm_type: how context-parallel ranks exchange keys and values; default "p2p".
        layer_number: 1-based, global; used by `apply_query_key_layer_scaling`.
        attn_mask_type: default mask of `forward`.
        attention_type: "self" or "cross"; accepted for compatibility.
        attention_dropout: overrides `config.attention_dropout`.
        softmax_scale: overrides `config.softmax_scale`.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = max(1, layer_number)
        self.attn_mask_type = attn_mask_type
        self.attention_type = attention_type
        self.pg_collection = resolve_groups(pg_collection)
        self.attention_dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.cp_comm_type = cp_comm_type or "p2p"
        self.backend = asked_backend(config)
        self.softmax_offset = self._new_sink()
        self.max_logits: Tensor | None = None
        """fp32 [n/tp]: the largest score of each head since the reader reset this to None."""
        assert config.kv_channels
        self.softmax_scale = config.attention_scale(config.kv_channels) if scale is None else scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, n, d]; under context parallelism this rank's zigzag part, like the keys.
            key, value: [sk, b, g, d]; query head i uses group i // (n/g).
            attention_mask: bool, True where a key is hidden, broadcastable to [b, n, sq, sk];
                combined with the mask of `attn_mask_type`.
            attention_bias: added to the scaled scores, broadcastable to [b, n, sq, sk].
            packed_seq_params: the document of each position of the whole sequence; a query attends
                to its own document.
        Returns:
            [sq, b, n*d].
        """
        mask_type = attn_mask_type or self.attn_mask_type
        options = self._options(query, mask_type, packed_seq_params, attention_mask, attention_bias)
        if options.max_logits is not None:
            query, key = without_padding(query, key, packed_seq_params)
        if mask_type == AttnMaskType.causal_bottom_right:
            options = replace(options, first_query=key.shape[0] - query.shape[0])
        if self.config.batch_invariant_mode:
            return attend_to_each_document(query, key, value, options)
        groups = self.context_groups
        num_units = self._sequence_units(query, key, groups.cp.size())
        comm_type = self.cp_comm_type if max(groups.cp.size(), num_units) > 1 else None
        kernel = choose_attention(
            query, key, value, options, backend=self.backend, comm_type=comm_type
        ).kernel
        if num_units > 1:
            return attend_in_units(
                query,
                key,
                value,
                options,
                group=groups.cp,
                num_units=num_units,
                attend=self._attend_in_units,
            )
        if self.config.layout_invariant_mode:
            if options.sink is not None:
                options = replace(options, sink=in_rows(options.sink, options.sink.shape))
            return self._attend_in_units(kernel.run, query, key, value, options)
        if comm_type is None:
            return kernel.run(query, key, value, options)
        return context_parallel_attention(
            query,
            key,
            value,
            options,
            cp_comm_type=comm_type,
            groups=groups,
            kernel=kernel.run,
        )

    def attend_to_cache(
        self,
        query: Tensor,
        cached: Sequence[Tensor],
        extra: Sequence[Tensor],
        *,
        hidden: Tensor | None,
    ) -> Tensor:
        """Attend with new tokens to the keys of a cache.

        Args:
            query: [s, b, n, d].
            cached: keys [b, g, k, d], values [b, g, k, e] and extra entries of the cache.
            extra: inputs of the core in addition to query, key and value.
            hidden: [b, 1, s, 1, k], True where a key is hidden; None hides no key.
        Returns:
            [s, b, n*e].
        """
        keys, values = cached[:2]
        is_invariant = self.config.batch_invariant_mode
        attend = batch_invariant_attention if is_invariant else kv_cache_attention
        return attend(
            query,
            keys,
            values,
            scale=self.softmax_scale,
            hidden=hidden,
            sink=self.softmax_offset,
            softcap=self.config.attn_logit_softcapping,
        )

    def _attend_in_units(
        self,
        run: AttentionKernel,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: AttentionOptions,
    ) -> Tensor:
        """Attend with the heads of one unit at a time: kernels choose their algorithm by the number
        of heads, which depends on the layout."""
        groups = self.config.num_query_groups or self.config.num_attention_heads
        units = math.gcd(groups, self.config.tensor_units)
        count = max(units // self.pg_collection.tp.size(), 1)
        heads = query.shape[2] // count
        split = [[part.contiguous() for part in x.chunk(count, 2)] for x in (query, key, value)]
        outputs, scope = [], rng_state().scope
        for n, parts in enumerate(zip(*split, strict=True)):
            current_step().random_scope = scope  # the draws of all heads are one draw
            query, key, value = parts
            outputs.append(run(query, key, value, options.of_heads(n * heads, (n + 1) * heads)))
        return torch.cat(outputs, -1)

    def _sequence_units(self, query: Tensor, key: Tensor, cp_size: int) -> int:
        """Return this rank's units of a sequence; in one process a prompt of any length is one."""
        if self.config.sequence_units == 1:
            return 1
        count = divide(self.config.sequence_units, cp_size)
        is_cut = len(query) == len(key) and len(query) % count == 0
        return count if is_cut or cp_size > 1 else 1

    @property
    def context_groups(self) -> ContextParallelGroups:
        """The ranks that share the sequences of the running micro batch."""
        groups = self.pg_collection
        cp = groups.microbatch_cp
        return ContextParallelGroups(cp, groups.hcp if cp is groups.cp else ())

    def _options(
        self,
        query: Tensor,
        mask_type: AttnMaskType,
        packed: PackedSeqParams | None,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None,
    ) -> AttentionOptions:
        s, b, heads, _ = query.shape
        document_ids = None
        if packed is not None:
            total = s * self.context_groups.cp.size()
            document_ids = packed.resolve(b, total, query.device).ids
        config = self.config
        if chunk := config.chunk_of(self.layer_number):
            total = s * self.context_groups.cp.size()
            positions = torch.arange(total, device=query.device).expand(b, total)
            ids = torch.zeros_like(positions) if document_ids is None else document_ids.contiguous()
            in_document = positions - torch.searchsorted(ids, ids)
            document_ids = ids * -(-total // chunk) + in_document // chunk
        return AttentionOptions(
            scale=self.softmax_scale,
            mask=MaskSpec(self.window(mask_type), document_ids),
            attention_mask=attention_mask,
            attention_bias=attention_bias,
            dropout=self.attention_dropout if self.training else 0.0,
            first_head=self.pg_collection.tp.rank() * heads,
            sink=self.softmax_offset,
            softcap=config.attn_logit_softcapping,
            layer_scaling=self.layer_number if config.apply_query_key_layer_scaling else 1,
            softmax_in_fp32=config.attention_softmax_in_fp32,
            max_logits=self._recorded_max_logits(query) if config.records_max_logits else None,
        )

    def _recorded_max_logits(self, query: Tensor) -> Tensor | None:
        """Return the buffer of the largest scores [n/tp] of the step; None in evaluation."""
        if not self.training:
            return None
        if self.max_logits is None:
            lowest = torch.finfo(torch.float32).min
            size, device = query.shape[2], query.device
            self.max_logits = torch.full((size,), lowest, dtype=torch.float32, device=device)
        return self.max_logits

    def _new_sink(self) -> Tensor | None:
        """Return the scores [n/tp] of the attention sink, a key without a value, or None.

        Learned scores are drawn like weights; each tensor-parallel rank owns the scores of its
        heads.
        """
        config, tp = self.config, self.pg_collection.tp
        if config.softmax_type == "vanilla":
            return None
        count = divide(config.num_attention_heads, tp.size())
        if config.softmax_type == "off-by-one":
            where = device_of_parameters(config)
            return torch.zeros(count, dtype=config.params_dtype, device=where)
        layer = ParallelLayer(config, tp_group=tp)
        return layer.new_parameter(count, init_method=config.init_method, split_dim=0)

    def window(self, mask_type: AttnMaskType) -> tuple[int, int]:
        """Return how many keys to its left and right a query attends to; -1 is unlimited."""
        left, right = self.config.window_of(self.layer_number) or (-1, -1)
        return left, (0 if mask_type in CAUSAL_TYPES else right)


def asked_backend(config: TransformerConfig) -> str:
    """Return the requested attention backend: a value of `--attention-backend`."""
    # Layer scaling is useful only for kernels that hold scores in the activations' dtype.
    return "unfused" if config.apply_query_key_layer_scaling else config.attention_backend.name


def attend_to_each_document(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
) -> Tensor:
    """Attend independently of the batch, with packed documents as sequences of a padded batch.

    A mask, a bias or dropout belongs to the whole row: then the row stays one sequence.

    Args: see `AttentionKernel`.
    """
    ids, whole = options.mask.document_ids, (options.attention_mask, options.attention_bias)
    if ids is None or whole != (None, None) or options.dropout:
        return batch_invariant_kernel(query, key, value, options)
    documents = Documents(seq_idx=ids)
    number, count = documents.numbered
    at = documents.positions.t(), number.t()  # [s, b] each
    longest = int(at[0].max()) + 1
    parts = [
        x.new_zeros(longest, count, *x.shape[2:]).index_put(at, x) for x in (query, key, value)
    ]
    alone = replace(options, mask=MaskSpec(options.mask.window))
    return batch_invariant_kernel(parts[0], parts[1], parts[2], alone)[at]


def without_padding(
    query: Tensor, key: Tensor, packed: PackedSeqParams | None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [s/cp, b, n, d] whose largest score belongs to tokens, not padding.

    Padding is a separate document whose outputs are not used: its queries and keys are overwritten,
    so that their scores are below all others.
    """
    if not isinstance(packed, Documents) or packed.padding_mask is None:
        return query, key
    is_padding = packed.padding_mask.t()[..., None, None]
    far = PADDING_SCORE**0.5 / query.shape[-1] ** 0.5
    return query.masked_fill(is_padding, far), key.masked_fill(is_padding, -far)


def reader_of_cache(core: object) -> DotProductAttention:
    """Return a core attention that reads a cache of keys and values.

    Raises:
        ConfigError: it cannot.
    """
    if isinstance(core, DotProductAttention):
        return core
    raise ConfigError(
        f"{type(core).__name__} cannot attend to a cache.",
        rule="only the attention of the local backend reads a cache",
        flags=["--transformer-impl"],
        fix="use --transformer-impl local to generate; checkpoints are the same",
    )


GATES: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softplus": F.softplus}
"""Value of `attention_gate_activation` -> function."""


def gated(
    attended: Tensor,
    gate: Tensor | None = None,
    *,
    in_vectors: bool = False,
    act: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> Tensor:
    """Return attended * act(gate); without a gate `attended`.

    Args:
        attended: [s, b, n/tp * d].
        gate: of each channel [s, b, n/tp * d], or of each head [s, b, n/tp].
        in_vectors: see `in_full_vectors`.
    """
    if gate is None:
        return attended
    # In fp32: near 1 the sigmoid has at most 8 significant bits in half precision.
    logits = gate.float()
    if in_vectors:
        weights = in_full_vectors(act, logits.flatten()).view(gate.shape)
    else:
        weights = act(logits)
    parts = attended.unflatten(-1, (gate.shape[-1], -1))
    return (parts * weights.unsqueeze(-1)).flatten(-2).to(attended.dtype)
