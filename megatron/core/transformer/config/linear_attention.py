"""Layers whose mixer is not attention to all keys: their positions and sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flag_expressions import float_pair, layer_pattern
from megatron.core.settings.flags import flag
from megatron.core.transformer.config.field_values import POSITIVE
from megatron.core.transformer.config.layer_kinds import (
    ATTENTION,
    ATTENTION_AND_MAMBA,
    COMPRESSED_ATTENTION,
    DENSE,
    EXPERTS,
    GATED_DELTA_NET,
    KIMI,
    MAMBA,
    SHORT_CONV,
    SPARSE_ATTENTION,
    HybridPattern,
    LayerKind,
    hybrid_pattern,
)
from megatron.core.transformer.config.layer_sizes import LayerSizesConfig
from megatron.core.utils import best_divisor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

MIXER_OF_VARIANT = {
    "gated_delta_net": GATED_DELTA_NET,
    "gdn": GATED_DELTA_NET,
    "kda": KIMI,
    "mamba2": MAMBA,
    "short_conv": SHORT_CONV,
    "attention_and_mamba2": ATTENTION_AND_MAMBA,
    "dsa": SPARSE_ATTENTION,
    "dsv4_hybrid": COMPRESSED_ATTENTION,
}
"""Values of `experimental_attention_variant` -> the mixer of such layers."""
_NOT_HERE = "use gated_delta_net, kda, mamba2, short_conv, dsa or dsv4_hybrid"
_VARIANT = "experimental_attention_variant"
_MIXER = _VARIANT, "hybrid_layer_pattern"


@dataclass
class LinearAttentionConfig(LayerSizesConfig):
    """Layers whose mixer is a recurrence (Gated DeltaNet, Kimi Delta Attention, Mamba-2) or a short
    convolution."""

    experimental_attention_variant: str | None = flag(
        None,
        choices=(
            "gdn",
            "gdn2",
            "dsa",
            "dsv4_hybrid",
            "gated_delta_net",
            "kda",
            "mamba2",
            "short_conv",
            "attention_and_mamba2",
        ),
        refuse_values={"gdn2": _NOT_HERE},
    )
    """Mixer of the layers of --linear-attention-freq: gated_delta_net, for short gdn (arXiv
    2412.06464), kda, Kimi Delta Attention (arXiv 2510.26692), mamba2 (arXiv 2405.21060),
    short_conv, a short convolution between two gates (LFM2, arXiv 2511.23404),
    attention_and_mamba2, the sum of attention and Mamba-2 (arXiv 2507.22448), dsa, attention with
    latents to the keys that an indexer chooses (arXiv 2512.02556), or dsv4_hybrid, attention to a
    window and to compressed entries (DeepSeek-V4)."""
    linear_attention_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr", part_of=_VARIANT, within=POSITIVE
    )
    """Layers with this mixer: N for all but every N-th, which keeps attention, or 1 or 0 for each
    layer. None is all layers."""
    hybrid_layer_pattern: str | None = flag(
        None, "--hybrid-layer-pattern", "--hybrid-override-pattern"
    )
    """One letter for each layer, which is either a mixer or an MLP: M Mamba-2, G Gated DeltaNet, K
    Kimi Delta Attention, S short convolution, D sparse attention, * attention, - MLP, E experts. A
    group such as [*-] is one layer with a mixer and an MLP, | separates pipeline stages, / precedes
    the layers that predict a later token: "M-M*-|M-[M-]/*E/*E"."""
    linear_conv_kernel_dim: int = flag(4, part_of=_MIXER, within=POSITIVE)
    """Taps of the causal convolution, before the recurrence or alone."""
    linear_key_head_dim: int = flag(128, part_of=_MIXER, within=POSITIVE)
    """Width of a query and key head of Gated DeltaNet, and of Kimi Delta Attention."""
    linear_value_head_dim: int = flag(128, part_of=_MIXER, within=POSITIVE)
    """Width of a value head of Gated DeltaNet, and of Kimi Delta Attention."""
    linear_num_key_heads: int = flag(16, part_of=_MIXER, within=POSITIVE)
    """Query and key heads of Gated DeltaNet, and of Kimi Delta Attention."""
    linear_num_value_heads: int = flag(32, part_of=_MIXER, within=POSITIVE)
    """Value heads of Gated DeltaNet and of Kimi Delta Attention; each key head serves an equal
    number of value heads."""
    linear_full_rank_gates: bool = flag(False, part_of=_MIXER)
    """Kimi Delta Attention: project decays and output gates from tokens, without latents (Ling 3).
    """
    linear_decay_bound: float | None = flag(None, part_of=_MIXER)
    """Kimi Delta Attention: least log decay b of a channel in a step, b * sigmoid(exp(A) * x) of
    the projection x with its bias. None: -exp(A) * softplus(x), without a bound."""
    linear_allow_neg_eigval: bool = flag(False, part_of=_MIXER)
    """Double the write strength of Gated DeltaNet and Kimi Delta Attention, so that their state
    transitions may have negative eigenvalues (arXiv 2411.12537)."""
    linear_norm_epsilon: float | None = flag(None, part_of=_MIXER, within=POSITIVE)
    """Added to the variance in the norms of heads of both; None is --norm-epsilon."""
    mamba_state_dim: int = flag(128, part_of=_MIXER, within=POSITIVE)
    """Width of the state of Mamba-2."""
    mamba_head_dim: int = flag(64, part_of=_MIXER, within=POSITIVE)
    """Width of a head of Mamba-2."""
    mamba_num_groups: int = flag(8, part_of=_MIXER, within=POSITIVE)
    """Groups of heads of Mamba-2; the heads of a group share B and C."""
    mamba_num_heads: int | None = flag(None, part_of=_MIXER)
    """Heads of Mamba-2; None: 2 * hidden_size / mamba_head_dim."""
    mamba_step_limits: tuple[float, float] = flag(
        (0.0, math.inf), parse=float_pair, type_text="float,float", part_of=_MIXER
    )
    """Least and largest step size of Mamba-2."""
    mamba_gated_norm: bool = flag(
        True, "--no-mamba-gated-norm", part_of=_MIXER, help="Mamba-2 has no norm after its gate."
    )
    """Norm each group of Mamba-2 after its gate."""
    mamba_factors: list[float] | None = flag(None, nargs="+", part_of=_MIXER)
    """Factors on the input of Mamba-2, the parts of its projection (gates, inputs, B, C and step
    sizes) and its output: 7 numbers. None: 1."""
    attention_factors: list[float] | None = flag(None, nargs="+", part_of=_VARIANT)
    """Factors on input, keys and output of the attention of attention_and_mamba2. None: 1."""

    @property
    def has_compressed_attention(self) -> bool:
        """Whether the layers attend to a window and to compressed entries."""
        letters = self.pattern.kinds if self.pattern else ()
        variant = self.experimental_attention_variant
        return variant == COMPRESSED_ATTENTION or any(kind.is_compressed for kind in letters)

    @property
    def pattern(self) -> HybridPattern | None:
        """The letters of the layers; None without them.

        Raises:
            ConfigError: they cannot be read.
        """
        return (
            None if self.hybrid_layer_pattern is None else hybrid_pattern(self.hybrid_layer_pattern)
        )

    @property
    def factors_of_attention(self) -> list[float]:
        """The factors on input, keys and output of attention beside Mamba-2."""
        return self.attention_factors or [1.0] * 3

    @property
    def factors_of_mamba(self) -> list[float]:
        """The factors on input, the five parts of the projection, and output of Mamba-2."""
        return self.mamba_factors or [1.0] * 7

    def kinds_of_layers(self, has_experts: Sequence[bool]) -> tuple[LayerKind, ...]:
        """Return the kind of each layer.

        Args:
            has_experts: for each layer whether its MLP are experts, if there are no letters.
        """
        if self.pattern is not None:
            return self.pattern.kinds
        mixer = MIXER_OF_VARIANT.get(self.experimental_attention_variant or "", ATTENTION)
        pattern, count = self.linear_attention_freq, len(has_experts)
        if isinstance(pattern, int):
            is_linear = [number % pattern != 0 for number in range(1, count + 1)]
        else:
            is_linear = [bool(is_one) for is_one in pattern or [1] * count]
        usual = tuple(
            LayerKind(mixer if is_one else ATTENTION, EXPERTS if routed else DENSE)
            for is_one, routed in zip(is_linear, has_experts, strict=True)
        )
        return tuple(self.block(layer).kind(kind) for layer, kind in enumerate(usual, 1))


def derive_mixers(config: TransformerConfig) -> None:
    """Fill the number of heads of Mamba-2."""
    if config.mamba_num_heads is None and config.mamba_head_dim > 0:
        config.mamba_num_heads = 2 * config.hidden_size // config.mamba_head_dim


def _split_problems(
    name: str, blocks: int, name_of_heads: str, heads: int, tp: int, owned: str
) -> Iterator[MegatronError]:
    """Yield the problems of splitting blocks that heads share: ranks own whole blocks."""
    flags = ["--" + each.replace("_", "-") for each in (name, name_of_heads)]
    if blocks < 1:
        return  # reported already
    if heads < 1 or heads % blocks:
        yield ConfigError(
            f"{name_of_heads}={heads} cannot share {name}={blocks}.",
            rule="each serves a whole number of heads",
            flags=flags[::-1],
            fix=f"use {flags[0]} {best_divisor(heads, blocks)}",
        )
    if blocks % tp:
        yield ConfigError(
            f"{name}={blocks} cannot be split over tensor-parallel size {tp}.",
            rule=f"each tensor-parallel rank owns a whole number of {owned}",
            flags=[flags[0], "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(blocks, tp)}",
        )


def linear_attention_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of these layers."""
    num_layers, tp = config.num_layers, config.tensor_model_parallel_size
    if config.hybrid_layer_pattern is None and config.experimental_attention_variant is None:
        return
    problems = list(_pattern_problems(config, num_layers))
    if problems:
        yield from problems
        return
    for name, count in (("attention_factors", 3), ("mamba_factors", 7)):
        factors = getattr(config, name)
        if factors is not None and len(factors) != count:
            flag_name = "--" + name.replace("_", "-")
            yield ConfigError(
                f"{name} has {len(factors)} numbers.",
                rule=f"there are {count} factors",
                flags=[flag_name],
                fix=f"give {count} numbers",
            )
    kinds = config.kinds_of_layers([False] * num_layers)
    mixers = {kind.recurrence or kind.mixer for kind in kinds}
    if mixers & {GATED_DELTA_NET, KIMI}:
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        yield from _split_problems("linear_num_key_heads", keys, "linear_num_value_heads",
                                    values, tp, "key heads, and the value heads that share"
                                    " them")  # fmt: skip
    if config.multi_latent_attention and any(k.mixer == ATTENTION_AND_MAMBA for k in kinds):
        yield ConfigError(
            "experimental_attention_variant=attention_and_mamba2 with multi-latent attention.",
            rule="the attention beside Mamba-2 has no latents",
            flags=["--experimental-attention-variant", "--multi-latent-attention"],
            fix="drop --multi-latent-attention",
        )
    blocks = math.gcd(config.hidden_size, config.num_attention_heads)
    if SHORT_CONV in mixers and blocks % tp:
        yield ConfigError(
            f"short convolutions of {blocks} blocks of channels cannot be split over"
            f" tensor-parallel size {tp}.",
            rule="the number of blocks is the greatest common divisor of width and attention heads,"
            " and each tensor-parallel rank owns whole blocks",
            flags=["--num-attention-heads", "--tensor-model-parallel-size"],
            fix=f"use --tensor-model-parallel-size {best_divisor(blocks, tp)}",
        )
    if MAMBA in mixers:
        groups, heads = config.mamba_num_groups, config.mamba_num_heads or 0
        yield from _split_problems("mamba_num_groups", groups, "mamba_num_heads", heads, tp,
                                    "groups, and the heads that share them")  # fmt: skip


def _pattern_problems(config: LinearAttentionConfig, num_layers: int) -> Iterator[MegatronError]:
    variant, freq = config.experimental_attention_variant, config.linear_attention_freq
    try:
        letters = config.pattern
    except ConfigError as error:
        yield error
        return
    if letters is not None:
        if variant is not None:
            yield ConfigError(
                "hybrid_layer_pattern with experimental_attention_variant.",
                rule="the letters define the kind of each layer",
                flags=["--hybrid-layer-pattern", "--experimental-attention-variant"],
                fix="drop --experimental-attention-variant",
            )
        if len(letters.kinds) != num_layers:
            yield ConfigError(
                f"hybrid_layer_pattern has {len(letters.kinds)} layers for a model of"
                f" {num_layers}.",
                rule="the pattern is one letter, or one group in brackets, per layer",
                flags=["--hybrid-layer-pattern", "--num-layers"],
                fix=f"drop --num-layers, or use --num-layers {len(letters.kinds)}",
            )
        return
    if isinstance(freq, list) and (len(freq) != num_layers or set(freq) - {0, 1}):
        yield ConfigError(
            f"linear_attention_freq gives {len(freq)} layers for a model of {num_layers}.",
            rule="the pattern is one 0 or 1 per layer",
            flags=["--linear-attention-freq", "--num-layers"],
            fix="use a number N, or a list expression of the right length",
        )
