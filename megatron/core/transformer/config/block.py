"""The components of one layer: norms, activation, biases, attention variants, dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flag_expressions import int_pair, layer_pattern
from megatron.core.settings.flags import flag, no_flag
from megatron.core.transformer.config.field_values import BELOW_ONE, NOT_NEGATIVE, POSITIVE
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.norm import NORMS

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")
DRAWN_BY_PLACE = "dropout is keyed by a token's place in the micro batch"


@dataclass
class BlockConfig:
    """Norms, MLP, attention and dropout of a layer."""

    transformer_impl: str = flag(
        "transformer_engine",
        choices=("local", "transformer_engine", "inference_optimized"),
        note_values={"inference_optimized": "layers are local ones"},
        per_micro_batch={"transformer_engine": "that library's attention has one group of ranks"},
    )
    """Implementation of the layers, unless a layer spec names it. Without Transformer Engine
    installed, the local layers are used."""
    normalization: str = flag("LayerNorm", choices=tuple(NORMS))
    """"LayerNorm" or "RMSNorm" (arXiv 1910.07467). Norms without weights have no parameters, as in
    nanochat."""
    embed_layernorm: bool = False
    """Norm the word embeddings (BLOOM, arXiv 2211.05100, section 3.2.2)."""
    layernorm_epsilon: float = flag(1e-05, name="norm_epsilon")
    """Added to the variance inside the norm."""
    layernorm_zero_centered_gamma: bool = flag(False, name="apply_layernorm_1p")
    """Store the norm's weight minus one, so weight decay pulls towards the identity."""
    qk_layernorm: bool = False
    """Normalise each query and key head (arXiv 2302.05442, section 2)."""
    qk_layernorm_across_heads: bool = flag(False, part_of="qk_layernorm")
    """Normalise all query heads of a token together, and all key heads (OLMo 2, arXiv 2501.00656,
    section 3; MiniMax M2)."""
    qk_layernorm_after_rope: bool = flag(False, part_of="qk_layernorm")
    """Normalise heads after their rotation (Hunyuan)."""
    qk_l2_norm: bool = False
    """Divide each query and key head by the root of its mean square, in layers that rotate (Llama
    4); the norm has no weights."""
    v_l2_norm: bool = False
    """Divide each value head by the root of its mean square; the norm has no weights (Gemma 4)."""
    attention_k_eq_v: bool = False
    """Use the keys, before their norm and their rotation, as values (Gemma 4)."""
    attention_output_gate: bool = False
    """Multiply the output of attention by a sigmoid gate for each channel of a head; the query
    projection also computes the gates (arXiv 2505.06708, as in Qwen3-Next). Latent attention has a
    projection of its own, to a gate for each head (Ling 3)."""
    mla_gate_by_channel: bool = flag(False, part_of="attention_output_gate")
    """Latent attention has a gate for each channel of a head (Hunyuan 4), not for each head."""
    attention_gate_by_head: bool = flag(False, part_of="attention_output_gate")
    """Attention without latents has one gate for each head (Laguna, Step 3.7), not for each
    channel."""
    attention_gate_activation: str = flag(
        "sigmoid", choices=("sigmoid", "softplus"), part_of="attention_output_gate"
    )
    """Function that computes the gate from its projection (Laguna: softplus)."""
    apply_residual_connection_post_layernorm: bool = False
    """Take the residual after the input norm of a layer."""

    sandwich_norm: bool = False
    """Normalise also the output of each branch before it is added to the residual stream (CogView,
    arXiv 2105.13290, section 2.4; Gemma 2, arXiv 2408.00118, section 2)."""
    reordered_norm: bool = False
    """Normalise the output of each branch instead of its input, except in layers whose mixer is a
    recurrence (OLMo 2, arXiv 2501.00656, section 3; OLMo Hybrid)."""
    use_parallel_residual: bool = False
    """Feed attention and MLP the same input: x + attention(norm(x)) + mlp(norm'(x)) (GPT-NeoX-20B,
    section 2.1, arXiv 2204.06745)."""
    share_parallel_norm: bool = flag(False, part_of="use_parallel_residual")
    """One norm precedes both branches: x + attention(norm(x)) + mlp(norm(x)) (GPT-J; Command R)."""
    enable_mhc_connections: bool = False
    """Keep several parallel residual streams, which each branch reads and writes with learned
    weights: manifold-constrained hyper-connections (mHC, arXiv 2512.24880)."""
    mhc_num_residual_streams: int = flag(4, part_of="enable_mhc_connections", within=POSITIVE)
    """Number of residual streams."""
    mhc_sinkhorn_iterations: int = flag(20, part_of="enable_mhc_connections", within=NOT_NEGATIVE)
    """Iterations that make the matrix that mixes the streams doubly stochastic. With 0 the streams
    are not mixed (Hunyuan 4)."""
    mhc_init_gating_factor: float = flag(0.01, part_of="enable_mhc_connections")
    """Initial factor on the part of the streams' weights that depends on the token."""
    mhc_epsilon: float = flag(1e-6, part_of="enable_mhc_connections", within=NOT_NEGATIVE)
    """Added to the streams' weights, and to the sums that they are divided by."""
    mhc_post_magnitude: float = flag(2.0, part_of="enable_mhc_connections", within=POSITIVE)
    """Largest weight of a branch's output in a stream."""
    mhc_learned_contraction: bool = flag(False, part_of="enable_mhc_connections")
    """Learn the weights of the streams in their sum before the final norm (DeepSeek-V4). Without it
    the sum is their mean."""
    altup_num_inputs: int = flag(1, within=POSITIVE)
    """Number of parallel residual streams of AltUp (arXiv 2301.13310, as in Gemma 3n). A layer runs
    on one of them, and predicts and corrects all. 1: a plain residual stream."""
    altup_active_idx: int = flag(0, part_of="altup_num_inputs", within=NOT_NEGATIVE)
    """Number, from 0, of the stream that layers run on."""
    altup_coef_clip: float | None = flag(None, part_of="altup_num_inputs", within=POSITIVE)
    """Clamp the matrices of the coefficients of AltUp to this value in training. None does not
    clamp."""
    laurel_rank: int = flag(0, within=NOT_NEGATIVE)
    """Rank of a learned residual branch beside the mixer of each layer (LAuReL, arXiv 2411.07501,
    as in Gemma 3n). The sum of both and the residual stream is divided by the root of 2. 0: no
    branch."""
    layer_scalar: bool = False
    """Multiply the output of each layer by a number of the checkpoint that training does not change
    (Gemma 4)."""
    per_layer_embed_dim: int = flag(0, within=NOT_NEGATIVE)
    """Width of the vectors of layers (Gemma 3n and 4). Each layer has its own vector of a token: a
    row of a second embedding table, added to a projection of the word embedding. 0 for none."""
    per_layer_vocab_size: int | None = flag(None, part_of="per_layer_embed_dim", within=POSITIVE)
    """Number of token ids in this table; later ids have the row of id 0 (Gemma 3n). None: all."""
    residual_multiplier: float = flag(1.0, within=POSITIVE)
    """Factor on the output of each branch (attention, MLP, other mixers) in the residual stream
    (Granite; muP for depth, arXiv 2310.02244)."""
    embedding_multiplier: float = flag(1.0, within=POSITIVE)
    """Factor on the word embeddings."""
    logits_scaling: float = flag(1.0, within=POSITIVE)
    """Divisor of the logits, applied before --final-logit-softcapping (Granite)."""
    final_logit_softcapping: float | None = flag(None, within=POSITIVE)
    """Bound c of the logits of the head: c * tanh(logit / c). With None they are unbounded."""

    add_bias_linear: bool = flag(
        True, "--disable-bias-linear", help="Leave out the biases of all linear layers."
    )
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection, also with --disable-bias-linear."""
    gated_linear_unit: bool = no_flag(False)
    """Gate the MLP: fc2(act(gate) * up) (arXiv 2002.05202)."""
    activation_func: Callable[..., Any] = no_flag(F.gelu)
    """Nonlinearity of the MLP: a function, or the class of a module with parameters of each MLP."""
    mlp_factors: list[float] | None = flag(None, nargs="+")
    """Factors on the gate before the nonlinearity and on the input of the second matrix of a gated
    MLP (Falcon-H1). None: 1."""
    activation_sparsity: float = flag(0.0, within=BELOW_ONE)
    """Share of the activations of a dense MLP that are zero, about: before the nonlinearity, the
    quantile of this share, of a normal distribution with the mean and the deviation of a token, is
    subtracted, and the rest is cut off at zero (statistical top-k, arXiv 2506.06644, as in Gemma
    3n). 0 keeps all."""
    glu_linear_offset: float = 0.0
    """Added to the branch that a gate multiplies (GPT-OSS: 1)."""
    activation_func_clamp_value: float | None = None
    """Clamp a gated MLP's branches before the nonlinearity to this value: the gate from above, the
    other branch on both sides. None does not clamp."""
    activation_func_clamp_after: bool = flag(
        False, part_of=("activation_func_clamp_value", "moe_activation_func_clamp_value")
    )
    """Clamp the gate after the nonlinearity (Step 3.7)."""

    hidden_dropout: float = flag(0.1, per_micro_batch=DRAWN_BY_PLACE, within=BELOW_ONE)
    """Dropout probability of the embedding and of each residual branch."""
    attention_dropout: float = flag(0.1, per_micro_batch=DRAWN_BY_PLACE, within=BELOW_ONE)
    """Dropout probability of the attention weights."""

    attention_value_scale: float = flag(1.0, within=POSITIVE)
    """Factor on the values of attention (MiMo-V2)."""
    softmax_scale: float | None = None
    """Factor on the attention logits; None means 1 / sqrt(kv_channels)."""
    softmax_scale_local: float | None = None
    """The same in layers with a window; None means the factor of all layers."""
    attention_softmax_in_fp32: bool = flag(True, cli_default=False)
    """Compute the unfused softmax in fp32."""
    apply_query_key_layer_scaling: bool = False
    """Divide the logits by the layer number before, and multiply after, rounding to half."""
    softmax_type: str = flag("vanilla", choices=SOFTMAX_TYPES)
    """Denominator of the attention weights: "vanilla"; "off-by-one" adds 1, a key of score zero and
    value zero; "learnable" learns the score of this key for each head (arXiv 2309.17453)."""
    window_size: tuple[int, int] | None = flag(None, parse=int_pair, type_text="int,int")
    """Sliding window: keys to the left and right that a query may see; -1 is unlimited."""
    window_attn_skip_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr", within=POSITIVE
    )
    """Layers with the window, or with chunks: N for all but every N-th layer, or 1 or 0 for each
    layer. None is all layers."""
    attention_chunk_size: int | None = flag(None, within=POSITIVE)
    """Tokens of a chunk: a query attends to the keys of its own chunk (Llama 4). Each document is
    cut into chunks from its first token."""
    attn_logit_softcapping: float | None = flag(None, within=POSITIVE)
    """Bound c of the scaled attention scores, c * tanh(score / c) (Gemma 2, arXiv 2408.00118,
    section 2). With None they are unbounded."""
    attention_backend: AttnBackend = AttnBackend.auto
    """Kernel of the core attention. Kernels of flash and fused may draw dropout by themselves;
    their draws depend on the layout."""

    def is_local(self, layer_number: int) -> bool:
        """Return whether a layer, by its 1-based number in the whole model, has the window or the
        chunks of a model with one of them."""
        pattern = self.window_attn_skip_freq
        if isinstance(pattern, int):
            return layer_number % pattern != 0
        # Layers of multi-token prediction, numbered after the last layer, follow the last one.
        return not pattern or bool(pattern[min(layer_number, len(pattern)) - 1])

    def window_of(self, layer_number: int) -> tuple[int, int] | None:
        """Return the window of a layer, by its 1-based number in the whole model."""
        return self.window_size if self.is_local(layer_number) else None

    def chunk_of(self, layer_number: int) -> int | None:
        """Return the chunk size of a layer, by its 1-based number in the whole model."""
        return self.attention_chunk_size if self.is_local(layer_number) else None


def block_problems(config: BlockConfig) -> Iterator[MegatronError]:
    """Yield the problems of the layer's composition."""
    if config.use_parallel_residual and config.apply_residual_connection_post_layernorm:
        yield ConfigError(
            "use_parallel_residual with apply_residual_connection_post_layernorm.",
            rule="parallel branches norm one input twice, so there is no single residual after the"
            " norm",
            flags=[
                "--use-parallel-residual",
                "--apply-residual-connection-post-layernorm",
            ],
            fix="drop one of them",
        )
    if config.enable_mhc_connections and (
        config.use_parallel_residual or config.apply_residual_connection_post_layernorm
    ):
        yield ConfigError(
            "enable_mhc_connections with a residual connection of another kind.",
            rule="each branch reads its own weighted sum of the streams, and its output is added to"
            " the streams",
            flags=[
                "--enable-mhc-connections",
                "--use-parallel-residual",
                "--apply-residual-connection-post-layernorm",
            ],
            fix="drop --use-parallel-residual and --apply-residual-connection-post-layernorm",
        )
    yield from _altup_problems(config)
    if config.mlp_factors is not None and (
        len(config.mlp_factors) != 2 or not config.gated_linear_unit
    ):
        yield ConfigError(
            f"mlp_factors={config.mlp_factors} with gated_linear_unit={config.gated_linear_unit}.",
            rule="a gated MLP has two factors",
            flags=["--mlp-factors", "--swiglu"],
            fix="give two numbers, and use --swiglu",
        )
    others = ("sandwich_norm", "use_parallel_residual", "apply_residual_connection_post_layernorm")
    if config.reordered_norm and (given := [name for name in others if getattr(config, name)]):
        yield ConfigError(
            f"reordered_norm with {', '.join(given)}.",
            rule="the norm of a branch's output replaces the norm of its input",
            flags=["--reordered-norm", *("--" + name.replace("_", "-") for name in given)],
            fix="drop one of them",
        )
    if config.qk_layernorm_across_heads and config.normalization != "RMSNorm":
        yield ConfigError(
            f"qk_layernorm_across_heads with normalization={config.normalization!r}.",
            rule="tensor-parallel ranks add up the squares of their heads, but no means",
            flags=["--qk-layernorm-across-heads", "--normalization"],
            fix="use --normalization RMSNorm",
        )
    if config.window_size is not None and (
        len(config.window_size) != 2 or min(config.window_size) < -1
    ):
        yield ConfigError(
            f"window_size={config.window_size}.",
            rule="a window is two numbers, left and right, each -1 (unlimited) or more",
            flags=["--window-size"],
            fix="use --window-size 4096,0 for a causal window",
        )


def _altup_problems(config: BlockConfig) -> Iterator[MegatronError]:
    """Yield the problems of AltUp and of the residual branch of low rank."""
    streams = {"--altup-num-inputs": config.altup_num_inputs > 1}
    branch = {"--laurel-rank": config.laurel_rank > 0}
    connections = {"--enable-mhc-connections": config.enable_mhc_connections}
    for asked, excluded, rule in (
        (streams, connections, "AltUp and hyper-connections each define the residual streams"),
        (branch, connections | {"--use-parallel-residual": config.use_parallel_residual},
         "the branch is added to the residual stream together with the mixer, before the MLP"),
    ):  # fmt: skip
        wrong = [flag for flag, is_on in excluded.items() if is_on]
        if wrong and all(asked.values()):
            yield ConfigError(
                f"{', '.join(asked)} with {', '.join(wrong)}.",
                rule=rule,
                flags=[*asked, *wrong],
                fix=f"drop {', '.join(wrong)}",
            )
    if config.altup_num_inputs > 1 and config.altup_active_idx >= config.altup_num_inputs:
        yield ConfigError(
            f"altup_active_idx={config.altup_active_idx} of altup_num_inputs="
            f"{config.altup_num_inputs}.",
            rule="streams are counted from 0",
            flags=["--altup-active-idx", "--altup-num-inputs"],
            fix="use --altup-active-idx 0",
        )
