"""Specs of attention to the keys, blocks of keys or compressed entries that an indexer chooses."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.transformer.backend import Backend
from megatron.core.transformer.compressed_attention import (
    CompressedAttention,
    CompressedAttentionSubmodules,
    CompressedSelfAttention,
    Compressor,
    GroupedProjection,
)
from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.indexer import IndexerSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.norm import NORMS
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.sparse_attention import (
    SparseAttention,
    SparseLatentAttention,
    SparseSelfAttention,
)
from megatron.core.transformer.spec_utils import ModuleSpec


def sparse_attention(spec: ModuleSpec, backend: Backend, qk_layernorm: bool) -> ModuleSpec:
    """Return multi-latent attention to keys chosen by an indexer, which reads the normed latent.

    Args:
        spec: of attention to all keys.
    """
    parts = replace(
        spec.submodules,
        linear_q_up_proj=backend.column_linear,
        q_layernorm=backend.norm if qk_layernorm else IdentityOp,
        core_attention=ModuleSpec(
            module=SparseAttention,
            submodules=IndexerSubmodules(
                linear_wq_b=ReplicatedLinear,
                linear_wk=ReplicatedLinear,
                k_norm=NORMS["LayerNorm"],
                input_norm=NORMS["LayerNorm"],
                linear_weights_proj=ReplicatedLinear,
            ),
        ),
    )
    return replace(spec, module=SparseLatentAttention, submodules=parts)


def block_sparse_attention(spec: ModuleSpec, backend: Backend, _qk_layernorm: bool) -> ModuleSpec:
    """Return attention to blocks of keys, chosen by an indexer whose heads are normed.

    Args:
        spec: of attention to all keys.
    """
    indexer = IndexerSubmodules(
        linear_wq_b=ReplicatedLinear,
        linear_wk=ReplicatedLinear,
        q_norm=NORMS["RMSNorm"],
        k_norm=NORMS["RMSNorm"],
    )
    parts = replace(
        spec.submodules,
        linear_qkv=backend.column_linear,
        core_attention=ModuleSpec(module=SparseAttention, submodules=indexer),
    )
    return replace(spec, module=SparseSelfAttention, submodules=parts)


def compressed_attention(
    kind: LayerKind, backend: Backend, qk_layernorm: bool, mask_type: AttnMaskType
) -> ModuleSpec:
    """Return attention to a window and to compressed entries, which an indexer may choose."""
    norm = backend.norm if qk_layernorm else IdentityOp
    compressor = ModuleSpec(module=Compressor, params={"ratio": kind.compress_ratio})
    core = CompressedAttentionSubmodules(
        linear_wq_b=ReplicatedLinear,
        linear_wk=compressor,
        k_norm=IdentityOp,
        linear_weights_proj=ReplicatedLinear,
        compressor=compressor,
    )
    return ModuleSpec(
        module=CompressedSelfAttention,
        params={"attn_mask_type": mask_type},
        submodules=MLASelfAttentionSubmodules(
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=backend.column_linear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_group_proj=GroupedProjection,
            linear_proj=backend.row_linear,
            core_attention=ModuleSpec(module=CompressedAttention, submodules=core),
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
