"""Delayed scaling: the largest magnitudes of a layer's operands in earlier steps.

P. Micikevicius et al., "FP8 Formats for Deep Learning", section 3.3, arXiv 2209.05433. The history
moves once a step. It takes the maximum over all micro batches and over all ranks of the stage that
share the layer, so it depends neither on the layout nor on the size of a micro batch. Scales do not
change within a step, so recomputed activations are rounded to the same numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NUM_OPERANDS = 3


class AmaxHistory:
    """Amaxes of one layer, [num_steps, 3]: the last step first; input, weight, gradient.

    The amaxes are a buffer of the layer, so checkpoints hold them. The buffer stores the bits of
    fp64 numbers as int64, which `model.half()` does not convert.

    Args:
        owner, name: the layer, and the name of its buffer.
        num_steps: length of the history.
        uses_largest: scale by the largest amax of the history, not by the last.
    """

    def __init__(self, owner: nn.Module, name: str, num_steps: int, *, uses_largest: bool) -> None:
        owner.register_buffer(name, torch.zeros(num_steps, NUM_OPERANDS, dtype=torch.int64))
        self._owner, self._name = owner, name
        self._uses_largest = uses_largest
        self._of_step = torch.zeros(NUM_OPERANDS, dtype=torch.float64)
        self.weight_amax: Tensor | None = None
        """Amax of the unrounded weight, [] fp64, if the parameter holds the rounded weight."""

    @property
    def steps(self) -> Tensor:
        """Return the amaxes, fp64 [num_steps, 3]."""
        return self._owner.get_buffer(self._name).view(torch.float64)

    @property
    def device(self) -> torch.device:
        """Device of the buffer."""
        return self.steps.device

    def record(self, operand: int, amax: Tensor) -> None:
        """Raise the running step's amax of an operand to `amax` []."""
        if self._of_step.device != amax.device:
            self._of_step = self._of_step.to(amax.device)
        self._of_step[operand] = torch.maximum(self._of_step[operand], amax)

    def amax(self, operand: int) -> Tensor:
        """Return the amax to scale by, [] fp64; 0 before the first step, where the scale is 1."""
        column = self.steps[:, operand]
        return column.amax() if self._uses_largest else column[0].clone()

    def take_step(self) -> Tensor:
        """Return the amaxes of the running step, [3], and start the next step."""
        found = self._of_step
        self._of_step = torch.zeros_like(found)
        return found

    def move(self, amaxes: Tensor) -> None:
        """Enter the amaxes [3] of a step; an amax that is not finite repeats the last one."""
        steps = self.steps
        amaxes = torch.where(amaxes.isfinite(), amaxes, steps[0])
        steps.copy_(torch.cat((amaxes[None], steps[:-1])))
