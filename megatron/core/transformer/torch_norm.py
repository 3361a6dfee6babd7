"""The norm that a config asks for."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.norm import NORMS, Norm


class WrappedTorchNorm:
    """Factory with the call of Megatron's norms; building it gives a `Norm`."""

    def __new__(  # type: ignore[misc]
        cls,
        config: Any,
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str = "LayerNorm",
    ) -> Norm:
        """Build the norm named by `config.normalization`.

        Args:
            hidden_size: size of the normalised dimension.
            persist_layer_norm, zero_centered_gamma, normalization: taken from the config; the
                arguments exist for callers that pass them.
        """
        kind = getattr(config, "normalization", None) or normalization
        if kind not in NORMS:
            raise ConfigError(
                f"normalization={kind!r} is unknown.",
                rule=f"known norms are {', '.join(NORMS)}",
                flags=["--normalization"],
                fix="use --normalization RMSNorm",
            )
        return NORMS[kind](
            hidden_size,
            eps,
            sequence_parallel=config.sequence_parallel,
            zero_centered_gamma=config.layernorm_zero_centered_gamma or zero_centered_gamma,
            dtype=config.params_dtype,
            device=torch.device("cpu") if config.use_cpu_initialization else current_device(),
        )
