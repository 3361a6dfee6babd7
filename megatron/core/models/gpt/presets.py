"""Published models, as data: sizes, experts, norms, positions, vocabulary.

Each family names its sources. `preset("llama3-8b")` returns the keyword arguments of
`TransformerConfig` and `GPTModel`; flags or arguments in addition to a preset override it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.activations import fast_gelu, quick_gelu
from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.yarn import yarn_softmax_scale


@dataclass(frozen=True)
class ModelPreset:
    """One published model.

    Attributes:
        config: keyword arguments of `TransformerConfig`.
        model: keyword arguments of `GPTModel`.
        vocab_size: vocabulary of the published embedding, without padding.
        published_parameters: number stated by the authors, or counted in the published weights.
        is_exact: the count is exact; otherwise it is the rounded number of the paper.
        active_parameters: rounded number of parameters that process a token, with the tables of the
            vocabulary, which some authors leave out; 0 for a dense model.
    """

    name: str
    config: dict[str, Any]
    model: dict[str, Any]
    vocab_size: int
    published_parameters: int
    is_exact: bool = True
    active_parameters: float = 0
    source: str = field(default="", compare=False)

    def transformer_config(self, **overrides: object) -> TransformerConfig:
        """Build the config; `overrides` add or replace fields."""
        fields = {**self.config, "unpadded_vocab_size": self.vocab_size, **overrides}
        if self.model["position_embedding_type"] == "yarn":
            scale = yarn_softmax_scale(fields["kv_channels"], fields["rotary_scaling_factor"])
            fields.setdefault("softmax_scale", scale)
        return TransformerConfig(**fields)

    def padded_vocab_size(self, tensor_parallel_size: int = 1, multiple: int = 128) -> int:
        """Return the vocabulary size rounded up to a multiple of `multiple` * tp."""
        unit = multiple * tensor_parallel_size
        return -(-self.vocab_size // unit) * unit


_PRESETS: dict[str, ModelPreset] = {}
_name: str
_sizes: tuple[int, ...]


def _add(
    name: str,
    family: Callable[..., tuple[dict[str, Any], dict[str, Any]]],
    sizes: tuple[int, ...],
    parameters: int,
    *,
    vocab_size: int,
    source: str,
    is_exact: bool = True,
    active: float = 0,
    experts: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    config, model = family(*sizes, **options)
    _PRESETS[name] = ModelPreset(
        name, config | (experts or {}), model, vocab_size, parameters,
        is_exact=is_exact, active_parameters=active, source=source,
    )  # fmt: skip


# GPT-2 and GPT-3 -----------------------------------------------------------------------------


def _gpt(
    layers: int, hidden: int, heads: int, head_dim: int, positions: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """LayerNorm, GELU (its tanh form), biases, learned positions, tied head."""
    activation: Callable[[Tensor], Tensor] = fast_gelu
    config = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "kv_channels": head_dim,
        "ffn_hidden_size": 4 * hidden,
        "activation_func": activation,
        "layernorm_epsilon": 1e-5,
    }
    model = {
        "position_embedding_type": "learned_absolute",
        "max_sequence_length": positions,
        "share_embeddings_and_output_weights": True,
    }
    return config, model


_GPT2 = "Language Models are Unsupervised Multitask Learners, table 2; counts of the weights"
for _name, _sizes, _count in (
    ("gpt2-124m", (12, 768, 12, 64, 1024), 124_439_808),
    ("gpt2-355m", (24, 1024, 16, 64, 1024), 354_823_168),
    ("gpt2-774m", (36, 1280, 20, 64, 1024), 774_030_080),
    ("gpt2-1.5b", (48, 1600, 25, 64, 1024), 1_557_611_200),
):
    _add(_name, _gpt, _sizes, _count, vocab_size=50257, source=_GPT2)

# Attention alternated between dense and banded in the paper; here all layers are dense. Two lines
# of the table contradict their own parameter counts and are corrected: 1.3B (24 heads of 128 for a
# width of 2048: 16 heads) and 13B (a width of 5140 for 40 heads of 128: 5120).
_GPT3 = "Language Models are Few-Shot Learners, table 2.1, arXiv 2005.14165"
for _name, _sizes, _count in (
    ("gpt3-125m", (12, 768, 12, 64, 2048), 125_000_000),
    ("gpt3-350m", (24, 1024, 16, 64, 2048), 350_000_000),
    ("gpt3-760m", (24, 1536, 16, 96, 2048), 760_000_000),
    ("gpt3-1.3b", (24, 2048, 16, 128, 2048), 1_300_000_000),
    ("gpt3-2.7b", (32, 2560, 32, 80, 2048), 2_700_000_000),
    ("gpt3-6.7b", (32, 4096, 32, 128, 2048), 6_700_000_000),
    ("gpt3-13b", (40, 5120, 40, 128, 2048), 13_000_000_000),
    ("gpt3-175b", (96, 12288, 96, 128, 2048), 175_000_000_000),
):
    _add(_name, _gpt, _sizes, _count, vocab_size=50257, source=_GPT3, is_exact=False)


# Llama, Mistral, Qwen ------------------------------------------------------------------------


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    groups: int,
    head_dim: int,
    ffn: int,
    positions: int,
    *,
    rotary_base: float,
    epsilon: float = 1e-5,
    tied: bool = False,
    rope_scaling_factor: float | None = None,
    window: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """RMSNorm, SwiGLU, rotary positions, grouped queries, no biases, no dropout."""
    config: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "ffn_hidden_size": ffn,
        "normalization": "RMSNorm",
        "layernorm_epsilon": epsilon,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if window is not None:
        # The published window counts the query itself.
        config["window_size"] = (window - 1, 0)
    model: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": rotary_base,
        "max_sequence_length": positions,
        "share_embeddings_and_output_weights": tied,
    }
    if rope_scaling_factor is not None:
        model |= {"rope_scaling": True, "rope_scaling_factor": rope_scaling_factor}
    return config, model


_LLAMA2 = "Llama 2: Open Foundation and Fine-Tuned Chat Models, table 1, arXiv 2307.09288"
for _name, _sizes, _count in (
    ("llama2-7b", (32, 4096, 32, 32, 128, 11008, 4096), 6_738_415_616),
    ("llama2-13b", (40, 5120, 40, 40, 128, 13824, 4096), 13_015_864_320),
    ("llama2-70b", (80, 8192, 64, 8, 128, 28672, 4096), 68_976_648_192),
):
    _add(
        _name, _llama, _sizes, _count, vocab_size=32000, source=_LLAMA2, rotary_base=10_000.0
    )  # fmt: skip

_LLAMA3 = "The Llama 3 Herd of Models, table 3, arXiv 2407.21783, and the published configs"
_LLAMA3_ROWS: tuple[tuple[str, tuple[int, ...], int, dict[str, Any]], ...] = (
    ("llama3-8b", (32, 4096, 32, 8, 128, 14336, 8192), 8_030_261_248, {}),
    ("llama3-70b", (80, 8192, 64, 8, 128, 28672, 8192), 70_553_706_496, {}),
    ("llama3.1-8b", (32, 4096, 32, 8, 128, 14336, 131072), 8_030_261_248,
     {"rope_scaling_factor": 8.0}),
    ("llama3.1-70b", (80, 8192, 64, 8, 128, 28672, 131072), 70_553_706_496,
     {"rope_scaling_factor": 8.0}),
    ("llama3.1-405b", (126, 16384, 128, 8, 128, 53248, 131072), 405_853_388_800,
     {"rope_scaling_factor": 8.0}),
    ("llama3.2-1b", (16, 2048, 32, 8, 64, 8192, 131072), 1_235_814_400,
     {"rope_scaling_factor": 32.0, "tied": True}),
    ("llama3.2-3b", (28, 3072, 24, 8, 128, 8192, 131072), 3_212_749_824,
     {"rope_scaling_factor": 32.0, "tied": True}),
)  # fmt: skip
for _name, _sizes, _count, _options in _LLAMA3_ROWS:
    _add(
        _name, _llama, _sizes, _count, vocab_size=128256, source=_LLAMA3, rotary_base=500_000.0,
        **_options,
    )  # fmt: skip

_MISTRAL = "Mistral 7B, section 2, arXiv 2310.06825, and the published configs"
_add(
    "mistral-7b-v0.1", _llama, (32, 4096, 32, 8, 128, 14336, 32768), 7_241_732_096,
    vocab_size=32000, source=_MISTRAL, rotary_base=10_000.0, window=4096,
)  # fmt: skip
_add(
    "mistral-7b-v0.3", _llama, (32, 4096, 32, 8, 128, 14336, 32768), 7_248_023_552,
    vocab_size=32768, source=_MISTRAL, rotary_base=1_000_000.0,
)  # fmt: skip
_add(
    "mistral-nemo-12b", _llama, (40, 5120, 32, 8, 128, 14336, 131072), 12_247_782_400,
    vocab_size=131072, source=_MISTRAL, rotary_base=1_000_000.0,
)  # fmt: skip

_QWEN25 = "Qwen2.5 Technical Report, table 1, arXiv 2412.15115, and the published configs"
for _name, _sizes, _count, _vocab, _tied in (
    ("qwen2.5-0.5b", (24, 896, 14, 2, 64, 4864, 32768), 494_032_768, 151936, True),
    ("qwen2.5-1.5b", (28, 1536, 12, 2, 128, 8960, 32768), 1_543_714_304, 151936, True),
    ("qwen2.5-3b", (36, 2048, 16, 2, 128, 11008, 32768), 3_085_938_688, 151936, True),
    ("qwen2.5-7b", (28, 3584, 28, 4, 128, 18944, 131072), 7_615_616_512, 152064, False),
    ("qwen2.5-14b", (48, 5120, 40, 8, 128, 13824, 131072), 14_770_033_664, 152064, False),
    ("qwen2.5-32b", (64, 5120, 40, 8, 128, 27648, 131072), 32_763_876_352, 152064, False),
    ("qwen2.5-72b", (80, 8192, 64, 8, 128, 29568, 131072), 72_706_203_648, 152064, False),
):
    _add(
        _name, _llama, _sizes, _count, vocab_size=_vocab, source=_QWEN25,
        rotary_base=1_000_000.0, epsilon=1e-6, tied=_tied, qkv_bias=True,
    )  # fmt: skip

_QWEN3 = "Qwen3 Technical Report, table 1, arXiv 2505.09388, and the published configs"
for _name, _sizes, _count, _tied in (
    ("qwen3-0.6b", (28, 1024, 16, 8, 128, 3072, 32768), 596_049_920, True),
    ("qwen3-1.7b", (28, 2048, 16, 8, 128, 6144, 32768), 1_720_574_976, True),
    ("qwen3-4b", (36, 2560, 32, 8, 128, 9728, 32768), 4_022_468_096, True),
    ("qwen3-8b", (36, 4096, 32, 8, 128, 12288, 32768), 8_190_735_360, False),
    ("qwen3-14b", (40, 5120, 40, 8, 128, 17408, 32768), 14_768_307_200, False),
    ("qwen3-32b", (64, 5120, 64, 8, 128, 25600, 32768), 32_762_123_264, False),
):
    _add(
        _name, _llama, _sizes, _count, vocab_size=151936, source=_QWEN3,
        rotary_base=1_000_000.0, epsilon=1e-6, tied=_tied, qk_norm=True,
    )  # fmt: skip


# Mixtures of experts --------------------------------------------------------------------------


def _routed(
    experts: int, topk: int, width: int | None, balance: str, coefficient: float, **more: object
) -> dict[str, Any]:
    """Routed experts in grouped products, with the balance loss of the paper."""
    return {
        "num_moe_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_router_load_balancing_type": balance,
        "moe_aux_loss_coeff": coefficient,
        "moe_grouped_gemm": True,
        **more,
    }


_add(
    "mixtral-8x7b", _llama, (32, 4096, 32, 8, 128, 14336, 32768), 46_702_792_704,
    active=12.9e9, vocab_size=32000, source="Mixtral of Experts, section 2, arXiv 2401.04088",
    rotary_base=1_000_000.0, experts=_routed(8, 2, None, "aux_loss", 0.02),
)  # fmt: skip
for _name, _sizes, _count, _active, _width in (
    ("qwen3-30b-a3b", (48, 2048, 32, 4, 128, 6144, 32768), 30_532_122_624, 3.3e9, 768),
    ("qwen3-235b-a22b", (94, 4096, 64, 4, 128, 12288, 32768), 235_093_634_560, 22e9, 1536),
):
    _add(
        _name, _llama, _sizes, _count, active=_active, vocab_size=151936, source=_QWEN3,
        rotary_base=1_000_000.0, epsilon=1e-6, qk_norm=True,
        # Load balancing over the global batch, as in the report.
        experts=_routed(128, 8, _width, "global_aux_loss", 0.001),
    )  # fmt: skip


def _gpt_oss(layers: int, hidden: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sinks, a window in every second layer, clamped gates, biases, YaRN."""
    config, model = _llama(
        layers, hidden, 64, 8, 64, hidden, 131072, rotary_base=150_000.0, window=128
    )
    config |= {
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "activation_func": quick_gelu,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "rotary_scaling_factor": 32.0,
        "original_max_position_embeddings": 4096,
        "yarn_correction_range_round_to_int": False,
        "add_bias_linear": True,
    }
    return config, model | {"position_embedding_type": "yarn"}


_GPT_OSS = "gpt-oss-120b & gpt-oss-20b Model Card, section 2, arXiv 2508.10925"
for _name, _sizes, _count, _active, _number in (
    # The card counts the active parameters without the embedding.
    ("gpt-oss-20b", (24, 2880), 20_914_757_184, 3.61e9 + 0.58e9, 32),
    ("gpt-oss-120b", (36, 2880), 116_829_156_672, 5.13e9 + 0.58e9, 128),
):
    _add(
        _name, _gpt_oss, _sizes, _count, active=_active, vocab_size=201088, source=_GPT_OSS,
        experts=_routed(_number, 4, None, "aux_loss", 0.01),
    )  # fmt: skip


def _latent(
    layers: int, hidden: int, heads: int, ffn: int, *, query_rank: int | None, base: float = 1e4
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Latent attention, in the positions of the pretraining, before the context was extended."""
    config, model = _llama(
        layers, hidden, heads, heads, 128, ffn, 4096, rotary_base=base, epsilon=1e-6, qk_norm=True
    )
    del config["kv_channels"]
    config |= {
        "multi_latent_attention": True,
        "q_lora_rank": query_rank,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
        "rope_type": "rope",
        "rotary_base": base,
    }
    return config, model


_SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.001,
    "moe_router_dtype": "fp32",
}
_add(
    "deepseek-v2-lite", _latent, (27, 2048, 16, 10944), 15_706_484_224, active=2.66e9,
    vocab_size=102400, source="DeepSeek-V2, appendix B, arXiv 2405.04434", query_rank=None,
    experts=_routed(
        64, 6, 1408, "seq_aux_loss", 0.001, moe_shared_expert_intermediate_size=2816,
        moe_layer_freq=[0] + [1] * 26, moe_router_pre_softmax=True,
        moe_router_topk_scaling_factor=1.0,
    ),
)  # fmt: skip
# The report counts 671B, 37B of them for a token, without the layer that predicts the token after
# the next one.
_add(
    "deepseek-v3", _latent, (61, 7168, 128, 18432), 671_026_404_352 + 11_514_000_000,
    active=37e9 + 1.6e9, is_exact=False, vocab_size=129280, query_rank=1536,
    source="DeepSeek-V3 Technical Report, section 4.2, arXiv 2412.19437",
    experts=_routed(
        256, 8, 2048, "seq_aux_loss", 0.0001, moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=[0] * 3 + [1] * 58, moe_router_num_groups=8, moe_router_group_topk=4,
        moe_router_topk_scaling_factor=2.5, mtp_num_layers=1, mtp_loss_scaling_factor=0.3,
        **_SIGMOID,
    ),
)  # fmt: skip
_add(
    "kimi-k2", _latent, (61, 7168, 64, 18432), 1_026_000_000_000,
    active=32.9e9, is_exact=False, vocab_size=163840, query_rank=1536, base=50_000.0,
    source="Kimi K2: Open Agentic Intelligence, section 2.3, arXiv 2507.20534",
    experts=_routed(
        384, 8, 2048, "seq_aux_loss", 0.0001, moe_shared_expert_intermediate_size=2048,
        moe_layer_freq=[0] + [1] * 60, moe_router_topk_scaling_factor=2.827, **_SIGMOID,
    ),
)  # fmt: skip


def preset_names() -> list[str]:
    """Return the names of all presets, family by family."""
    return list(_PRESETS)


def preset(name: str) -> ModelPreset:
    """Return the preset called `name`; case, underscores and dashes make no difference.

    Raises:
        ConfigError: no preset has this name; the message suggests similar names.
    """
    wanted = name.lower().replace("_", "-")
    if wanted in _PRESETS:
        return _PRESETS[wanted]
    near = difflib.get_close_matches(wanted, _PRESETS, n=3, cutoff=0.5)
    family = [known for known in _PRESETS if known.split("-")[0] == wanted.split("-")[0]]
    suggestion = " or ".join(near or family[:4])
    raise ConfigError(
        f"there is no preset {name!r}.",
        rule=f"presets are {', '.join(_PRESETS)}",
        flags=["--preset"],
        fix=f"did you mean {suggestion}?" if suggestion else "choose one of these",
    )
