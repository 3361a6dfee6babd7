"""Sizes of the model."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag, no_flag


@dataclass
class ShapeConfig:
    """Number of layers, width, heads, vocabulary."""

    num_layers: int = flag(0, cli_default=None)
    """Transformer layers of the whole model. Where a decoder follows an encoder and this is no
    more than --encoder-num-layers, it is the number of the encoder's; the decoder's are added."""
    encoder_num_layers: int | None = None
    """Of these, the layers of the encoder that a decoder follows; None: the model is one stack. For
    a model of one stack the flag is another spelling of --num-layers."""
    hidden_size: int = flag(0, cli_default=None)
    """Width of the residual stream."""
    num_attention_heads: int = flag(0, cli_default=None)
    """Query heads."""
    num_query_groups: int | None = flag(None, cli_default=1)
    """Key/value heads; each serves num_attention_heads / num_query_groups query heads (GQA, arXiv
    2305.13245). None means one per query head."""
    ffn_hidden_size: int | None = None
    """Width of the MLP. Default 4 * hidden-size, or 2/3 of it rounded down to 64 with --swiglu."""
    kv_channels: int | None = None
    """Width of one head; None means hidden_size / num_attention_heads, if that is whole."""
    unpadded_vocab_size: int | None = no_flag(None, is_arg=True)
    """Number of real token ids. Rows beyond it pad the vocabulary to a size that splits evenly;
    they take no part in the loss, which therefore does not depend on the padding."""

    def derive_shape(self, *, heads_share_width: bool = True) -> None:
        """Fill the sizes that follow from others.

        Args:
            heads_share_width: a head is a part of `hidden_size`. Off where heads have widths of
                their own (multi-latent attention).
        """
        if self.ffn_hidden_size is None:
            self.ffn_hidden_size = 4 * self.hidden_size
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        heads = self.num_attention_heads
        if self.kv_channels is None and heads > 0:
            width, rest = divmod(self.hidden_size, heads)
            # What does not divide stays open, so that it can be told from a width that was given.
            self.kv_channels = None if rest and heads_share_width else width

    def check_shape(self) -> list[MegatronError]:
        """Return the problems of the sizes by themselves."""
        problems: list[MegatronError] = []
        for name in ("num_layers", "hidden_size", "num_attention_heads"):
            value = getattr(self, name)
            if value < 1:
                problems.append(
                    ConfigError(
                        f"{name}={value}.",
                        rule="it is a positive number",
                        flags=["--" + name.replace("_", "-")],
                        fix=f"set --{name.replace('_', '-')}",
                    )
                )
        if problems:
            return problems
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.kv_channels is None:
            problems.append(
                ConfigError(
                    f"hidden_size={self.hidden_size} is not divisible by"
                    f" num_attention_heads={heads}.",
                    rule="without --kv-channels a head is hidden_size / num_attention_heads wide",
                    flags=["--hidden-size", "--num-attention-heads", "--kv-channels"],
                    fix=f"use --hidden-size {-(-self.hidden_size // heads) * heads}",
                )
            )
        elif self.kv_channels < 1:
            problems.append(
                ConfigError(
                    f"kv_channels={self.kv_channels}.",
                    rule="it is a positive number",
                    flags=["--kv-channels"],
                    fix="drop --kv-channels",
                )
            )
        if groups is None or groups < 1 or heads % groups:
            near = min(max(groups or 1, 1), heads)
            near -= next(less for less in range(near) if heads % (near - less) == 0)
            problems.append(
                ConfigError(
                    f"num_attention_heads={heads} cannot be shared by num_query_groups={groups}.",
                    rule="each key/value head serves a whole number of query heads",
                    flags=["--num-attention-heads", "--num-query-groups"],
                    fix=f"use --num-query-groups {near}",
                )
            )
        return problems
