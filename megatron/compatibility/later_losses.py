"""Megatron's class that logs the losses of multi-token prediction."""

from __future__ import annotations

from collections.abc import MutableMapping

from torch import Tensor


class MTPLossLoggingHelper:
    """Here each depth's loss is in what a step reports, as `mtp_1 loss`, beside the script's own.

    So loops that log what they are given have them already, and these methods have nothing to do.
    """

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Do nothing: no loss outlives its step."""

    @staticmethod
    def reduce_loss_in_tracker() -> None:
        """Do nothing: reports are reduced together."""

    @staticmethod
    def track_mtp_metrics(
        loss_scale: float,
        iteration: int,
        writer: object,
        wandb_writer: object = None,
        total_loss_dict: MutableMapping[str, Tensor] | None = None,
    ) -> None:
        """Do nothing: `total_loss_dict` gets them with the other losses of the step."""
