"""Megatron's older name of the cache of keys and values."""

from megatron.core.inference.contexts.static_context import (
    StaticInferenceContext as InferenceParams,
)

__all__ = ["InferenceParams"]
