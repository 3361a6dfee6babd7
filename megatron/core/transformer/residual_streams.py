"""Where a residual stream is expanded to several ones, and contracted: before the first layer and
after the last one.

Legend: s local tokens of the sequence, b micro batch, h hidden, n streams.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megatron.core.topology.group import Group
from megatron.core.transformer.alternating_updates import StreamProjections
from megatron.core.transformer.hyper_connection import LearnedContraction
from megatron.core.transformer.transformer_config import TransformerConfig


def equal_streams(hidden_states: Tensor, num_streams: int) -> Tensor:
    """Return streams [s, b, n*h] that all equal the hidden states [s, b, h]."""
    return hidden_states if num_streams == 1 else hidden_states.repeat(1, 1, num_streams)


def stream_expansion(config: TransformerConfig, tp_group: Group) -> Callable[[Tensor], Tensor]:
    """Return what maps the hidden states [s, b, h] before the first layer to streams [s, b, n*h];
    one stream is unchanged."""
    if config.altup_num_inputs > 1:
        return StreamProjections(config, tp_group, joins=False)
    return partial(equal_streams, num_streams=config.num_residual_streams)


def stream_contraction(
    config: TransformerConfig, tp_group: Group
) -> Callable[[Tensor], Tensor] | None:
    """Return what maps the streams [s, b, n*h] after the last layer to [s, b, h]; None for one
    stream."""
    if config.altup_num_inputs > 1:
        return StreamProjections(config, tp_group, joins=True)
    if not config.enable_mhc_connections:
        return None
    if config.mhc_learned_contraction:
        return LearnedContraction(config, tp_group)
    return partial(_mean_of_streams, num_streams=config.mhc_num_residual_streams)


def _mean_of_streams(streams: Tensor, num_streams: int) -> Tensor:
    return streams.unflatten(-1, (num_streams, -1)).mean(-2)
