"""Every comparison starts with the same numbers."""

from __future__ import annotations

import pytest
import torch

from megatron.core.parameters.rng import rng_state


@pytest.fixture(autouse=True)
def fixed():
    torch.manual_seed(0)
    rng_state().__init__()
    rng_state().counts_on_cpu = True
