"""Put losses that are not finite among right ones, to see what is said about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.training.rerun.verdict import RerunDiagnostic


class ErrorInjector:
    """Makes the losses of one replica NaN, in one of `rate` steps on average.

    With `transient_error` that happens in the first run of the step only, with `persistent_error`
    whenever this replica computes, and with `correct_result` wherever its samples are computed.
    Steps and replicas are drawn from the seed, the same on all ranks.
    """

    def __init__(self, rate: int, kind: RerunDiagnostic, seed: int, dp_rank: int, dp_size: int):
        self.rate, self.kind, self.seed = rate, kind, seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.is_active = False

    def begin_run(self, iteration: int, *, is_rerun: bool, samples_of: int | None) -> None:
        """Decide about a run of a step.

        Args:
            samples_of: the replica whose samples of this step are computed; None: other samples.
        """
        chosen = random.Random(f"{self.seed} {iteration}")
        is_hit = self.rate > 0 and chosen.randrange(self.rate) == 0
        replica = chosen.randrange(self.dp_size)
        self.is_active = (
            is_hit
            and {
                RerunDiagnostic.TRANSIENT_ERROR: not is_rerun and self.dp_rank == replica,
                RerunDiagnostic.PERSISTENT_ERROR: self.dp_rank == replica,
                RerunDiagnostic.CORRECT_RESULT: samples_of == replica,
            }[self.kind]
        )

    def around(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward_step` with wrong losses when they are due."""

        def injected(*inputs: Any, **named: Any) -> Any:
            output, loss_func = forward_step(*inputs, **named)
            return output, (lambda *given, **more: _wrong(loss_func(*given, **more)))

        def call(*inputs: Any, **named: Any) -> Any:
            return (injected if self.is_active else forward_step)(*inputs, **named)

        return call


def _wrong(result: Any) -> Any:
    """Return what a loss function returned, with NaN for its loss and for what it reports."""
    if not isinstance(result, tuple):
        return result
    loss, *rest, report = result
    return (
        loss * torch.nan,
        *rest,
        {k: v * torch.nan if isinstance(v, Tensor) else v for k, v in report.items()},
    )
