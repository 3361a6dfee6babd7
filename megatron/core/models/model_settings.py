"""Flags of the model: shape, layers, experts, encoders, images, adapters."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.settings.flags import SettingsGroup, flag, required
from megatron.core.transformer.config.attention import (
    LatentAttentionConfig,
    PositionConfig,
    QueryKeyClipConfig,
    SparseAttentionConfig,
)
from megatron.core.transformer.config.block import BlockConfig
from megatron.core.transformer.config.experts import ExpertConfig
from megatron.core.transformer.config.linear_attention import LinearAttentionConfig
from megatron.core.transformer.config.shape import (
    InitializationConfig,
    MaximalUpdateConfig,
    ShapeConfig,
)
from megatron.core.transformer.config.stages import PredictionConfig
from megatron.core.transformer.low_rank_adapter import LoraConfig


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
    """Name of a published model, for example llama3-8b or deepseek-v3. Sets the flags of its shape
    and its experts that are not given."""
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
    """Kind of position embedding."""
    use_rotary_position_embeddings: bool = False
    """Older spelling of --position-embedding-type rope."""
    rotary_percent: float = 1.0
    """Share of each head's channels that is rotated."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Divide positions by this, to reach longer sequences (arXiv 2306.15595)."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does (arXiv 2407.21783)."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    add_position_embedding: bool = flag(True, "--no-position-embedding")
    """Leave out learned position embeddings; rotary embeddings stay."""
    swiglu: bool = False
    """SiLU-gated MLP (arXiv 2002.05202)."""
    squared_relu: bool = False
    """Squared ReLU as activation (arXiv 2109.08668)."""
    xielu: bool = False
    """xIELU as activation, with two learned scalars in each MLP (arXiv 2411.13010)."""
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
    """Layer spec of your own: module and function name (or module.function)."""
    init_method_xavier_uniform: bool = False
    """Draw initial weights from the Xavier uniform distribution instead of the normal one."""


@dataclass(kw_only=True)
class LatentAttentionSettings(LatentAttentionConfig, PredictionConfig, SettingsGroup):
    """Flags of multi-latent attention (arXiv 2405.04434) and multi-token prediction."""


@dataclass(kw_only=True)
class ExpertSettings(ExpertConfig, SettingsGroup):
    """Routed experts, their router, dispatcher and balance."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Properties of a kind of model. The defaults describe a GPT."""

    has_two_stacks: bool = False
    """An encoder precedes the decoder, whose layers attend to the encoder's output."""
    is_bidirectional: bool = False
    """A query attends to the keys on both sides; padding is masked as a separate document."""
    is_padded: bool = False
    """Samples end with padding, and every stage reads its position."""
    num_tokentypes: int = 0
    has_images: bool = False
    """An encoder on the first stage replaces image tokens by embeddings of images."""
    has_word_head: bool = False
    """A dense layer and a norm precede the head, and the head has a bias."""


ARCHITECTURES = {
    "gpt": Architecture(),
    "bert": Architecture(
        is_bidirectional=True, is_padded=True, num_tokentypes=2, has_word_head=True
    ),
    "t5": Architecture(has_two_stacks=True, is_padded=True),
    "vlm": Architecture(has_images=True, is_padded=True),
}
"""Value of --architecture -> properties; the training script sets the flag."""


@dataclass(kw_only=True)
class EncoderSettings(SettingsGroup):
    """BERT and T5: heads, decoder, and masking of tokens in samples."""

    architecture: str = flag("gpt", choices=tuple(ARCHITECTURES))
    """Kind of model. The script sets it: pretrain_bert.py trains a BERT, pretrain_t5.py a T5,
    pretrain_vlm.py a language model that reads images."""
    decoder_num_layers: int | None = flag(None, part_of="architecture")
    """Layers of T5's decoder. Default: the number of encoder layers."""
    decoder_seq_length: int | None = flag(None, part_of="architecture")
    """Tokens of T5's decoder in one sample."""
    relative_attention_num_buckets: int = flag(32, part_of="architecture")
    """Number of buckets for the distance between query and key. Each bucket and head has a learned
    bias of the attention scores (arXiv 1910.10683, section 2.1)."""
    relative_attention_max_distance: int = flag(128, part_of="architecture")
    """This distance and all greater distances use the last bucket."""
    scale_t5_logits: bool = flag(False, part_of="architecture")
    """Divide the input of T5's head by sqrt(hidden size), as in the first T5."""
    bert_binary_head: bool = flag(True, "--bert-no-binary-head", part_of="architecture")
    """Leave out the head that predicts whether two pieces of text are in order, and make samples of
    one piece."""
    mask_prob: float = flag(0.15, part_of="architecture")
    """Share of a sample's tokens that is masked."""
    short_seq_prob: float = flag(0.1, part_of="architecture")
    """Probability that a sample is shorter than --seq-length."""

    @property
    def traits(self) -> Architecture:
        """Properties of the kind of model."""
        return ARCHITECTURES[self.architecture]


@dataclass(kw_only=True)
class VisionSettings(SettingsGroup, VisionConfig):
    """Image encoder, frozen parts of the model, and preparation of images."""

    freeze_lm: bool = flag(False, "--freeze-LM", name="freeze_LM")
    """Do not train the language model."""
    freeze_vit: bool = flag(False, "--freeze-ViT", name="freeze_ViT")
    """Do not train the image encoder."""
    freeze_projection: bool = False
    """Do not train the projection from the image encoder to the language model."""
    vision_start_token_id: int | None = None
    """Token before an image. Default: no token."""
    vision_end_token_id: int | None = None
    """Token after an image. Default: no token."""
    image_min_pixels: int = 3136
    """Enlarge smaller images to this many pixels."""
    image_max_pixels: int = 1003520
    """Shrink larger images to at most this many pixels."""
    image_mean: list[float] | None = flag(None, nargs="+")
    """Mean of red, green and blue in [0, 1], subtracted from pixels. Default: the mean of the image
    encoder."""
    image_std: list[float] | None = flag(None, nargs="+")
    """Standard deviation of red, green and blue. Pixels are divided by it after --image-mean is
    subtracted. Default: the deviation of the image encoder."""


@dataclass(frozen=True, kw_only=True)
class LoraSettings(LoraConfig):
    """Low-rank adapters (LoRA, arXiv 2106.09685)."""

    save_adapter: str | None = flag(None, part_of="lora_rank")
    """Write the adapters as a PEFT directory when training ends. With --save-hf, the model with
    merged adapters is written as well."""
