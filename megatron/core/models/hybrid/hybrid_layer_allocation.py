"""Patterns of hybrid models under Megatron's names; `hybrid_pattern` is what models read."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.config.layer_kinds import LETTERS, hybrid_pattern


class Symbols:
    """Letters of a pattern under Megatron's names."""

    MAMBA, GDN, ATTENTION, DS_ATTENTION, MLA, MLP, MOE = "MG*D+-E"
    PIPE, MTP_SEPARATOR = "|/"
    VALID_LAYERS = set(LETTERS)


@dataclass
class ParsedHybridPattern:
    """A pattern, cut at the letters of multi-token prediction, which are equal for all depths."""

    main_pattern: str | None
    mtp_pattern: str | None
    mtp_num_depths: int


def parse_hybrid_pattern(pattern: str | None) -> ParsedHybridPattern:
    """Cut a pattern.

    Raises:
        ConfigError: the pattern cannot be read, or its depths have different layers.
    """
    if pattern is None:
        return ParsedHybridPattern(None, None, 0)
    hybrid_pattern(pattern)
    main, *later = pattern.split(Symbols.MTP_SEPARATOR)
    if len(set(later)) > 1:
        raise ConfigError(
            f"the depths of hybrid_layer_pattern={pattern!r} have different layers.",
            rule="a ParsedHybridPattern has one mtp_pattern for all depths",
            flags=["--hybrid-layer-pattern"],
            fix="use transformer.config.layer_kinds.hybrid_pattern, which has the layers of each",
        )
    return ParsedHybridPattern(main, later[0] if later else None, len(later))


def get_hybrid_total_layer_count(pattern: str) -> int:
    """Return the number of layers that predict the next token; a group in brackets is one."""
    return len(hybrid_pattern(pattern).kinds)


def get_hybrid_total_pipeline_segment_count(pattern: str) -> int:
    """Return the number of pipeline stages that | separates."""
    return len(hybrid_pattern(pattern).stages)


def get_hybrid_layer_counts(pattern: str) -> dict[str, int]:
    """Return how often each letter occurs, in all depths of multi-token prediction too."""
    hybrid_pattern(pattern)
    return {letter: pattern.count(letter) for letter in sorted(LETTERS)}
