"""A sample of `python -m tests.parity.same_log_probs`."""

import pytest
import torch

from tests.parity.layouts import LayoutCase
from tests.parity.same_log_probs import differences

LAYOUTS = (LayoutCase(), LayoutCase(tp=2, sp=True))


@pytest.mark.distributed
def test_log_probabilities_are_equal_to_the_bit_in_every_batch_cache_and_layout():
    found = list(differences("llama", torch.float32, LAYOUTS, 12))
    assert len(found) == 8 * len(LAYOUTS)
    assert [(name, num) for name, num, _ in found if num] == []


@pytest.mark.distributed
def test_without_the_mode_the_bits_depend_on_the_batch():
    found = list(differences("llama", torch.float32, (LayoutCase(),), 4, mode=False))
    assert any(num for _, num, _ in found)
