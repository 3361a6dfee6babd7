"""What is trained: flags of the model and of its training, which hold in every layout."""

import json

from megatron.core.transformer.config.layer_kinds import hybrid_pattern
from tests.parity.random_layouts.settings import Option, Settings, given, number, switch, without

GATED = ("swiglu", "geglu", "quick-geglu")


def _is_rotary(s: Settings) -> bool:
    return s.get("position-embedding-type") in ("rope", "yarn")


def _is_plain_rope(s: Settings) -> bool:
    is_rope = s.get("position-embedding-type") == "rope"
    return is_rope and "multi-latent-attention" not in s


def _is_yarn(s: Settings) -> bool:
    return s.get("position-embedding-type") == "yarn" or "multi-latent-attention" in s


def _may_chop_experts(s: Settings) -> bool:
    return "num-experts" in s and not _is_sinkhorn(s)


def _is_sinkhorn(s: Settings) -> bool:
    return s.get("moe-router-load-balancing-type") == "sinkhorn"


SHAPE = (
    Option("num-layers", {2: 4, 4: 5, 3: 1, 6: 1}),
    Option("hidden-size", {32: 6, 24: 1, 48: 1}),
    Option("num-attention-heads", {4: 5, 8: 2}),
    Option("ffn-hidden-size", {64: 3, 48: 1, 72: 1, None: 1}),
    Option("seq-length", {16: 5, 24: 1}),
    Option("vocab-size", {89: 6}),
    Option("make-vocab-size-divisible-by", {8: 3, 1: 1, None: 1}),
    switch("multi-latent-attention", 0.12),
    Option("position-embedding-type", {"rope": 1}, given("multi-latent-attention")),
    Option("kv-lora-rank", {10: 1}, given("multi-latent-attention")),
    Option("q-lora-rank", {None: 1, 12: 1}, given("multi-latent-attention")),
    Option("qk-head-dim", {6: 1}, given("multi-latent-attention")),
    Option("qk-pos-emb-head-dim", {4: 1}, given("multi-latent-attention")),
    Option("v-head-dim", {5: 1, 8: 1}, given("multi-latent-attention")),
    Option("latent-norm-epsilon", {None: 2, 1e-3: 1}, given("multi-latent-attention")),
    Option("kv-channels", {None: 5, 8: 1, 12: 1}, without("multi-latent-attention")),
    switch("group-query-attention", 0.35, without("multi-latent-attention")),
    Option("num-query-groups", {1: 1, 2: 3}, given("group-query-attention")),
)

LAYERS = (
    Option("position-embedding-type", {None: 3, "rope": 4, "none": 1, "yarn": 1},
           without("multi-latent-attention")),
    Option("rotary-percent", {None: 4, 0.5: 1}, _is_plain_rope),
    Option("rotary-base", {None: 4, 500: 1}, _is_rotary),
    switch("rotary-interleaved", 0.15, _is_plain_rope),
    Option("rotary-seq-len-interpolation-factor", {None: 8, 2: 1}, _is_plain_rope),
    switch("use-rope-scaling", 0.1, _is_plain_rope),
    Option("rope-scaling-factor", {None: 1, 4.0: 1}, given("use-rope-scaling")),
    Option("rotary-scaling-factor", {None: 1, 4: 3}, _is_yarn),
    Option("original-max-position-embeddings", {8: 1}, given("rotary-scaling-factor")),
    Option("mscale", {None: 2, 0.7: 1}, given("rotary-scaling-factor")),
    Option("mscale-all-dim", {None: 1, 0.5: 1},
           lambda s: "multi-latent-attention" in s and "rotary-scaling-factor" in s),
    Option("no-rope-freq", {None: 6, 2: 1}, _is_rotary),
    switch("no-rope-latent-keys", 0.5,
           lambda s: {"multi-latent-attention", "no-rope-freq"} <= set(s)),
    switch("rotary-exponents", 0.1, given("multi-latent-attention")),
    switch("scalable-softmax", 0.1),
    Option("normalization", {None: 4, "RMSNorm": 4, "RMSNormWithoutWeight": 1}),
    switch("embed-layernorm", 0.1),
    Option("norm-epsilon", {None: 4, 1e-6: 1}),
    switch("apply-layernorm-1p", 0.15),
    Option("", {None: 3, "swiglu": 4, "geglu": 1, "quick-geglu": 1, "squared-relu": 1,
                "xielu": 1, "openai-gelu": 1}),
    Option("glu-linear-offset", {None: 6, 1.0: 1}, given(*GATED)),
    Option("mlp-factors", {None: 10, (0.9, 0.6): 1}, given(*GATED)),
    Option("activation-func-clamp-value", {None: 6, 0.8: 1}, given(*GATED)),
    switch("activation-func-clamp-after", 0.4, given("activation-func-clamp-value")),
    Option("", {None: 7, "apply-residual-connection-post-layernorm": 1,
                "use-parallel-residual": 1, "enable-mhc-connections": 2}),
    Option("mhc-num-residual-streams", {None: 1, 2: 2, 3: 1}, given("enable-mhc-connections")),
    Option("mhc-sinkhorn-iterations", {None: 1, 0: 1, 3: 1}, given("enable-mhc-connections")),
    Option("mhc-init-gating-factor", {None: 1, 1.0: 2}, given("enable-mhc-connections")),
    Option("mhc-epsilon", {None: 2, 1e-3: 1}, given("enable-mhc-connections")),
    Option("mhc-post-magnitude", {None: 2, 1.5: 1}, given("enable-mhc-connections")),
    switch("mhc-learned-contraction", 0.5, given("enable-mhc-connections")),
    Option("altup-num-inputs", {None: 9, 2: 1, 3: 1}, without("enable-mhc-connections")),
    Option("altup-active-idx", {None: 1, 1: 1}, given("altup-num-inputs")),
    Option("altup-coef-clip", {None: 1, 0.05: 1}, given("altup-num-inputs")),
    Option("laurel-rank", {None: 9, 4: 1, 6: 1},
           without("enable-mhc-connections", "use-parallel-residual")),
    switch("sandwich-norm", 0.1),
    Option("embedding-multiplier", {None: 7, 2.5: 1}),
    Option("residual-multiplier", {None: 7, 0.3: 1}),
    Option("logits-scaling", {None: 7, 3.0: 1}),
    switch("disable-bias-linear", 0.5),
    switch("add-qkv-bias", 0.2, without("multi-latent-attention")),
    switch("untie-embeddings-and-output-weights", 0.5),
    switch("qk-layernorm", 0.2),
    switch("qk-l2-norm", 0.08, without("qk-layernorm", "multi-latent-attention")),
    Option("query-scale-beta", {None: 7, 0.5: 1}),
    Option("query-scale-interval", {3: 1}, given("query-scale-beta")),
    switch("query-scale-without-rope", 0.5,
           lambda s: "query-scale-beta" in s and "no-rope-freq" in s),
    switch("attention-output-gate", 0.2),
    switch("attention-gate-by-head", 0.5, lambda s: "attention-output-gate" in s
           and "multi-latent-attention" not in s),
    Option("attention-gate-activation", {None: 2, "softplus": 1}, given("attention-output-gate")),
    switch("mla-gate-by-channel", 0.5,
           lambda s: {"attention-output-gate", "multi-latent-attention"} <= set(s)),
    Option("window-size", {None: 5, "4,0": 1, "7,0": 1}),
    Option("v-channels", {None: 10, 6: 1, 16: 1},
           without("multi-latent-attention", "attention-output-gate")),
    Option("attention-value-scale", {None: 10, 0.7: 1}, without("multi-latent-attention")),
    switch("attention-k-eq-v", 0.1, without("multi-latent-attention", "v-channels")),
    switch("v-l2-norm", 0.1, without("multi-latent-attention")),
    switch("layer-scalar", 0.1),
    Option("attention-chunk-size", {None: 10, 5: 1}),
    Option("window-attn-skip-freq", {None: 1, 2: 1}, given("window-size", "attention-chunk-size")),
    Option("rotary-base-local", {None: 2, 300: 1},
           lambda s: _is_plain_rope(s) and "window-size" in s),
    Option("softmax-scale", {None: 8, 0.3: 1}, lambda s: not _is_yarn(s)),
    Option("attn-logit-softcapping", {None: 8, 5.0: 1}),
    Option("final-logit-softcapping", {None: 8, 8.0: 1}),
    switch("use-mup", 0.12),
    Option("mup-base-hidden-size", {16: 3, None: 1}, given("use-mup")),
    Option("mup-base-head-dim", {None: 1, 4: 1}, given("use-mup")),
    Option("mup-embedding-mult", {None: 2, 3.0: 1}, given("use-mup")),
    Option("mup-output-mult", {None: 2, 2.0: 1}, given("use-mup")),
    switch("qk-clip", 0.15),
    Option("qk-clip-threshold", {0.03: 1, 0.5: 1}, given("qk-clip")),
    Option("qk-clip-alpha", {None: 2, 0.2: 1}, given("qk-clip")),
    switch("log-max-attention-logit", 0.1),
    Option("softmax-type", {None: 6, "off-by-one": 1, "learnable": 1}),
    switch("apply-query-key-layer-scaling", 0.06, without("attention-chunk-size")),
    switch("attention-softmax-in-fp32", 0.1),
    Option("init-method-std", {0.1: 4, 0.02: 1, None: 1}),
    switch("init-method-xavier-uniform", 0.06),
    Option("mtp-num-layers", {None: 7, 1: 1, 2: 1},
           without("rotary-base-local", "embed-layernorm")),
    switch("mtp-use-repeated-layer", 0.4, lambda s: s.get("mtp-num-layers") == 2),
    Option("mtp-loss-scaling-factor", {None: 1, 0.5: 1}, given("mtp-num-layers")),
)  # fmt: skip

EXPERTS = (
    Option("num-experts", {None: 6, 4: 3, 8: 1}, without("xielu")),
    Option("moe-ffn-hidden-size", {24: 3, 16: 1, None: 1}, given("num-experts")),
    Option("moe-activation-func-clamp-value", {None: 5, 0.6: 1},
           lambda s: "num-experts" in s and given(*GATED)(s)),
    Option("moe-latent-size", {None: 4, 12: 1}, given("num-experts")),
    Option("moe-layer-freq", {None: 4, 2: 1}, given("num-experts")),
    Option("moe-router-load-balancing-type",
           {None: 3, "seq_aux_loss": 2, "global_aux_loss": 1, "none": 1, "sinkhorn": 1,
            ("aux_loss", "seq_aux_loss", "global_aux_loss"): 1}, given("num-experts")),
    Option("moe-aux-loss-coeff", {(0.1, 0.05, 0.2): 1},
           lambda s: isinstance(s.get("moe-router-load-balancing-type"), tuple)),
    Option("moe-aux-loss-coeff", {None: 1, 0.1: 3},
           lambda s: _may_chop_experts(s) and "moe-aux-loss-coeff" not in s
           and s.get("moe-router-load-balancing-type") != "none"),
    Option("moe-z-loss-coeff", {None: 3, 0.01: 1}, given("num-experts")),
    Option("moe-router-score-function", {None: 3, "sigmoid": 2, "sqrtsoftplus": 1},
           given("num-experts")),
    Option("moe-router-topk", {None: 3, 1: 1, 3: 1, 4: 1}, given("num-experts")),
    switch("moe-router-pre-softmax", 1.0,
           lambda s: s.get("moe-router-topk") == 1 and "moe-router-score-function" not in s),
    switch("moe-router-pre-softmax", 0.2,
           lambda s: "num-experts" in s and "moe-router-score-function" not in s),
    Option("moe-router-topk-scaling-factor", {None: 4, 2.5: 1}, given("num-experts")),
    Option("moe-router-num-groups", {None: 3, 2: 1},
           lambda s: _may_chop_experts(s) and s.get("moe-router-topk") not in (3, 4)),
    Option("moe-router-group-topk", {1: 1}, given("moe-router-num-groups")),
    Option("moe-router-group-score-topk", {None: 1, 1: 1}, given("moe-router-num-groups")),
    switch("moe-router-enable-expert-bias", 0.3,
           lambda s: _may_chop_experts(s) and "moe-router-score-function" in s),
    Option("moe-router-bias-update-rate", {None: 1, 0.05: 2},
           given("moe-router-enable-expert-bias")),
    switch("moe-apply-probs-on-input", 0.1, given("num-experts")),
    Option("moe-router-dtype", {None: 4, "fp32": 1, "fp64": 1}, given("num-experts")),
    Option("moe-expert-capacity-factor", {None: 3, 0.75: 1, 1.25: 1}, given("num-experts")),
    switch("moe-pad-expert-input-to-capacity", 0.3, given("moe-expert-capacity-factor")),
    Option("moe-token-drop-policy", {None: 1, "position": 1},
           given("moe-expert-capacity-factor")),
    Option("moe-input-jitter-eps", {None: 7, 0.1: 1}, given("num-experts")),
    switch("moe-router-force-load-balancing", 0.06, given("num-experts")),
    Option("moe-shared-expert-intermediate-size", {None: 2, 16: 1, 24: 1}, given("num-experts")),
    switch("moe-shared-expert-gate", 0.3, given("moe-shared-expert-intermediate-size")),
    switch("moe-average-shared-expert", 0.2, given("moe-shared-expert-intermediate-size")),
    switch("moe-branch-norms", 0.2, given("moe-shared-expert-intermediate-size")),
    switch("moe-router-scales", 0.1, given("num-experts")),
    switch("moe-output-norm", 0.15,
           lambda s: "num-experts" in s and "sandwich-norm" not in s),
    switch("moe-per-layer-logging", 1.0, given("num-experts")),
)  # fmt: skip

_VARIANT, _BESIDE = "experimental-attention-variant", "attention_and_mamba2"


def _is_delta(s: Settings) -> bool:
    has_letters = {"G", "K"} & set(str(s.get("hybrid-layer-pattern", "")))
    return s.get(_VARIANT) in ("gated_delta_net", "kda") or bool(has_letters)


def _is_sparse(s: Settings) -> bool:
    return s.get(_VARIANT) == "dsa"


def _is_compressed(s: Settings) -> bool:
    return s.get(_VARIANT) == "dsv4_hybrid"


def _may_compress(s: Settings) -> bool:
    others = without(_VARIANT, "qk-clip", "attention-output-gate", "attention-chunk-size",
                     "no-rope-freq", "scalable-softmax", "rotary-exponents")  # fmt: skip
    return "q-lora-rank" in s and others(s)


def _chooses_blocks(s: Settings) -> bool:
    """Return whether each group of query heads chooses blocks of keys."""
    return _is_sparse(s) and "multi-latent-attention" not in s


def _chooses_keys(s: Settings) -> bool:
    return _has_indexer(s) and not _chooses_blocks(s)


def _num_groups(s: Settings) -> object:
    return s.get("num-query-groups", s["num-attention-heads"])


def _has_indexer(s: Settings) -> bool:
    return _is_sparse(s) or _is_compressed(s)


def _ratios(num_layers: int) -> Option:
    """Return the ratios of a model of so many layers."""
    found = {str((ratios * num_layers)[:num_layers]).replace(" ", ""): 1
             for ratios in ([4, 0, 3], [3, 4], [2])}  # fmt: skip
    return Option("csa-compress-ratios", found,
                  lambda s: _is_compressed(s) and s["num-layers"] == num_layers)  # fmt: skip


def _may_share_keys(s: Settings) -> bool:
    """Stages begin with a layer that has an indexer only if a layout is made for it."""
    return _is_sparse(s) and "linear-attention-freq" not in s


def _passes_once(s: Settings) -> bool:
    """Layers exchange keys or vectors only in such a model."""
    return not {"multi-latent-attention", "mtp-num-layers", "hybrid-layer-pattern", _VARIANT,
                "enable-mhc-connections"} & set(s)  # fmt: skip


def _is_mamba(s: Settings) -> bool:
    return s.get(_VARIANT) in ("mamba2", _BESIDE) or "M" in str(s.get("hybrid-layer-pattern", ""))


def _is_short_convolution(s: Settings) -> bool:
    return s.get(_VARIANT) == "short_conv" or "S" in str(s.get("hybrid-layer-pattern", ""))


def has_attention(s: Settings) -> bool:
    """Return whether some layers attend, and some have an MLP."""
    if letters := s.get("hybrid-layer-pattern"):
        return {"*", "-"} <= set(str(letters))
    frequency = s.get("linear-attention-freq")
    attends = _VARIANT not in s or _has_indexer(s) or s[_VARIANT] == _BESIDE
    return attends or bool(frequency and frequency <= s["num-layers"])


def _letters(letters: str) -> Option:
    """Return letters for a model of as many layers, with experts if it has letters of them."""
    return Option(
        "hybrid-layer-pattern",
        {None: 5, letters: 1},
        lambda s: (
            s["num-layers"] == len(hybrid_pattern(letters).kinds)
            and ("num-experts" in s) == ("E" in letters)
            and not {_VARIANT, "use-parallel-residual", "moe-layer-freq", "no-rope-freq"} & set(s)
        ),
    )


def _sources(num_layers: int) -> Option:
    """Return layers that read the latents of the first or second layer, in a model of so many."""
    found = [layer % 2 for layer in range(num_layers)]

    def fits(s: Settings) -> bool:
        is_latent = "multi-latent-attention" in s and s.get(_VARIANT) in (None, "dsa")
        others = without("linear-attention-freq", "hybrid-layer-pattern")
        return is_latent and others(s) and s["num-layers"] == num_layers

    return Option("kv-source-layers", {None: 2, str(found).replace(" ", ""): 1}, fits)


MIXERS = (
    Option(_VARIANT, {None: 1, "dsa": 2}, given("q-lora-rank")),
    Option(_VARIANT, {None: 3, "dsa": 1},
           lambda s: "multi-latent-attention" in s and not {"q-lora-rank", _VARIANT} & set(s)),
    Option(_VARIANT, {None: 1, "dsv4_hybrid": 1}, _may_compress),
    *map(_ratios, (2, 3, 4, 6)),
    Option("kv-lora-rank", {10: 1}, _is_compressed),
    Option("v-head-dim", {10: 1}, _is_compressed),
    Option("csa-indexed-ratio", {None: 2, 2: 1, 3: 1}, _is_compressed),
    Option("csa-compress-rotary-base", {None: 1, 400: 1}, _is_compressed),
    Option("o-groups", {4: 3, 2: 1}, _is_compressed),
    Option("o-lora-rank", {6: 1, 8: 1}, _is_compressed),
    Option(_VARIANT, {None: 12, "gated_delta_net": 1, "kda": 2, "mamba2": 1,
                     "short_conv": 1}, without(_VARIANT)),
    Option(_VARIANT, {None: 12, _BESIDE: 1},
           without(_VARIANT, "multi-latent-attention")),
    Option(_VARIANT, {None: 16, "dsa": 1}, without(_VARIANT, "multi-latent-attention")),
    Option("dsa-indexer-n-heads", {4: 1, 6: 1}, _chooses_keys),
    *(Option("dsa-indexer-n-heads", {n: 1},
             lambda s, n=n: _chooses_blocks(s) and _num_groups(s) == n) for n in (1, 2, 4, 8)),
    Option("dsa-indexer-head-dim", {4: 1, 7: 1, 8: 1}, _chooses_keys),
    Option("dsa-indexer-head-dim", {12: 1, 16: 1}, _chooses_blocks),
    Option("dsa-indexer-topk", {1: 1, 3: 2, 6: 2, 64: 1}, _chooses_keys),
    Option("dsa-indexer-topk", {6: 2, 12: 1}, _chooses_blocks),
    Option("dsa-indexer-block-size", {2: 1, 3: 1, 6: 1}, _chooses_blocks),
    Option("dsa-indexer-local-blocks", {None: 1, 1: 2, 2: 1}, _chooses_blocks),
    Option("dsa-indexer-block-size", {None: 2, 3: 1},
           lambda s: _chooses_keys(s) and _is_sparse(s) and s["dsa-indexer-topk"] in (3, 6)),
    Option("dsa-indexer-topk-freq", {None: 2, 2: 1, 3: 1},
           lambda s: _may_share_keys(s) and _chooses_keys(s)),
    Option("dsa-indexer-skip-topk-offset", {1: 2, 2: 1}, given("dsa-indexer-topk-freq")),
    Option("dsa-indexer-loss-coeff", {None: 1, 0.1: 2, 1.0: 2},
           lambda s: _has_indexer(s) and "dsa-indexer-block-size" not in s),
    switch("dsa-indexer-use-sparse-loss", 0.5, _has_indexer),
    Option("dsa-indexer-k-norm-epsilon", {None: 3, 1e-6: 1}, _is_sparse),
    switch("dsa-indexer-k-norm-fp32", 0.3, _is_sparse),
    switch("dsa-indexer-rope-interleaved", 0.3, _is_sparse),
    switch("no-dsa-indexer-scoring-relu", 0.2, _has_indexer),
    Option("linear-attention-freq", {None: 4, 2: 1}, _is_sparse),
    Option("linear-attention-freq", {2: 3, 3: 1, None: 1},
           lambda s: _VARIANT in s and not _has_indexer(s)),
    *map(_letters, ("M-", "M*", "ME", "M-M-", "MM*-", "M*ME", "MEM-", "M-M*M-", "MEM*ME",
                    "K-", "K*", "K-*E", "KGM-", "S-", "S*-E", "[S-][*E]", "[*-]M-", "*E[ME]",
                    "[*-][M-]")),
    # Odd ones, and of several chunks.
    Option("seq-length", {None: 3, 15: 1, 20: 1, 72: 1, 140: 1},
           lambda s: _VARIANT in s or "hybrid-layer-pattern" in s),
    Option("linear-num-key-heads", {4: 3, 8: 1}, _is_delta),
    Option("linear-num-value-heads", {8: 1, 16: 1}, _is_delta),
    Option("linear-key-head-dim", {6: 1, 4: 1}, _is_delta),
    Option("linear-value-head-dim", {5: 1, 8: 1}, _is_delta),
    Option("linear-conv-kernel-dim", {None: 2, 2: 1, 1: 1},
           lambda s: _is_delta(s) or _is_mamba(s) or _is_short_convolution(s)),
    Option("mamba-num-groups", {4: 3, 8: 1}, _is_mamba),
    Option("mamba-num-heads", {8: 1, 16: 1}, _is_mamba),
    Option("mamba-head-dim", {5: 1, 8: 1}, _is_mamba),
    Option("mamba-state-dim", {6: 1, 4: 1}, _is_mamba),
    switch("no-mamba-gated-norm", 0.3, _is_mamba),
    Option("mamba-factors", {None: 2, (0.9, 1.1, 0.8, 1.2, 0.7, 1.3, 0.6): 1}, _is_mamba),
    Option("attention-factors", {None: 1, (1.2, 0.8, 0.7): 1},
           lambda s: s.get(_VARIANT) == _BESIDE),
    Option("mamba-step-limits", {None: 2, "0.01,0.5": 1}, _is_mamba),
    Option("num-kv-shared-layers", {None: 12, 1: 1, 2: 1},
           lambda s: number(s, "num-layers") > 2 and _passes_once(s)),
    Option("per-layer-embed-dim", {None: 12, 8: 1},
           lambda s: _passes_once(s) and "xielu" not in s),
    Option("per-layer-vocab-size", {None: 1, 60: 1}, given("per-layer-embed-dim")),
    Option("activation-sparsity", {None: 10, 0.3: 1, 0.8: 1}, without("num-experts", "xielu")),
    *map(_sources, (3, 4, 6)),
)  # fmt: skip

_BLOCKS = "heterogeneous-layers-config-encoded-json"
_PARTS = (
    ({"num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 12, "softmax_scale": 0.4,
      "window_size": [5, 0], "rotary_base": 300}, {"ffn_hidden_size": 40}),
    ({"num_attention_heads": 4, "n_heads_in_group": 2, "window_size": None}, {"no_op": True}),
    ({"replace_with_linear": True}, {"ffn_hidden_size": 96}),
    ({"no_op": True}, {"replace_with_linear": True}),
)  # fmt: skip


_EXPERT_PARTS = (
    ({"num_attention_heads": 8, "num_query_groups": 2}, {"num_moe_experts": 8,
                                                         "moe_ffn_hidden_size": 16}),
    ({"window_size": [3, 0]}, {}),  # dense with --moe-layer-freq 2
)  # fmt: skip


def _sizes_by_layer(num_layers: int, first: int, *, has_experts: bool) -> Option:
    """Return blocks for a model of so many layers: the parts in turn, from the first one."""
    parts = _EXPERT_PARTS if has_experts else _PARTS
    chosen = [parts[(first + layer) % len(parts)] for layer in range(num_layers)]
    text = json.dumps({"block_configs": [{"attention": a, "ffn": f} for a, f in chosen]})
    others = without(_VARIANT, "hybrid-layer-pattern", "multi-latent-attention", "mtp-num-layers",
                     _BLOCKS)  # fmt: skip

    def fits(s: Settings) -> bool:
        return s["num-layers"] == num_layers and ("num-experts" in s) == has_experts and others(s)

    return Option(_BLOCKS, {None: 12, text: 1}, fits)


SIZES_BY_LAYER = tuple(
    _sizes_by_layer(num_layers, first, has_experts=has_experts)
    for num_layers in (2, 3, 4, 6)
    for first, has_experts in ((0, False), (1, False), (0, True))
)

HASHED = Option("moe-n-hash-layers", {None: 4, 1: 1, 2: 1},
                lambda s: "num-experts" in s and not _is_sinkhorn(s))  # fmt: skip

MODEL = (*SHAPE, *LAYERS, *EXPERTS, *MIXERS, *SIZES_BY_LAYER, HASHED)
