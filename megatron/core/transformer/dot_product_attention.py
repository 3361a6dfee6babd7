"""Core attention of the local backend: softmax(q k^T * scale + mask) v.

Four ways to the same numbers, chosen per call:

- `context_parallel.context_parallel_attention` where ranks share the sequence, or documents do, and
  where the softmax has a sink or bounded scores;
- torch's `scaled_dot_product_attention` (flash kernels on GPUs);
- `cpu_block_attention` on the CPU;
- the explicit formula where neither applies: dropout with a layout-independent mask on
  accelerators, `apply_query_key_layer_scaling`, or `attention_backend` unfused or local.

Legend: s sequence, b micro-batch, n heads, g key/value groups, d head dim; heads are this rank's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.context_parallel import context_parallel_attention
from megatron.core.context_parallel.attention import ContextGroups
from megatron.core.device import current_device
from megatron.core.errors import ConfigError
from megatron.core.initialization import full_weight, initialization_is_deferred
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.cpu.block_attention import cpu_block_attention, hidden_keys
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.param_meta import ParamMeta, set_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rng import keyed_attention_keep_mask
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide, get_pg_rank, get_pg_size

CAUSAL_TYPES = (
    AttnMaskType.causal,
    AttnMaskType.padding_causal,
    AttnMaskType.causal_bottom_right,
)


class DotProductAttention(MegatronModule):
    """Scaled dot-product attention over this rank's heads.

    Its only parameter is `softmax_offset` [n/tp], with `softmax_type` "learnable".

    Communicates only under context parallelism, on `cp` or its levels `hcp`.

    Args:
        cp_comm_type: how ranks that share a sequence see each other's keys; None is "p2p".
        layer_number: 1-based, global; used by `apply_query_key_layer_scaling`.
        attn_mask_type: default mask of `forward`.
        attention_type: "self" or "cross"; makes no difference here.
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
        self.pg_collection = pg_collection or ProcessGroupCollection.current()
        self.attention_dropout = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        scale = softmax_scale if softmax_scale is not None else config.softmax_scale
        self.cp_comm_type = cp_comm_type or "p2p"
        self.context_groups = ContextGroups(
            self.pg_collection.cp, tuple(self.pg_collection.hcp or ())
        )
        self.softmax_offset = self._new_sink()
        assert config.kv_channels
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if scale is None else scale

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
                added to what `attn_mask_type` hides. None where the type says everything.
            attention_bias: added to the scaled scores, broadcastable to [b, n, sq, sk].
            packed_seq_params: which document each position of the whole sequence belongs to; a
                query sees its own.
        Returns:
            [sq, b, n*d].
        """
        mask_type = attn_mask_type or self.attn_mask_type
        window = self.window(mask_type)
        dropout = self.attention_dropout if self.training else 0.0
        is_split = get_pg_size(self.context_groups.cp) > 1
        # The other kernels for the CPU know one width of heads; multi-latent attention has two.
        has_two_widths = attention_mask is None and query.shape[-1] != value.shape[-1]
        caps = self.config.attn_logit_softcapping is not None
        uses_blocks = is_split or has_two_widths or caps or self.softmax_offset is not None
        if packed_seq_params is not None or uses_blocks:
            _refuse_matrices(attention_mask, attention_bias)
            return self._over_sequence(query, key, value, packed_seq_params, window, dropout)
        backend = self.config.attention_backend
        explicit = (
            backend in (AttnBackend.unfused, AttnBackend.local)
            or self.config.apply_query_key_layer_scaling
        )
        plain = attention_mask is None and attention_bias is None and query.shape[0] == key.shape[0]
        if plain and not explicit and query.device.type == "cpu" and backend == AttnBackend.auto:
            keep_mask = self._keep_mask(query, key, dropout) if dropout else None
            return cpu_block_attention(
                query, key, value, scale=self.softmax_scale, window=window, keep_mask=keep_mask
            )
        if explicit or dropout:
            return self._explicit(
                query, key, value, attention_mask, attention_bias, mask_type, dropout
            )
        return self._fused(query, key, value, attention_mask, attention_bias, mask_type)

    def _over_sequence(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed_seq_params: PackedSeqParams | None,
        window: tuple[int, int],
        dropout: float,
    ) -> Tensor:
        """Attend by blocks, with keys of other ranks and within documents."""
        s, b, n, _ = query.shape
        documents = None
        if packed_seq_params is not None:
            total = s * get_pg_size(self.context_groups.cp)
            documents = packed_seq_params.document_ids(b, total, query.device)
        return context_parallel_attention(
            query,
            key,
            value,
            scale=self.softmax_scale,
            sees=MaskSpec(window, documents),
            kind=self.cp_comm_type,
            groups=self.context_groups,
            dropout=dropout,
            first_head=get_pg_rank(self.pg_collection.tp) * n,
            sink=self.softmax_offset,
            softcap=self.config.attn_logit_softcapping,
        )

    def _new_sink(self) -> Tensor | None:
        """Return the scores [n/tp] of a key that every query sees and nothing comes from, or None.

        Learned ones are drawn like weights; each tensor-parallel rank owns those of its heads.
        """
        config, tp = self.config, self.pg_collection.tp
        if config.softmax_type == "vanilla":
            return None
        count, size = config.num_attention_heads, get_pg_size(tp)
        where = torch.device("cpu") if config.use_cpu_initialization else current_device()
        scores = torch.zeros(divide(count, size), dtype=config.params_dtype, device=where)
        if config.softmax_type == "off-by-one":
            return scores
        meta = ParamMeta(split_dim=0, split_axis="tp", init_method=config.init_method)
        sink = nn.Parameter(scores)
        set_param_meta(sink, meta)
        if config.perform_initialization and not initialization_is_deferred():
            assert config.init_method is not None
            with torch.no_grad():
                full = full_weight((count,), meta, config.init_method, where)
                sink.copy_(shard_of(full, meta, get_pg_rank(tp), size))
        return sink

    def window(self, mask_type: AttnMaskType) -> tuple[int, int]:
        """Return how many keys to its left and right a query may see; -1 is unlimited."""
        left, right = self.config.window_of(self.layer_number) or (-1, -1)
        return left, (0 if mask_type in CAUSAL_TYPES else right)

    def _hidden(
        self, num_queries: int, num_keys: int, mask_type: AttnMaskType, device: torch.device
    ) -> Tensor | None:
        """Return [sq, sk], True where type and window hide a key; None if nowhere."""
        first = num_keys - num_queries if mask_type == AttnMaskType.causal_bottom_right else 0
        end = first + num_queries
        return hidden_keys(first, end, 0, num_keys, self.window(mask_type), device)

    def _keep_mask(self, query: Tensor, key: Tensor, dropout: float) -> Tensor:
        """Return [b, n, sq, sk]: 0 where a probability is dropped, 1/(1-p) elsewhere."""
        sq, b, n, _ = query.shape
        keep = 1.0 - dropout
        mask = keyed_attention_keep_mask(
            (b, n, sq, key.shape[0]),
            keep,
            first_head=get_pg_rank(self.pg_collection.tp) * n,
            dtype=query.dtype,
            device=query.device,
        )
        return mask.div_(keep)

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None,
        mask_type: AttnMaskType,
    ) -> Tensor:
        """Attend through torch's kernel, which takes any strides: [s, b, n, d] is not copied."""
        sq, b, n, d = query.shape
        sk, g = key.shape[0], key.shape[2]
        is_causal = self.window(mask_type) == (-1, 0) and sq == sk and attention_mask is None
        is_causal = is_causal and attention_bias is None
        mask = None
        if not is_causal:
            mask = attention_mask
            hidden = self._hidden(sq, sk, mask_type, query.device)
            if hidden is not None:
                mask = hidden if mask is None else mask | hidden
            if attention_bias is not None:
                bias = attention_bias.to(query.dtype)
                mask = bias if mask is None else bias.masked_fill(mask, float("-inf"))
            elif mask is not None:
                mask = ~mask  # torch: True takes part
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            key.permute(1, 2, 0, 3),
            value.permute(1, 2, 0, 3),
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.softmax_scale,
            enable_gqa=n != g,
        )
        return out.permute(2, 0, 1, 3).reshape(sq, b, n * d)

    def _explicit(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attention_bias: Tensor | None,
        mask_type: AttnMaskType,
        dropout: float,
    ) -> Tensor:
        """Attend by the formula, with the full matrix of scores."""
        sq, b, n, d = query.shape
        sk, g = key.shape[0], key.shape[2]
        if g != n:
            key, value = (t.repeat_interleave(n // g, dim=2) for t in (key, value))
        # Division by the layer number keeps fp16 scores in range; the softmax, in fp32, undoes it.
        damping = self.layer_number if self.config.apply_query_key_layer_scaling else 1
        q, k, v = (t.permute(1, 2, 0, 3).reshape(b * n, t.shape[0], d) for t in (query, key, value))
        unused = q.new_empty(1).expand(b * n, sq, sk)
        scores = torch.baddbmm(
            unused, q, k.transpose(1, 2), beta=0, alpha=self.softmax_scale / damping
        ).view(b, n, sq, sk)
        if self.config.attention_softmax_in_fp32 or damping != 1:
            scores = scores.float()
        if damping != 1:
            scores = scores * damping
        if attention_bias is not None:
            scores = scores + attention_bias
        hidden = self._hidden(sq, sk, mask_type, query.device)
        for mask in (hidden, attention_mask):
            if mask is not None:
                scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        probabilities = torch.softmax(scores, -1).to(query.dtype)
        if dropout:
            probabilities = probabilities * self._keep_mask(query, key, dropout)
        out = torch.bmm(probabilities.view(b * n, sq, sk), v)
        return out.view(b, n, sq, d).permute(2, 0, 1, 3).reshape(sq, b, n * d)


def _refuse_matrices(attention_mask: Tensor | None, attention_bias: Tensor | None) -> None:
    """Raise if a [sq, sk] mask or bias came where no such matrix is ever formed."""
    if attention_mask is not None or attention_bias is not None:
        name = "an attention_mask" if attention_mask is not None else "an attention_bias"
        raise ConfigError(
            f"{name} reached an attention over a split or packed sequence.",
            rule="there, and with a softmax_type or a bound of scores of its own, the mask is told"
            " by its type, the window and the documents: a matrix [s, s] would outgrow all else",
            flags=[
                "--context-parallel-size",
                "--reset-attention-mask",
                "--softmax-type",
                "--attn-logit-softcapping",
            ],
            fix="pass the documents as packed_seq_params (PackedSeqParams(seq_idx=...))",
        )
