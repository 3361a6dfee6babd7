"""Megatron's names, for code that imports them from here."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.context import AuxLossScale, attach_aux_loss, current_step


class MoEAuxLossAutoScaler:
    """Attach a loss to a tensor, so that both are differentiated; see `attach_aux_loss`."""

    @staticmethod
    def apply(output: Tensor, aux_loss: Tensor) -> Tensor:
        """Return `output`, through whose backward pass `aux_loss` [] is differentiated, too."""
        return attach_aux_loss(output, aux_loss, 1.0)

    @staticmethod
    def set_loss_scale(scale: Tensor | float) -> None:
        """Set the gradient of attached losses. Schedules call this before each micro batch."""
        current_step().aux_loss_scale = AuxLossScale(float(torch.as_tensor(scale)))


def get_default_pg_collection() -> ProcessGroupCollection:
    """Return the process groups of this rank."""
    return resolve_groups(None)
