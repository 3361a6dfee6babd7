"""Rules of splitting a sequence over context-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron.core.context_parallel import CP_COMM_TYPES
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.utils import best_divisor


def cp_comm_type_of_layer(config: Any, layer_number: int) -> str | None:
    """Return how a layer, by its 1-based number, sees the keys of other ranks; None on one rank."""
    kinds = config.cp_comm_type
    if config.context_parallel_size == 1:
        return None
    # Layers that predict later tokens count on after the last one, and do as it does.
    if isinstance(kinds, list):
        return kinds[min(layer_number, len(kinds)) - 1] if kinds else "p2p"
    return kinds or "p2p"


def context_parallel_problems(config: Any) -> Iterator[MegatronError]:
    """Yield what is wrong with the context parallelism of a `TransformerConfig`."""
    cp, kinds = config.context_parallel_size, config.cp_comm_type
    levels = config.hierarchical_context_parallel_sizes
    if isinstance(kinds, list) and len(kinds) not in (0, config.num_layers):
        yield ConfigError(
            f"{len(kinds)} communication types for {config.num_layers} layers.",
            rule="one type holds for all layers, or each layer has its own",
            flags=["--cp-comm-type", "--num-layers"],
            fix=f"give one type, or {config.num_layers}",
        )
    used = {kinds} if isinstance(kinds, str) else set(kinds or ["p2p"])
    for kind in sorted(used - set(CP_COMM_TYPES)):
        yield ConfigError(
            f"communication type {kind!r} is unknown.",
            rule=f"known types are {', '.join(CP_COMM_TYPES)}",
            flags=["--cp-comm-type"],
            fix="use --cp-comm-type p2p",
        )
    if cp == 1:
        return
    if "a2a+p2p" in used and (levels is None or len(levels) != 2):
        yield ConfigError(
            "a2a+p2p without the sizes of its two levels.",
            rule="heads are exchanged inside the first level, keys go round a ring in the second",
            flags=["--cp-comm-type", "--hierarchical-context-parallel-sizes"],
            fix="add --hierarchical-context-parallel-sizes"
            f" {best_divisor(cp, max(1, math.isqrt(cp)))} {cp // best_divisor(cp, math.isqrt(cp))}",
        )
        return
    if levels is not None and math.prod(levels) != cp:
        yield ConfigError(
            f"hierarchical context-parallel sizes {levels} for context-parallel size {cp}.",
            rule="the product of the levels is the context-parallel size",
            flags=["--hierarchical-context-parallel-sizes", "--context-parallel-size"],
            fix=f"use --context-parallel-size {math.prod(levels)}",
        )
        return
    for kind in sorted(used & {"a2a", "a2a+p2p"}):
        ranks = cp if kind == "a2a" else levels[0]
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        if heads % ranks:
            yield ConfigError(
                f"{heads} query heads of a tensor-parallel rank cannot be exchanged between"
                f" {ranks} context-parallel ranks.",
                rule=f"with {kind} a rank attends with a whole number of query heads",
                flags=["--cp-comm-type", "--num-attention-heads", "--context-parallel-size"],
                fix="use --cp-comm-type p2p, or a size that divides"
                f" {heads}: {best_divisor(heads, ranks)}",
            )
