"""Flags of the model's shape and of what one layer is made of."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.enums import AttnBackend
from megatron.training.config.expressions import int_pair, layer_pattern
from megatron.training.config.flag import flag


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes, positions, norms, activations and initial weights."""

    preset: str | None = None
    """Named published model, for example gpt2-124m or llama3-8b: fills the shape flags that are
    not given otherwise."""
    num_layers: int | None = None
    """Transformer layers of the whole model."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default 4 * hidden-size, or 2/3 of it rounded down to 64 with --swiglu."""
    num_attention_heads: int | None = None
    """Query heads."""
    group_query_attention: bool = False
    """Share key/value heads between query heads (arXiv 2305.13245)."""
    num_query_groups: int = 1
    """Key/value heads, with --group-query-attention."""
    kv_channels: int | None = None
    """Width of one head. Default hidden-size / num-attention-heads."""
    seq_length: int | None = flag(None, "--seq-length", "--encoder-seq-length")
    """Tokens of one training sample."""
    max_position_embeddings: int | None = None
    """Rows of the learned position table, and the longest sequence the model accepts."""
    position_embedding_type: str = flag(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "mrope", "relative", "none"),
        refuse_values={
            "mrope": "use rope",
            "relative": "use rope",
        },
    )
    """How positions enter the model."""
    use_rotary_position_embeddings: bool = False
    """Older spelling of --position-embedding-type rope."""
    rotary_base: int = 10000
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    rotary_percent: float = 1.0
    """Share of each head that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighbouring pairs instead of the two halves of a head."""
    rotary_seq_len_interpolation_factor: int | None = None
    """Divide positions by this, to reach longer sequences (arXiv 2306.15595)."""
    use_rope_scaling: bool = False
    """Scale the low rotary frequencies as Llama 3.1 does (arXiv 2407.21783)."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling."""
    add_position_embedding: bool = flag(True, "--no-position-embedding")
    """Leave out learned positions; rotary ones are not touched."""
    rotary_base_local: int | None = None
    """Another base for layers with a window (Gemma 3, arXiv 2503.19786, section 2.1)."""
    no_rope_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr"
    )
    """Layers without rotary embedding: N for every N-th, or a 0/1 list such as ([0]*3+[1])*8."""
    normalization: str = flag("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    """Kind of norm."""
    norm_epsilon: float = 1e-5
    """Added to the variance inside the norm."""
    apply_layernorm_1p: bool = False
    """Store norm weights minus one, so that weight decay pulls towards the identity."""
    apply_residual_connection_post_layernorm: bool = False
    """Take the residual after the input norm of a layer."""
    sandwich_norm: bool = False
    """A norm also behind attention and MLP, before the residual is added (arXiv 2105.13290)."""
    use_parallel_residual: bool = False
    """Attention and MLP read the same input (GPT-NeoX-20B, arXiv 2204.06745)."""
    embedding_multiplier: float = 1.0
    """Factor on the word embeddings."""
    swiglu: bool = False
    """SiLU-gated MLP (arXiv 2002.05202)."""
    squared_relu: bool = False
    """Squared ReLU as activation (arXiv 2109.08668)."""
    geglu: bool = False
    """MLP gated by the tanh approximation of GELU (arXiv 2002.05202)."""
    quick_geglu: bool = False
    """MLP gated by x * sigmoid(1.702 x)."""
    glu_linear_offset: float = 0.0
    """Added to the branch that the gate multiplies."""
    activation_func_clamp_value: float | None = None
    """Bound of a gated MLP's branches before the nonlinearity."""
    openai_gelu: bool = False
    """The tanh approximation of GELU."""
    add_bias_linear: bool = flag(True, "--disable-bias-linear")
    """Leave out the biases of all linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection, also with --disable-bias-linear."""
    untie_embeddings_and_output_weights: bool = False
    """Give the output head its own weights instead of the embedding's."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""
    qk_layernorm: bool = False
    """Normalise each query and key head (arXiv 2302.05442)."""
    window_size: tuple[int, int] | None = flag(None, parse=int_pair, type_text="int,int")
    """Sliding window: keys to the left and right that a query may see; -1 is unlimited."""
    window_attn_skip_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr"
    )
    """Layers without the window: N for every N-th, or a list of 1 (window) and 0 per layer."""
    softmax_scale: float | None = None
    """Factor on attention scores. Default 1 / sqrt(kv-channels)."""
    attn_logit_softcapping: float | None = None
    """Bound c of attention scores: c * tanh(score / c) (arXiv 2408.00118)."""
    final_logit_softcapping: float | None = None
    """Bound c of the model's logits, in the same form."""
    softmax_type: str = flag(
        "vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    """Denominator of the attention softmax: plus one, or plus a learned sink per head."""
    attention_output_gate: bool = flag(False, refuse="train without an output gate")
    """Multiply the attention output by a learned gate."""
    apply_query_key_layer_scaling: bool = False
    """Divide attention logits by the layer number before rounding to half precision."""
    attention_backend: AttnBackend = AttnBackend.auto
    """Kernel of the core attention."""
    transformer_impl: str = flag(
        "transformer_engine",
        choices=("local", "transformer_engine", "inference_optimized"),
        refuse_values={"inference_optimized": "use local"},
    )
    """Where layers come from; without Transformer Engine installed, local ones are used."""
    export_force_local_attention: bool = flag(False, refuse="use --transformer-impl local")
    """Take the local attention when a model is exported."""
    enable_gpt_oss: bool = flag(
        False,
        refuse="use --load-hf with a GPT-OSS model, or say what it stands for:"
        " --position-embedding-type yarn --rotary-scaling-factor 32 and so on",
    )
    """The shape of GPT-OSS."""
    spec: list[str] | None = flag(None, nargs="*")
    """Own layer spec: module and function name (or module.function)."""
    hybrid_layer_pattern: str | None = flag(None, refuse="describe the model by --num-layers")
    """Sequence of unlike layers, one letter each."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    init_method_xavier_uniform: bool = False
    """Draw initial weights from the Xavier uniform distribution instead."""
    perform_initialization: bool = flag(True, "--no-initialization")
    """Leave weights unfilled: for runs that load a checkpoint anyway."""
    fp16_lm_cross_entropy: bool = flag(False, refuse="the loss is computed in fp32")
    """Compute the cross entropy in half precision."""
    use_mcore_models: bool = flag(False, note="models are always those of megatron.core")
    """Accepted from older launch scripts."""
    use_legacy_models: bool = flag(False, refuse="drop it: models are those of megatron.core")
    """Ask for models from before megatron.core."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Flags of multi-latent attention (arXiv 2405.04434) and multi-token prediction."""

    multi_latent_attention: bool = False
    """Attention whose keys and values are made from one short vector per token."""
    q_lora_rank: int | None = flag(None, part_of="multi_latent_attention")
    """Width of compressed queries."""
    kv_lora_rank: int = flag(32, part_of="multi_latent_attention")
    """Width of compressed keys and values."""
    qk_head_dim: int = flag(128, part_of="multi_latent_attention")
    """Width of a query/key head without its rotary part."""
    qk_pos_emb_head_dim: int = flag(64, part_of="multi_latent_attention")
    """Width of the rotary part of a head."""
    v_head_dim: int = flag(128, part_of="multi_latent_attention")
    """Width of a value head."""
    rope_type: str | None = flag(None, choices=("rope", "yarn"), part_of="multi_latent_attention")
    """Positions of latent attention: yarn stretches them by --rotary-scaling-factor, and is rope
    with the factor 1."""
    rotary_scaling_factor: float = 1.0
    """YaRN: how many times longer the context becomes (arXiv 2309.00071). Of multi-latent attention
    and of --position-embedding-type yarn, like the next ones."""
    original_max_position_embeddings: int = 4096
    """YaRN: context that the model was trained with first."""
    beta_fast: float = 32.0
    """YaRN: channels that turn more often than this within that context keep their speed."""
    beta_slow: float = 1.0
    """YaRN: channels that turn less often are slowed down by the whole factor."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: let the share between the two change over whole channels."""
    mscale: float = 1.0
    """YaRN attention temperature: how strongly scores grow with the factor."""
    mscale_all_dim: float = flag(0.0, part_of="multi_latent_attention")
    """The same for the part of a head that does not rotate."""
    mtp_num_layers: int | None = None
    """Further tokens that are predicted, each by one more layer (arXiv 2412.19437)."""
    mtp_loss_scaling_factor: float = flag(0.1, part_of="mtp_num_layers")
    """Weight of their loss."""
