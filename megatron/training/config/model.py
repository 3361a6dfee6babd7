"""Flags of the model's shape and of what one layer is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import SettingsGroup, flag, required
from megatron.core.transformer.config.block import BlockConfig
from megatron.core.transformer.config.initialization import InitializationConfig
from megatron.core.transformer.config.latent_attention import LatentAttentionConfig
from megatron.core.transformer.config.linear_attention import LinearAttentionConfig
from megatron.core.transformer.config.maximal_update import MaximalUpdateConfig
from megatron.core.transformer.config.position import PositionConfig
from megatron.core.transformer.config.prediction import PredictionConfig
from megatron.core.transformer.config.query_key_clip import QueryKeyClipConfig
from megatron.core.transformer.config.shape import ShapeConfig
from megatron.core.transformer.config.sparse_attention import SparseAttentionConfig


@dataclass(kw_only=True)
class ModelSettings(
    ShapeConfig,
    BlockConfig,
    LinearAttentionConfig,
    SparseAttentionConfig,
    PositionConfig,
    QueryKeyClipConfig,
    MaximalUpdateConfig,
    InitializationConfig,
    SettingsGroup,
):
    """Sizes, positions, norms, activations and initial weights."""

    preset: str | None = None
    """Named published model, for example gpt2-124m or llama3-8b: fills the shape flags that are
    not given otherwise."""
    group_query_attention: bool = False
    """Share key/value heads between query heads (arXiv 2305.13245)."""
    seq_length: int = required("--seq-length", "--encoder-seq-length")
    """Tokens of one training sample."""
    max_position_embeddings: int = required()
    """Rows of the learned position table, and the longest sequence the model accepts."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
    )
    """How positions enter the model."""
    use_rotary_position_embeddings: bool = False
    """Older spelling of --position-embedding-type rope."""
    rotary_percent: float = 1.0
    """Share of each head that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Divide positions by this, to reach longer sequences (arXiv 2306.15595)."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does (arXiv 2407.21783)."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    add_position_embedding: bool = flag(True, "--no-position-embedding")
    """Leave out learned positions; rotary ones are not touched."""
    swiglu: bool = False
    """SiLU-gated MLP (arXiv 2002.05202)."""
    squared_relu: bool = False
    """Squared ReLU as activation (arXiv 2109.08668)."""
    relu: bool = False
    """ReLU as activation."""
    geglu: bool = False
    """MLP gated by the tanh approximation of GELU (arXiv 2002.05202)."""
    quick_geglu: bool = False
    """MLP gated by x * sigmoid(1.702 x)."""
    openai_gelu: bool = False
    """The tanh approximation of GELU."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head its own weights instead of the embedding's."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    spec: list[str] | None = flag(None, nargs="*")
    """Own layer spec: module and function name (or module.function)."""
    init_method_xavier_uniform: bool = False
    """Draw initial weights from the Xavier uniform distribution instead."""


@dataclass(kw_only=True)
class LatentAttentionSettings(LatentAttentionConfig, PredictionConfig, SettingsGroup):
    """Flags of multi-latent attention (arXiv 2405.04434) and multi-token prediction."""
