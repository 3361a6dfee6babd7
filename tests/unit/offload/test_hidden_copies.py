"""Copies between the device and host memory are hidden by what computes meanwhile."""

import pytest

from benchmarks.data_parallel import SEQUENCE
from benchmarks.offload_copies import Flags, Training
from benchmarks.plain_gpt import PlainGPT2, Sizes

SIZES = Sizes(
    num_layers=6, hidden_size=64, num_heads=2, ffn_size=256, vocab_size=64, sequence=SEQUENCE
)


@pytest.mark.parametrize(("microbatches", "hidden"), [(1, 0.87), (3, 0.95)])
def test_only_what_a_step_begins_with_is_waited_for(microbatches, hidden):
    training = Training(
        PlainGPT2(SIZES),
        Flags(vocabulary=64, simulated=True, microbatches=microbatches, compute=1.05),
    )
    training.step()
    begin = training.now()
    step = training.step()
    assert step.hidden > hidden
    waits = [wait.begin - begin for wait in training.record.waits if wait.end > wait.begin]
    assert 0 < len(waits) <= 2
    assert max(waits) < step.seconds / 20
