"""Sizes of the model, its initial weights, and maximal update parametrisation (muP).

muP: G. Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
Transfer", table 8 and appendix B.1, arXiv 2203.03466. Initial values and factors of the forward
pass are here; learning rates in `optimizer.param_groups`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.parameters.initialization import init_method_normal, scaled_init_method_normal
from megatron.core.settings.flags import flag, no_flag
from megatron.core.transformer.config.field_values import NOT_NEGATIVE, POSITIVE

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class ShapeConfig:
    """Number of layers, width, heads, vocabulary."""

    num_layers: int = flag(0, cli_default=None, within=POSITIVE)
    """Number of transformer layers of the whole model. In an encoder-decoder model a value up to
    --encoder-num-layers is the encoder's number, and the decoder's layers are added to it."""
    encoder_num_layers: int | None = None
    """Number of these layers that belong to the encoder of an encoder-decoder model; None: the
    model is one stack. For a model of one stack the flag is another spelling of --num-layers."""
    hidden_size: int = flag(0, cli_default=None, within=POSITIVE)
    """Width of the residual stream."""
    num_attention_heads: int = flag(0, cli_default=None, within=POSITIVE)
    """Query heads."""
    num_query_groups: int | None = flag(None, cli_default=1)
    """Key/value heads; each serves num_attention_heads / num_query_groups query heads (GQA, arXiv
    2305.13245). None means one per query head."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default 4 * hidden-size, or 2/3 of it rounded down to 64 with --swiglu."""
    kv_channels: int | None = flag(None, within=POSITIVE)
    """Width of one head; None means hidden_size / num_attention_heads, if that is whole."""
    v_channels: int | None = flag(None, within=POSITIVE)
    """Width of a value head; None means kv_channels. Latent attention has --v-head-dim."""
    num_kv_shared_layers: int = flag(0, within=NOT_NEGATIVE)
    """Number of layers at the end that attend to the keys and values of the last earlier layer with
    the same window (Gemma 3n and 4; W. Brandon et al., arXiv 2405.12981)."""
    unpadded_vocab_size: int | None = no_flag(None, is_arg=True)
    """Number of real token ids. Further rows pad the vocabulary to a size that splits evenly; the
    loss ignores them."""

    def shares_key_value(self, layer_number: int) -> bool:
        """Return whether a layer reads the keys and values of an earlier layer."""
        # Layers of multi-token prediction are numbered after the last layer.
        return self.num_layers - self.num_kv_shared_layers < layer_number <= self.num_layers


def shape_problems(config: ShapeConfig) -> Iterator[MegatronError]:
    """Yield the problems of the sizes by themselves."""
    if min(config.num_layers, config.hidden_size, config.num_attention_heads) < 1:
        return  # reported already
    heads, groups = config.num_attention_heads, config.num_query_groups
    if config.kv_channels is None:
        yield ConfigError(
            f"hidden_size={config.hidden_size} is not divisible by num_attention_heads={heads}.",
            rule="without --kv-channels a head is hidden_size / num_attention_heads wide",
            flags=["--hidden-size", "--num-attention-heads", "--kv-channels"],
            fix=f"use --hidden-size {-(-config.hidden_size // heads) * heads}",
        )
    if groups is None or groups < 1 or heads % groups:
        near = min(max(groups or 1, 1), heads)
        near -= next(less for less in range(near) if heads % (near - less) == 0)
        yield ConfigError(
            f"num_attention_heads={heads} cannot be shared by num_query_groups={groups}.",
            rule="each key/value head serves a whole number of query heads",
            flags=["--num-attention-heads", "--num-query-groups"],
            fix=f"use --num-query-groups {near}",
        )


def derive_shape(config: TransformerConfig) -> None:
    """Fill the sizes that follow from others."""
    if config.ffn_hidden_size is None:
        config.ffn_hidden_size = 4 * config.hidden_size
    if config.num_query_groups is None:
        config.num_query_groups = config.num_attention_heads
    heads = config.num_attention_heads
    if config.kv_channels is None and heads > 0:
        width, rest = divmod(config.hidden_size, heads)
        # A width that does not divide stays None, so that it differs from a width that was given.
        # Heads of multi-latent attention have their own widths.
        config.kv_channels = None if rest and not config.multi_latent_attention else width


@dataclass
class InitializationConfig:
    """Functions that fill a full weight in place."""

    init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills most weights; None means N(0, init_method_std^2)."""
    output_layer_init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills weights that end a residual branch; None means std / sqrt(2 * num_layers)."""
    embedding_init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills embeddings; None means init_method."""
    init_method_std: float = 0.02
    """Standard deviation of the default initialisers."""
    embedding_init_method_std: float | None = None
    """Standard deviation of embeddings; None means init_method_std."""


def derive_initialization(config: TransformerConfig) -> None:
    """Fill the initialisers that were not given."""
    if config.embedding_init_method is None:
        std = config.embedding_init_method_std
        config.embedding_init_method = (
            init_method_normal(std)
            if std is not None
            else config.init_method or init_method_normal(config.init_method_std)
        )
    std = config.init_method_std * config.hidden_init_factor
    if config.init_method is None:
        config.init_method = init_method_normal(std)
    if config.output_layer_init_method is None:
        layers = max(config.num_layers, 1)
        config.output_layer_init_method = scaled_init_method_normal(std, layers)


@dataclass
class MaximalUpdateConfig:
    """How a model is scaled with its width, relative to a base width."""

    use_mup: bool = False
    """Scale initial values, learning rates, attention and logits with the width, so that the best
    learning rate of a narrow model is also best for a wide one (muP, arXiv 2203.03466)."""
    mup_base_hidden_size: int | None = flag(None, part_of="use_mup", within=POSITIVE)
    """Width at which hyperparameters were tuned; the width multiplier is hidden-size / this."""
    mup_width_mult: float = flag(1.0, part_of="use_mup", within=POSITIVE)
    """Width multiplier where --mup-base-hidden-size is not given."""
    mup_base_head_dim: float | None = flag(None, part_of="use_mup", within=POSITIVE)
    """Width of a head for which attention has its usual scale, 1 / sqrt(width). None is 1."""
    mup_attn_scale_power: float = flag(1.0, part_of="use_mup", within=POSITIVE)
    """Power of the head's width that divides attention scores."""
    mup_embedding_mult: float = flag(1.0, part_of="use_mup", within=POSITIVE)
    """Factor on the word embeddings."""
    mup_output_mult: float = flag(1.0, part_of="use_mup", within=POSITIVE)
    """Factor on the logits, which are divided by the width multiplier."""

    @property
    def width_multiplier(self) -> float:
        """How many times wider than the base the model is; 1 without muP."""
        return self.mup_width_mult if self.use_mup else 1.0

    @property
    def hidden_init_factor(self) -> float:
        """Factor on the initial values of weights whose inputs grow with the width."""
        return self.width_multiplier**-0.5

    @property
    def logits_factor(self) -> float:
        """Factor on the logits."""
        return self.mup_output_mult / self.mup_width_mult if self.use_mup else 1.0

    def attention_scale(self, head_width: int) -> float:
        """Return the factor on attention scores of heads of this width."""
        if not self.use_mup:
            return 1.0 / math.sqrt(head_width)
        power = self.mup_attn_scale_power
        # Equal to the usual scale where the head is as wide as the base's.
        return (self.mup_base_head_dim or 1.0) ** (power - 0.5) * float(head_width) ** -power


def derive_maximal_update(config: TransformerConfig) -> None:
    """Fill the width multiplier."""
    base = config.mup_base_hidden_size
    if config.use_mup and base is not None and base > 0:
        config.mup_width_mult = config.hidden_size / base
