"""Widths of multi-latent attention and of the indexer of sparse attention. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.transformer.config.attention import LatentAttentionConfig, SparseAttentionConfig
from megatron.core.transformer.config.layer_kinds import LayerKind


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Widths of multi-latent attention; see `megatron.core.transformer.multi_latent_attention`."""

    query_latent: int
    """0 if queries are projected without a latent."""
    latent: int
    plain: int
    """Channels of a query/key head without rotary embedding."""
    rotary: int
    value: int

    @staticmethod
    def of(config: LatentAttentionConfig) -> LatentSizes | None:
        """Return the widths of a config; None without multi-latent attention."""
        if not config.multi_latent_attention:
            return None
        return LatentSizes(
            query_latent=config.q_lora_rank or 0,
            latent=config.kv_lora_rank,
            plain=config.qk_head_dim,
            rotary=config.qk_pos_emb_head_dim,
            value=config.v_head_dim,
        )

    @property
    def query(self) -> int:
        return self.plain + self.rotary

    @property
    def per_head(self) -> int:
        """Width of a head's query, key and value."""
        return 2 * self.query + self.value

    def matrices(self, hidden: int, heads: int) -> int:
        """Elements of the projections to queries, keys and values."""
        queries = heads * self.query
        if self.query_latent:
            down_and_up = hidden * self.query_latent + self.query_latent * queries
        else:
            down_and_up = hidden * queries
        keys = hidden * (self.latent + self.rotary)
        return down_and_up + keys + self.latent * heads * (self.plain + self.value)


@dataclass(frozen=True, kw_only=True)
class IndexerSizes:
    """The indexer of a layer with sparse attention; see `megatron.core.transformer.indexer`."""

    heads: int
    width: int
    topk: int
    """Number of keys that a query attends to."""

    @staticmethod
    def of(config: SparseAttentionConfig, kinds: Iterable[LayerKind]) -> IndexerSizes | None:
        """Return the sizes of a config; None if no layer has an indexer."""
        if not any(kind.is_sparse for kind in kinds):
            return None
        return IndexerSizes(
            heads=config.dsa_indexer_n_heads or 0,
            width=config.dsa_indexer_head_dim or 0,
            topk=config.dsa_indexer_topk or 0,
        )

    def matrices(self, hidden: int, query_latent: int) -> int:
        """Elements of the projections to queries, key and weights."""
        return query_latent * self.heads * self.width + hidden * (self.width + self.heads)
