"""Sizes of multi-latent attention (DeepSeek-V2, section 2.1, arXiv 2405.04434) and of YaRN."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.errors import ConfigError, MegatronError


@dataclass
class LatentAttentionConfig:
    """Keys and values that are kept as one short vector per token, the latent."""

    multi_latent_attention: bool = False
    """Use multi-latent attention."""
    q_lora_rank: int | None = None
    """Width of the queries' latent; None projects queries in one step."""
    kv_lora_rank: int = 512
    """Width of the latent of keys and values."""
    qk_head_dim: int = 128
    """Width of a query/key head without its rotary part."""
    qk_pos_emb_head_dim: int = 64
    """Width of the rotary part, whose key all heads share."""
    v_head_dim: int = 128
    """Width of a value head."""
    rope_type: str = "yarn"
    """"rope" or "yarn": angles of the rotary part."""
    rotary_base: float = 10000
    """Base of the rotary frequencies of multi-latent attention."""
    rotary_scaling_factor: float = 40
    """YaRN: how many times longer the context is than `original_max_position_embeddings`."""
    original_max_position_embeddings: int = 4096
    """YaRN: context that the model was trained with first."""
    beta_fast: float = 32
    """YaRN: channels that turn more often than this within that context keep their speed."""
    beta_slow: float = 1
    """YaRN: channels that turn less often are slowed down by the whole factor."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: let the share between the two change over whole channels."""
    mscale: float = 1.0
    """YaRN: how strongly scores grow with the factor."""
    mscale_all_dim: float = 0.0
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
                flag = "--" + name.replace("_", "-")
                problems.append(
                    ConfigError(
                        f"{name}={value}.",
                        rule="it is a positive number, and channels rotate in pairs",
                        flags=[flag],
                        fix=f"use {flag} {max(2, value + value % 2)}",
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
