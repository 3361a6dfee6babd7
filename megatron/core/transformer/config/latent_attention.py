"""Sizes of multi-latent attention (DeepSeek-V2, section 2.1, arXiv 2405.04434) and of YaRN."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag


@dataclass
class LatentAttentionConfig:
    """Keys and values that are kept as one short vector per token, the latent."""

    multi_latent_attention: bool = False
    """Attention whose keys and values are made from one short vector per token."""
    q_lora_rank: int | None = flag(None, part_of="multi_latent_attention")
    """Width of the queries' latent; None projects queries in one step."""
    kv_lora_rank: int = flag(512, cli_default=32, part_of="multi_latent_attention")
    """Width of the latent of keys and values."""
    qk_head_dim: int = flag(128, part_of="multi_latent_attention")
    """Width of a query/key head without its rotary part."""
    qk_pos_emb_head_dim: int = flag(64, part_of="multi_latent_attention")
    """Width of the rotary part, whose key all heads share."""
    v_head_dim: int = flag(128, part_of="multi_latent_attention")
    """Width of a value head."""
    latent_norm_epsilon: float | None = flag(None, part_of="multi_latent_attention")
    """Added to the variance in the norms of latents; None is --norm-epsilon."""
    rope_type: str = flag(
        "yarn", cli_default=None, choices=("rope", "yarn"), part_of="multi_latent_attention"
    )
    """Positions of latent attention: yarn stretches them by --rotary-scaling-factor, and is rope
    with the factor 1."""
    rope_interleave: bool = flag(
        True,
        part_of="multi_latent_attention",
        help="Latent attention: rotate the halves (i, i + d/2), not neighbouring pairs (2i, 2i+1).",
    )
    """Rotate neighbouring pairs (2i, 2i+1) of the rotary part, as Megatron's layer always does;
    otherwise its halves (i, i + d/2)."""
    rotary_base: float = flag(10000, kind=int)
    """Base of the rotary frequencies (arXiv 2104.09864, section 3.2.2)."""
    rotary_scaling_factor: float = flag(40, cli_default=1.0)
    """YaRN: how many times longer the context becomes (arXiv 2309.00071). Of multi-latent attention
    and of --position-embedding-type yarn, like the next ones."""
    original_max_position_embeddings: int = flag(
        4096, "--original-max-position-embeddings", "--yarn-original-max-position-embeddings"
    )
    """YaRN: context that the model was trained with first."""
    beta_fast: float = flag(32, "--beta-fast", "--yarn-beta-fast")
    """YaRN: channels that turn more often than this within that context keep their speed."""
    beta_slow: float = flag(1, "--beta-slow", "--yarn-beta-slow")
    """YaRN: channels that turn less often are slowed down by the whole factor."""
    yarn_correction_range_round_to_int: bool = flag(
        True, help="YaRN: let the share between the two change over whole channels."
    )
    """YaRN: let the share between the two change over whole channels."""
    mscale: float = 1.0
    """YaRN attention temperature: how strongly scores grow with the factor."""
    mscale_all_dim: float = flag(0.0, part_of="multi_latent_attention")
    """YaRN: the same for the part of a head that does not rotate."""

    def check_latent_attention(self) -> list[MegatronError]:
        """Return the problems of these sizes."""
        if not self.multi_latent_attention:
            return []
        problems: list[MegatronError] = []
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
                     "v_head_dim"):  # fmt: skip
            value = getattr(self, name)
            odd = name == "qk_pos_emb_head_dim" and value % 2
            if value is not None and (value < 1 or odd):
                spelling = "--" + name.replace("_", "-")
                problems.append(
                    ConfigError(
                        f"{name}={value}.",
                        rule="it is a positive number, and channels rotate in pairs",
                        flags=[spelling],
                        fix=f"use {spelling} {max(2, value + value % 2)}",
                    )
                )
        epsilon = self.latent_norm_epsilon
        if epsilon is not None and not 0 < epsilon < 1:
            problems.append(
                ConfigError(
                    f"latent_norm_epsilon={epsilon}.",
                    rule="it is positive and small beside the variance",
                    flags=["--latent-norm-epsilon"],
                    fix="leave --latent-norm-epsilon out, or use 1e-6",
                )
            )
        if self.rope_type not in ("rope", "yarn"):
            problems.append(
                ConfigError(
                    f"rope_type={self.rope_type!r} is unknown.",
                    rule="the rotary part turns by rope or yarn",
                    flags=["--rope-type"],
                    fix="use yarn",
                )
            )
        return problems
