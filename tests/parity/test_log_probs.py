"""A sample of `python -m tests.parity.log_probs`: trainer and generator think alike."""

import pytest

from tests.parity.layouts import LayoutCase
from tests.parity.log_probs import LIMIT, MODELS, largest_difference

SAMPLE = [
    (LayoutCase(tp=2, pp=2, vp=2), MODELS[0]),
    (LayoutCase(tp=2, sp=True, cp=2, ep=4), MODELS[2]),
    (LayoutCase(pp=2, dp=2, ep=2), MODELS[2]),
]


@pytest.mark.parametrize(("layout", "model"), SAMPLE, ids=[str(layout) for layout, _ in SAMPLE])
def test_the_trainer_gives_the_generators_log_probabilities(layout, model):
    assert largest_difference(layout, model) <= LIMIT
