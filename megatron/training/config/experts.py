"""Flags of mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import SettingsGroup
from megatron.core.transformer.config.experts import ExpertConfig


@dataclass(kw_only=True)
class ExpertSettings(ExpertConfig, SettingsGroup):
    """Routed experts, their router, dispatcher and balance."""
