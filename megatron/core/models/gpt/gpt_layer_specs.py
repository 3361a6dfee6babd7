"""Specs of GPT layers, for a backend."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.sparse_layer_specs import (
    block_sparse_attention,
    compressed_attention,
    sparse_attention,
)
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import resolve_group
from megatron.core.ssm.attention_and_mamba import beside_mamba
from megatron.core.ssm.mixers import RECURRENT_MIXERS
from megatron.core.ssm.recurrent_mixer import RecurrentMixerSubmodules
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.backend import Backend, LocalBackend, LocalFusedBackend
from megatron.core.transformer.config.layer_kinds import ATTENTION_AND_MLP, LINEAR, LayerKind
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
)
from megatron.core.transformer.replicated_linear import LinearPart, ReplicatedLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

FUSED_NORM_KEYS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Checkpoints name a norm after the linear layer that follows, as in backends that fuse the two, so
that every backend can load the same checkpoint."""
LATENT_NORM_KEYS = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""The norms of latents keep their own names in checkpoints."""


def gpt_layer_submodules(
    backend: Backend,
    *,
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    kind: LayerKind = ATTENTION_AND_MLP,
    attn_mask_type: AttnMaskType = AttnMaskType.causal,
    fuses_norms: bool = True,
) -> TransformerLayerSubmodules:
    """Return the parts of a GPT layer made of a backend's classes: dense, or with experts.

    Args:
        kind: mixer and MLP of the layer; with `num_experts` the MLP is a mixture of experts.
        attn_mask_type: mask of self-attention; encoders have `padding`.
        fuses_norms: norms may be fused with the linear layers that follow them.
    """
    has_both = kind.attends and bool(kind.recurrence)
    if has_both or not fuses_norms:
        backend = copy(backend)
        backend.norm_column_linear = None
    has_latents = multi_latent_attention and kind.attends
    # Several linear layers follow the norm.
    keeps_norm = has_latents or has_both or kind.is_sparse
    fused = backend.norm_column_linear
    norm = backend.norm if fused is None else IdentityOp
    norm_keys = dict(FUSED_NORM_KEYS)
    if kind.mixer == LINEAR:
        mixer = ModuleSpec(module=LinearPart)
        del norm_keys["input_layernorm."]
    elif kind.is_recurrent:
        mixer = _recurrent_mixer(backend, kind.mixer)
        norm_keys["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif kind.attends:
        attention = _latent_attention if has_latents else _attention
        mixer = attention(backend, qk_layernorm, attn_mask_type)
        if has_both:
            mixer = beside_mamba(mixer, _recurrent_mixer(backend, kind.recurrence))
        if kind.is_sparse:
            choosing = sparse_attention if has_latents else block_sparse_attention
            mixer = choosing(mixer, backend, qk_layernorm)
        if kind.is_compressed:
            mixer = compressed_attention(kind, backend, qk_layernorm, attn_mask_type)
    if keeps_norm:
        del norm_keys["input_layernorm."]
    if fused is not None:
        norm_keys = dict(LATENT_NORM_KEYS) if has_latents else {}
    mlp_parts = MLPSubmodules(
        linear_fc1=fused or backend.column_linear, linear_fc2=backend.row_linear
    )
    mlp = ModuleSpec(module=MLP, submodules=mlp_parts)
    if num_experts:
        mlp = _experts(backend, moe_grouped_gemm)
        norm_keys.pop("pre_mlp_layernorm.", None)  # router and experts follow
    if kind.mlp == LINEAR:
        mlp = ModuleSpec(module=LinearPart)
        norm_keys.pop("pre_mlp_layernorm.", None)
    parts = TransformerLayerSubmodules(sharded_state_dict_keys_map=norm_keys)
    if kind.mixer:
        parts.input_layernorm = backend.norm if keeps_norm or kind.mixer == LINEAR else norm
        parts.self_attention, parts.self_attn_bda = mixer, get_bias_dropout_add
        parts.post_self_attn_layernorm = backend.norm
    if kind.mlp:
        parts.pre_mlp_layernorm = backend.norm if num_experts or kind.mlp == LINEAR else norm
        parts.mlp, parts.mlp_bda = mlp, get_bias_dropout_add
        parts.post_mlp_layernorm = backend.norm
    return parts


def _experts(backend: Backend, grouped: bool) -> ModuleSpec:
    """A mixture-of-experts layer; its experts are computed together or sequentially.

    Sequential experts have local classes in every backend.
    """
    local, grouped_class = LocalBackend(), backend.grouped_linear
    routed = MLPSubmodules(linear_fc1=local.column_linear, linear_fc2=local.row_linear)
    one_by_one = ModuleSpec(module=SequentialMLP, submodules=routed)
    together = ModuleSpec(
        module=GroupedMLP,
        submodules=MLPSubmodules(linear_fc1=grouped_class, linear_fc2=grouped_class),
    )
    parts = MLPSubmodules(linear_fc1=backend.column_linear, linear_fc2=backend.row_linear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=together if grouped else one_by_one,
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=parts),
        ),
    )


def _attention(backend: Backend, qk_layernorm: bool, mask_type: AttnMaskType) -> ModuleSpec:
    head_norm = backend.norm if qk_layernorm else None
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": mask_type},
        submodules=SelfAttentionSubmodules(
            linear_qkv=backend.norm_column_linear or backend.column_linear,
            core_attention=backend.core_attention,
            linear_proj=backend.row_linear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )


def _recurrent_mixer(backend: Backend, mixer: str) -> ModuleSpec:
    return ModuleSpec(
        module=RECURRENT_MIXERS[mixer],
        submodules=RecurrentMixerSubmodules(
            in_proj=backend.norm_column_linear or backend.column_linear,
            out_proj=backend.row_linear,
        ),
    )


def _latent_attention(backend: Backend, qk_layernorm: bool, mask_type: AttnMaskType) -> ModuleSpec:
    """Multi-latent attention; with `qk_layernorm` the latents are normed."""
    fused = backend.norm_column_linear if qk_layernorm else None
    latent_norm = backend.norm if qk_layernorm and fused is None else IdentityOp
    up = fused or backend.column_linear
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": mask_type},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=backend.column_linear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=up,
            linear_gate_proj=backend.column_linear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=up,
            core_attention=backend.core_attention,
            linear_proj=backend.row_linear,
            q_layernorm=latent_norm,
            kv_layernorm=latent_norm,
        ),
    )


def get_gpt_layer_local_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    *,
    kind: LayerKind = ATTENTION_AND_MLP,
    fuses_norms: bool = True,
    **options: object,
) -> TransformerLayerSubmodules:
    """Return the parts of a layer in plain torch.

    Args:
        normalization, qk_l2_norm: accepted for compatibility; the config decides.
    """
    _refuse_unsupported(fp8, options)
    return gpt_layer_submodules(
        LocalBackend(),
        num_experts=num_experts,
        moe_grouped_gemm=moe_grouped_gemm,
        qk_layernorm=qk_layernorm,
        multi_latent_attention=multi_latent_attention,
        kind=kind,
        fuses_norms=fuses_norms,
    )


def get_gpt_layer_local_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the spec of a layer in plain torch; arguments of `get_gpt_layer_local_submodules`."""
    parts = get_gpt_layer_local_submodules(*args, **kwargs)
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def get_gpt_layer_with_transformer_engine_submodules(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    qk_l2_norm: bool = False,
    *,
    kind: LayerKind = ATTENTION_AND_MLP,
    fuses_norms: bool = True,
    **options: object,
) -> TransformerLayerSubmodules:
    """Return the parts of a layer with the parameter names of NVIDIA Transformer Engine.

    The classes are Transformer Engine's, or local ones if the library is not installed.
    """
    _refuse_unsupported(fp8, options)
    return gpt_layer_submodules(
        engine_or_local(),
        num_experts=num_experts,
        moe_grouped_gemm=moe_grouped_gemm,
        qk_layernorm=qk_layernorm,
        multi_latent_attention=multi_latent_attention,
        kind=kind,
        fuses_norms=fuses_norms,
    )


def engine_or_local() -> Backend:
    """Return the backend of Transformer Engine, or local classes with its parameter names."""
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        return transformer_engine.TransformerEngineBackend()
    return LocalFusedBackend()


def get_gpt_layer_with_transformer_engine_spec(*args: Any, **kwargs: Any) -> ModuleSpec:
    """Return the spec of a layer with Transformer Engine's parameter names.

    Args:
        normalization, qk_l2_norm: accepted for compatibility; the config decides.
    """
    parts = get_gpt_layer_with_transformer_engine_submodules(*args, **kwargs)
    return ModuleSpec(module=TransformerLayer, submodules=parts)


def get_gpt_decoder_layer_specs(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
) -> list[ModuleSpec]:
    """Return the spec of every layer of the model, in order.

    Raises:
        ConfigError: `normalization` differs from the config's.
    """
    if normalization not in (None, config.normalization):
        raise ConfigError(
            f"normalization={normalization!r} for a spec, but the config has"
            f" {config.normalization!r}.",
            rule="the config determines the norms of a model",
            flags=["--normalization"],
            fix=f"build the config with normalization={normalization!r}",
        )
    return _specs_of(config.layer_kinds(), config, use_transformer_engine, qk_l2_norm)


def _specs_of(
    kinds: Sequence[LayerKind],
    config: TransformerConfig,
    use_transformer_engine: bool,
    qk_l2_norm: bool = False,
) -> list[ModuleSpec]:
    """Return the spec of a layer of each kind."""
    make = (
        get_gpt_layer_with_transformer_engine_spec
        if use_transformer_engine
        else get_gpt_layer_local_spec
    )
    made = {
        kind: make(
            num_experts=config.num_moe_experts if kind.has_experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            qk_l2_norm=qk_l2_norm,
            kind=kind,
            fuses_norms=not (
                config.share_parallel_norm
                or config.laurel_rank
                or config.kv_source_layers
                or (config.reordered_norm and not kind.is_recurrent)
            ),
        )
        for kind in sorted(set(kinds))
    }
    return [made[kind] for kind in kinds]


def get_gpt_decoder_block_spec(
    config: TransformerConfig,
    use_transformer_engine: bool,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of the layers of one pipeline stage, and of the final norm."""
    specs = get_gpt_decoder_layer_specs(config, use_transformer_engine, normalization, qk_l2_norm)
    if pp_rank is None:
        pp_rank = resolve_group(None, "pp").rank()
    backend = engine_or_local() if use_transformer_engine else LocalBackend()
    here = pipeline_layout(config).layers(pp_rank, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[specs[layer] for layer in here], layer_norm=backend.norm
    )


def get_gpt_mtp_block_spec(
    config: TransformerConfig,
    spec: TransformerBlockSubmodules | ModuleSpec,
    use_transformer_engine: bool,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> ModuleSpec | None:
    """Return the spec of the multi-token-prediction layers; None if the config has none.

    Args:
        spec: spec of one layer, or of the layers of a stage. The last of them is used unless the
            hybrid pattern has its own layers for multi-token prediction.
    """
    if not config.mtp_num_layers:
        return None
    layer: Any
    if config.pattern is not None and config.pattern.later:
        layer = [
            _specs_of(kinds, config, use_transformer_engine) for kinds in config.prediction_kinds()
        ]
    elif isinstance(spec, TransformerBlockSubmodules):
        # Equal to the model's last layer, also on a stage without layers.
        layer = (spec.layer_specs or get_gpt_decoder_layer_specs(config, use_transformer_engine))[
            -1
        ]
    else:
        layer = spec
    parts = MultiTokenPredictionBlockSubmodules(transformer_layer=layer, norm=LocalBackend().norm)
    return ModuleSpec(module=MultiTokenPredictionBlock, submodules=parts)


def _refuse_unsupported(fp8: str | None, options: dict[str, Any]) -> None:
    """Raise `ConfigError` for kinds of layers that do not exist."""
    asked = {"fp8": fp8, **options}
    ignorable = {"kitchen_attention_backend", "normalization"}
    wanted = sorted(name for name, value in asked.items() if value and name not in ignorable)
    if wanted:
        raise ConfigError(
            f"{', '.join(wanted)} for a layer spec.",
            rule="layers compute in fp32, bf16 or fp16",
            flags=["--fp8-format"],
            fix="drop these arguments",
        )
