"""Initial weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.parameters.initialization import init_method_normal, scaled_init_method_normal
from megatron.core.settings.flags import no_flag


@dataclass
class InitializationConfig:
    """Functions that fill a full weight in place."""

    init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills most weights; None means N(0, init_method_std^2)."""
    output_layer_init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills weights that end a residual branch; None means std / sqrt(2 * num_layers)."""
    embedding_init_method: Callable[[torch.Tensor], object] | None = no_flag(None)
    """Fills embeddings; None means init_method."""
    init_method_std: float = 0.02
    """Standard deviation of the default initialisers."""
    embedding_init_method_std: float | None = None
    """That of embeddings; None means init_method_std."""

    def derive_initialization(self, num_layers: int, hidden_factor: float = 1.0) -> None:
        """Fill the initialisers that were not given.

        Args:
            hidden_factor: on the standard deviation of all weights but embeddings and head.
        """
        if self.embedding_init_method is None:
            std = self.embedding_init_method_std
            self.embedding_init_method = (
                init_method_normal(std)
                if std is not None
                else self.init_method or init_method_normal(self.init_method_std)
            )
        std = self.init_method_std * hidden_factor
        if self.init_method is None:
            self.init_method = init_method_normal(std)
        if self.output_layer_init_method is None:
            self.output_layer_init_method = scaled_init_method_normal(std, max(num_layers, 1))
