"""What one layer is made of: norms, activation, biases, attention variants, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.errors import ConfigError, MegatronError
from megatron.core.transformer.enums import AttnBackend

SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")


@dataclass
class BlockConfig:
    """Norms, MLP, attention and dropout of a layer."""

    normalization: str = "LayerNorm"
    """"LayerNorm" or "RMSNorm" (arXiv 1910.07467)."""
    layernorm_epsilon: float = 1e-5
    """Added to the variance."""
    layernorm_zero_centered_gamma: bool = False
    """Store the norm's weight minus one, so weight decay pulls towards the identity."""
    qk_layernorm: bool = False
    """Normalise each query and key head (arXiv 2302.05442, section 2)."""
    apply_residual_connection_post_layernorm: bool = False
    """Take the residual after the input norm."""

    add_bias_linear: bool = True
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """A bias in the QKV projection only."""
    gated_linear_unit: bool = False
    """Gate the MLP: fc2(act(gate) * up) (arXiv 2002.05202)."""
    activation_func: Callable[[torch.Tensor], torch.Tensor] = F.gelu
    """Nonlinearity of the MLP."""

    hidden_dropout: float = 0.1
    """Dropout probability of the embedding and of each residual branch."""
    attention_dropout: float = 0.1
    """Dropout probability of the attention weights."""

    softmax_scale: float | None = None
    """Factor on the attention logits; None means 1 / sqrt(kv_channels)."""
    attention_softmax_in_fp32: bool = True
    """Compute the unfused softmax in fp32."""
    apply_query_key_layer_scaling: bool = False
    """Divide the logits by the layer number before, and multiply after, rounding to half."""
    softmax_type: str = "vanilla"
    """Denominator of the attention weights: "vanilla"; "off-by-one" adds 1, a key of score zero
    that nothing comes from; "learnable" gives each head a score for it (arXiv 2309.17453)."""
    window_size: tuple[int, int] | None = None
    """Sliding window: keys (left, right) of a query it may see; -1 is unlimited."""
    attention_backend: AttnBackend = AttnBackend.auto
    """Kernel of the core attention."""

    def check_block(self) -> list[MegatronError]:
        """Return the problems of the layer's composition."""
        problems: list[MegatronError] = []
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            problems.append(
                ConfigError(
                    f"normalization={self.normalization!r} is unknown.",
                    rule="known norms are LayerNorm and RMSNorm",
                    flags=["--normalization"],
                    fix="use --normalization RMSNorm",
                )
            )
        if self.softmax_type not in SOFTMAX_TYPES:
            problems.append(
                ConfigError(
                    f"softmax_type={self.softmax_type!r} is unknown.",
                    rule=f"known types are {', '.join(SOFTMAX_TYPES)}",
                    flags=["--softmax-type"],
                    fix="use --softmax-type vanilla",
                )
            )
        for name in ("hidden_dropout", "attention_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                problems.append(
                    ConfigError(
                        f"{name}={getattr(self, name)}.",
                        rule="a dropout probability lies in [0, 1)",
                        flags=["--" + name.replace("_", "-")],
                        fix=f"use --{name.replace('_', '-')} 0.1",
                    )
                )
        if self.window_size is not None and (
            len(self.window_size) != 2 or min(self.window_size) < -1
        ):
            problems.append(
                ConfigError(
                    f"window_size={self.window_size}.",
                    rule="a window is two numbers, left and right, each -1 (unlimited) or more",
                    flags=["--window-size"],
                    fix="use --window-size 4096,0 for a causal window",
                )
            )
        return problems
