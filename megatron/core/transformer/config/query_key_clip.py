"""Bounding attention logits by scaling weights.

Kimi Team, "Kimi K2: Open Agentic Intelligence", section 2.1 (MuonClip), arXiv 2507.20534.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag


@dataclass
class QueryKeyClipConfig:
    """What happens to heads whose largest attention logit grows."""

    qk_clip: bool = False
    """After each update scale down the query and key weights of heads whose largest attention logit
    in the global batch exceeds --qk-clip-threshold (MuonClip, arXiv 2507.20534, section 2.1)."""
    qk_clip_threshold: float = flag(100.0, part_of="qk_clip")
    """Largest attention logit that is left alone."""
    qk_clip_alpha: float = flag(0.5, part_of="qk_clip")
    """Share of the scaling that the queries take; the keys take the rest."""
    log_max_attention_logit: bool = False
    """Log the largest attention logit of each global batch."""

    @property
    def records_max_logits(self) -> bool:
        """Whether attention keeps the largest logit of each head."""
        return self.qk_clip or self.log_max_attention_logit

    def check_query_key_clip(self) -> list[MegatronError]:
        """Return the problems of these settings."""
        if not self.qk_clip:
            return []
        problems: list[MegatronError] = []
        if not 0.0 < self.qk_clip_threshold < float("inf"):
            problems.append(
                ConfigError(
                    f"qk_clip_threshold={self.qk_clip_threshold}.",
                    rule="the bound of the attention logits is a positive number",
                    flags=["--qk-clip-threshold"],
                    fix="use --qk-clip-threshold 100",
                )
            )
        if not 0.0 <= self.qk_clip_alpha <= 1.0:
            problems.append(
                ConfigError(
                    f"qk_clip_alpha={self.qk_clip_alpha}.",
                    rule="the share that queries take of the scaling is in [0, 1]",
                    flags=["--qk-clip-alpha"],
                    fix="use --qk-clip-alpha 0.5",
                )
            )
        return problems
