"""Layers that mix the sequence by a recurrence of fixed state: which they are, and their sizes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flag_expressions import layer_pattern
from megatron.core.settings.flags import flag
from megatron.core.utils import best_divisor

LINEAR_ATTENTION = ("gated_delta_net", "gdn")
"""Values of `experimental_attention_variant` whose layers are Gated DeltaNet."""
_NOT_HERE = "use gated_delta_net"
_PART = "experimental_attention_variant"


@dataclass
class LinearAttentionConfig:
    """Gated DeltaNet (arXiv 2412.06464) in the place of attention, in some of the layers."""

    experimental_attention_variant: str | None = flag(
        None,
        choices=("gdn", "gdn2", "dsa", "gated_delta_net"),
        refuse_values={"gdn2": _NOT_HERE, "dsa": _NOT_HERE},
    )
    """What mixes the sequence in the layers of --linear-attention-freq: gated_delta_net, for short
    gdn (arXiv 2412.06464)."""
    linear_attention_freq: int | list[int] | None = flag(
        None, parse=layer_pattern, type_text="int or list expr", part_of=_PART
    )
    """Which layers do so: N for all but every N-th, which keeps attention, or per layer 1 or 0.
    None is all of them."""
    linear_conv_kernel_dim: int = flag(4, part_of=_PART)
    """Taps of the causal convolution of queries, keys and values."""
    linear_key_head_dim: int = flag(128, part_of=_PART)
    """Width of a query and key head of these layers."""
    linear_value_head_dim: int = flag(128, part_of=_PART)
    """Width of a value head of these layers."""
    linear_num_key_heads: int = flag(16, part_of=_PART)
    """Query and key heads of these layers."""
    linear_num_value_heads: int = flag(32, part_of=_PART)
    """Value heads of these layers; each key head serves an equal number of them."""

    def linear_attention_layers(self, num_layers: int) -> list[bool]:
        """Return for each layer of the model whether it is a recurrence."""
        if self.experimental_attention_variant is None:
            return [False] * num_layers
        pattern = self.linear_attention_freq
        if isinstance(pattern, int):
            return [number % pattern != 0 for number in range(1, num_layers + 1)]
        return [bool(is_linear) for is_linear in pattern or [1] * num_layers]

    def check_linear_attention(self, num_layers: int, tp: int) -> list[MegatronError]:
        """Return the problems of these layers; tp is the tensor-parallel size."""
        variant, pattern = self.experimental_attention_variant, self.linear_attention_freq
        if variant is None:
            return []
        problems: list[MegatronError] = []
        if variant not in LINEAR_ATTENTION:
            problems.append(
                ConfigError(
                    f"experimental_attention_variant={variant!r} is unknown.",
                    rule=f"known variants are {', '.join(LINEAR_ATTENTION)}",
                    flags=["--experimental-attention-variant"],
                    fix="use gated_delta_net",
                )
            )
        if isinstance(pattern, list) and (len(pattern) != num_layers or set(pattern) - {0, 1}):
            problems.append(
                ConfigError(
                    f"linear_attention_freq gives {len(pattern)} layers for a model of"
                    f" {num_layers}.",
                    rule="the pattern is one 0 or 1 per layer",
                    flags=["--linear-attention-freq", "--num-layers"],
                    fix="use a number N, or a list expression of the right length",
                )
            )
        sizes = ("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim",
                 "linear_num_key_heads", "linear_num_value_heads")  # fmt: skip
        wrong = [name for name in sizes if getattr(self, name) < 1]
        if isinstance(pattern, int) and pattern < 1:
            wrong.append("linear_attention_freq")
        problems += [
            ConfigError(
                f"{name}={getattr(self, name)}.",
                rule="it is a positive number",
                flags=["--" + name.replace("_", "-")],
                fix=f"use --{name.replace('_', '-')} 4",
            )
            for name in wrong
        ]
        if wrong:
            return problems
        keys, values = self.linear_num_key_heads, self.linear_num_value_heads
        if values % keys:
            problems.append(
                ConfigError(
                    f"linear_num_value_heads={values} cannot share linear_num_key_heads={keys}.",
                    rule="each key head serves a whole number of value heads",
                    flags=["--linear-num-value-heads", "--linear-num-key-heads"],
                    fix=f"use --linear-num-key-heads {best_divisor(values, keys)}",
                )
            )
        if keys % tp:
            problems.append(
                ConfigError(
                    f"linear_num_key_heads={keys} cannot be split over tensor-parallel size {tp}.",
                    rule="each tensor-parallel rank owns a whole number of key heads, and the value"
                    " heads that share them",
                    flags=["--linear-num-key-heads", "--tensor-model-parallel-size"],
                    fix=f"use --tensor-model-parallel-size {best_divisor(keys, tp)}",
                )
            )
        return problems
