"""DeepSeek V4: attention to compressed entries, residual streams, first layers routed by token id.

DeepSeek-AI, "DeepSeek-V4", section 2. The layers that predict later tokens are left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.transformer.config.layer_kinds import COMPRESSED_ATTENTION
from megatron.hugging_face.config_fields import ConfigFields
from megatron.hugging_face.families.deepseek import with_expert_layers, with_experts
from megatron.hugging_face.families.experts import OF_BALANCE
from megatron.hugging_face.families.family import Family
from megatron.hugging_face.families.llama import GATED, LLAMA, gated_settings
from megatron.hugging_face.model_description import ModelDescription
from megatron.hugging_face.rope import rope_fields, rope_parameters, with_rope_parameters
from megatron.hugging_face.weight_map import WeightRule, concat, identity, renamed

_MEGATRON, _HF = "decoder.layers.{}.", "model.layers.{}."
_KINDS = _WINDOW, _INDEXED, _ALL = (
    "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
)  # fmt: skip
_KIND_OF_RATIO = {0: _WINDOW, 4: _INDEXED, 128: _ALL}
_MLPS = ("moe", "hash_moe")
_SIZES = {
    "q_lora_rank": "q_lora_rank", "o_groups": "o_groups", "o_lora_rank": "o_lora_rank",
    "index_head_dim": "dsa_indexer_head_dim", "index_n_heads": "dsa_indexer_n_heads",
    "index_topk": "dsa_indexer_topk", "hc_mult": "mhc_num_residual_streams",
    "hc_eps": "mhc_epsilon", "hc_sinkhorn_iters": "mhc_sinkhorn_iterations",
    "swiglu_limit": "activation_func_clamp_value",
}  # fmt: skip
"""Field -> setting."""


def _ratios(config: ConfigFields, layers: int) -> tuple[list[int], int]:
    """Return the ratio of each layer, and the ratio of layers with an indexer."""
    rates = {_WINDOW: 0, _INDEXED: 4, _ALL: 128} | config.take("compress_rates", {})
    for kind, older in ((_INDEXED, "compress_rate_csa"), (_ALL, "compress_rate_hca")):
        rates[kind] = config.take(older, rates[kind])
    usual = [_ALL] * 2 + [(_ALL, _INDEXED)[n % 2] for n in range(layers)]
    older = config.take("compress_ratios", None)
    if older is not None:
        usual = [_KIND_OF_RATIO[ratio] for ratio in older]
    kinds = config.take("layer_types", usual)[:layers]
    if set(kinds) - set(_KINDS):
        config.only("layer_types", *_KINDS)
    if rates[_ALL] == rates[_INDEXED]:
        config.only("compress_rates", "two different rates")
    return [rates[kind] for kind in kinds], rates[_INDEXED]


def _num_hashed(config: ConfigFields, layers: int) -> int:
    """Return the number of first layers that are routed by token id."""
    count = min(config.take("num_hash_layers", 3), layers)
    kinds = config.take("mlp_layer_types", [_MLPS[n < count] for n in range(layers)])[:layers]
    count = kinds.count(_MLPS[1])
    if kinds != [_MLPS[n < count] for n in range(layers)]:
        config.only("mlp_layer_types", "hash_moe in the first layers alone")
    return count


def _with_rope(model: ModelDescription, config: ConfigFields) -> ModelDescription:
    """Return `model` with the two kinds of rotary positions; cosine and sine have no factor."""
    head, stated = config.take("head_dim"), rope_parameters(config)
    share = config.take("partial_rotary_factor", config.take("qk_rope_head_dim", head / 8) / head)
    width = int(head * share)
    config.only("qk_rope_head_dim", width)
    both = {"rope_theta": config.take("rope_theta", 1e4)}, {"rope_theta": config.take(
        "compress_rope_theta", 1.6e5)}  # fmt: skip
    main, entries = (stated.pop(name, None) for name in ("main", "compress"))
    if not (isinstance(main, dict) and isinstance(entries, dict)):
        main, other = both
        entries = {"attention_factor": 1.0, **stated, **other}
    source, parts = f"rope_parameters in {config.source}", []
    for part, kinds in ((main, ("default",)), (entries, ("default", "yarn"))):
        fields = ConfigFields(part, source, {"attention_factor": "the factor of YaRN"})
        kind = fields.only("rope_type", *kinds) or fields.only("type", *kinds)
        fields.only("partial_rotary_factor", share)
        if kind == "yarn":
            fields.only("attention_factor", 1.0)
        for name in part:
            fields.take(name, None)  # read below
        fields.finish()
        unread = ("partial_rotary_factor", "attention_factor", "mscale", "mscale_all_dim")
        part = {name: value for name, value in part.items() if name not in unread}
        parts.append(with_rope_parameters(model, part, source))
    return replace(
        parts[1],
        position_embedding_type="rope",
        rotary_base=parts[0].rotary_base,
        csa_compress_rotary_base=parts[1].rotary_base,
        qk_pos_emb_head_dim=width,
        qk_head_dim=head - width,
        v_head_dim=head,
        kv_lora_rank=head,
    )


def _settings(config: ConfigFields) -> ModelDescription:
    width = config.take("moe_intermediate_size")
    config.only("num_key_value_heads", 1)
    view = config.with_fields({"intermediate_size": width, "num_key_value_heads": None})
    model = with_experts(_with_rope(gated_settings(view), config), config)
    ratios, indexed = _ratios(config, model.num_layers)
    return replace(
        model,
        kv_channels=None,
        swiglu=True,
        multi_latent_attention=True,
        qk_layernorm=True,
        experimental_attention_variant=COMPRESSED_ATTENTION,
        window_size=(config.take("sliding_window") - 1, 0),
        csa_compress_ratios=ratios,
        csa_indexed_ratio=indexed,
        softmax_type="learnable",
        moe_n_hash_layers=_num_hashed(config, model.num_layers),
        moe_router_score_function="sqrtsoftplus",
        moe_router_enable_expert_bias=True,
        enable_mhc_connections=True,
        mhc_learned_contraction=True,
        **config.take_all(_SIZES),
    )


def _fields(model: ModelDescription) -> dict[str, Any]:
    indexed, head = model.csa_indexed_ratio, model.v_head_dim
    ratios = [model.compress_ratio(n + 1) for n in range(model.num_layers)]
    rates = {0: _WINDOW, indexed: _INDEXED}
    other = next((ratio for ratio in ratios if ratio not in rates), 128 if indexed != 128 else 4)
    fields = LLAMA.fields(model)
    plain, scaled = fields.pop("rope_theta"), rope_fields(model)["rope_scaling"]
    del fields["rope_scaling"]
    share = {"partial_rotary_factor": model.qk_pos_emb_head_dim / head}
    entries = {**(scaled or {"rope_type": "default"}), **share,
               "rope_theta": float(model.csa_compress_rotary_base)}  # fmt: skip
    entries |= {"attention_factor": 1.0} if scaled else {}
    main = {"rope_type": "default", "rope_theta": plain, **share}
    width = model.experts_width
    return {
        **fields,
        **model.fields(_SIZES),
        **share,
        "rope_parameters": {"main": main, "compress": entries},
        "num_key_value_heads": 1,
        "head_dim": head,
        "moe_intermediate_size": width,
        "n_routed_experts": model.num_moe_experts or 1,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "num_experts_per_tok": model.moe_router_topk,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "sliding_window": (model.window_size or (0, 0))[0] + 1,
        "layer_types": [rates.get(ratio, _ALL) for ratio in ratios],
        "compress_rates": {_INDEXED: indexed, _ALL: other},
        "mlp_layer_types": [_MLPS[n < model.moe_n_hash_layers] for n in range(model.num_layers)],
    }


def _compressor(here: str, there: str, layers: tuple[int, ...]) -> list[WeightRule]:
    """Return the rules of a compressor, by the prefixes of its tensors."""
    rules = [
        concat(here + "weight", there + "wkv.weight", there + "wgate.weight"),
        identity(here + "position_bias", there + "ape"),
        identity(here + "norm.weight", there + "norm.weight"),
    ]
    return [replace(rule, layers=layers) for rule in rules]


def _rules(model: ModelDescription) -> list[WeightRule]:
    layers = range(model.num_layers)
    ratios = [model.compress_ratio(n + 1) for n in layers]
    indexed = tuple(n for n in layers if ratios[n] == model.csa_indexed_ratio)
    others = tuple(n for n in layers if ratios[n] and n not in indexed)
    hashed = tuple(layers)[: model.moe_n_hash_layers]
    dense = [rule for rule in LLAMA.rules(model) if ".self_attention." not in rule.megatron_name]
    rules = [
        replace(rule, layers=tuple(layers)[len(hashed) :]) if "expert_bias" in rule.megatron_name
        else rule for rule in with_expert_layers(dense, model, "ffn", ("w1", "w3", "w2"))
    ]  # fmt: skip
    here, core = _MEGATRON + "self_attention.", _MEGATRON + "self_attention.core_attention."
    weights = {"linear_q_down_proj": "wq_a", "q_layernorm": "q_norm", "linear_q_up_proj": "wq_b",
               "linear_kv_down_proj": "wkv", "kv_layernorm": "norm", "linear_group_proj": "wo_a",
               "linear_proj": "wo_b"}  # fmt: skip
    rules += [identity(f"{here}{a}.weight", f"{_HF}attn.{b}.weight") for a, b in weights.items()]
    rules += [
        identity(_MEGATRON + "input_layernorm.weight", _HF + "attn_norm.weight"),
        identity(core + "softmax_offset", _HF + "attn.attn_sink"),
    ]
    for kind in (indexed, others):
        rules += _compressor(core + "compressor.", _HF + "attn.compressor.", kind)
    rules += _compressor(core + "indexer.linear_wk.", _HF + "attn.indexer.compressor.", indexed)
    for a, b in (("linear_wq_b", "wq_b"), ("linear_weights_proj", "weights_proj")):
        rule = identity(f"{core}indexer.{a}.weight", f"{_HF}attn.indexer.{b}.weight")
        rules.append(replace(rule, layers=indexed))
    table = identity(_MEGATRON + "mlp.router.token_experts", _HF + "ffn.gate.tid2eid")
    rules.append(replace(table, layers=hashed))
    places = {
        _MEGATRON + "self_attention_hyper_connection.": _HF + "hc_attn_",
        _MEGATRON + "mlp_hyper_connection.": _HF + "hc_ffn_",
        "decoder.contraction.": "model.hc_head.hc_",
    }
    for a, b in places.items():
        names = {"weight": "fn", "bias": "base", "alpha": "scale"}
        rules += [identity(a + name, b + theirs) for name, theirs in names.items()]
    shared = dict(zip(("gate", "up", "down"), ("w1", "w3", "w2"), strict=True))
    return renamed(
        rules,
        {f"shared_experts.{a}_proj": f"shared_experts.{b}" for a, b in shared.items()}
        | {"post_attention_layernorm": "ffn_norm", "e_score_correction_bias": "bias",
           "lm_head": "head"},
    )  # fmt: skip


DEEPSEEK_V4 = Family(
    "deepseek_v4",
    "DeepseekV4ForCausalLM",
    _settings,
    _fields,
    _rules,
    only={**GATED, "attention_bias": False, "scoring_func": "sqrtsoftplus"},
    unused=(*OF_BALANCE, "num_nextn_predict_layers", "norm_topk_prob", "topk_method",
            "router_jitter_noise", "expert_dtype"),
    absent={"q_lora_rank": 1024, "head_dim": 512, "num_attention_heads": 64, "o_groups": 8,
            "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
            "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "swiglu_limit": 10.0,
            "sliding_window": 128, "routed_scaling_factor": 1.5},
    without_meaning=LLAMA.without_meaning,
    # Published files lack the prefix, and name the embedding and the streams' sum otherwise.
    other_names={
        r"^(layers\.|norm\.)": r"model.\1",
        r"^embed\.": "model.embed_tokens.",
        r"^hc_head_": "model.hc_head.hc_",
    },
    left_out={r"(model\.)?mtp\..*": "the layers that predict later tokens"},
)  # fmt: skip
