"""Caches of keys and values."""

from megatron.core.inference.contexts.static_context import StaticInferenceContext

__all__ = ["StaticInferenceContext"]
