"""Caches of keys and values."""

from megatron.core.inference.contexts.static_context import (
    BaseInferenceContext,
    StaticInferenceContext,
)

__all__ = ["BaseInferenceContext", "StaticInferenceContext"]
