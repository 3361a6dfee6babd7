"""Core attention of the local backend: softmax(q k^T * scale + mask) v.

Three ways to the same numbers, chosen per call:

- torch's `scaled_dot_product_attention` (flash kernels on GPUs);
- `blocked_attention` on the CPU;
- the explicit formula where neither applies: dropout with a layout-independent mask on
  accelerators, `apply_query_key_layer_scaling`, or `attention_backend` unfused or local.

Legend: s sequence, b micro-batch, n heads, g key/value groups, d head dim; heads are this rank's.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rng import keyed_attention_keep_mask
from megatron.core.transformer.blocked_attention import blocked_attention, hidden_keys
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_rank

CAUSAL_TYPES = (
    AttnMaskType.causal,
    AttnMaskType.padding_causal,
    AttnMaskType.causal_bottom_right,
)


class DotProductAttention(MegatronModule):
    """Scaled dot-product attention over this rank's heads; no parameters, no communication.

    Args:
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
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, n, d].
            key, value: [sk, b, g, d]; query head i uses group i // (n/g).
            attention_mask: bool, True where a key is hidden, broadcastable to [b, n, sq, sk];
                added to what `attn_mask_type` hides. None where the type says everything.
            attention_bias: added to the scaled scores, broadcastable to [b, n, sq, sk].
        Returns:
            [sq, b, n*d].
        """
        if packed_seq_params is not None:
            raise ConfigError(
                "packed sequences (packed_seq_params) reached the local attention.",
                rule="the local attention takes batches of equally long sequences",
                flags=["--attention-backend"],
                fix="pass an attention_mask that separates the documents instead",
            )
        mask_type = attn_mask_type or self.attn_mask_type
        window = self._window(mask_type)
        dropout = self.attention_dropout if self.training else 0.0
        backend = self.config.attention_backend
        explicit = (
            backend in (AttnBackend.unfused, AttnBackend.local)
            or self.config.apply_query_key_layer_scaling
        )
        plain = attention_mask is None and attention_bias is None and query.shape[0] == key.shape[0]
        if plain and not explicit and query.device.type == "cpu" and backend == AttnBackend.auto:
            keep_mask = self._keep_mask(query, key, dropout) if dropout else None
            return blocked_attention(
                query, key, value, scale=self.softmax_scale, window=window, keep_mask=keep_mask
            )
        if explicit or dropout:
            return self._explicit(
                query, key, value, attention_mask, attention_bias, mask_type, dropout
            )
        return self._fused(query, key, value, attention_mask, attention_bias, mask_type)

    def _window(self, mask_type: AttnMaskType) -> tuple[int, int]:
        left, right = self.config.window_size or (-1, -1)
        return left, (0 if mask_type in CAUSAL_TYPES else right)

    def _hidden(
        self, num_queries: int, num_keys: int, mask_type: AttnMaskType, device: torch.device
    ) -> Tensor | None:
        """Return [sq, sk], True where type and window hide a key; None if nowhere."""
        first = num_keys - num_queries if mask_type == AttnMaskType.causal_bottom_right else 0
        end = first + num_queries
        return hidden_keys(first, end, 0, num_keys, self._window(mask_type), device)

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
        is_causal = self._window(mask_type) == (-1, 0) and sq == sk and attention_mask is None
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
