"""Copies between the device and host memory are hidden by what computes meanwhile."""

from dataclasses import replace

import pytest

from benchmarks.data_parallel import SEQUENCE
from benchmarks.offload_copies import Flags, Training
from benchmarks.plain_gpt import PlainGPT2, Sizes
from megatron.core.optimizer import chunked_state_optimizer

SIZES = Sizes(
    num_layers=8, hidden_size=64, num_heads=2, ffn_size=256, vocab_size=64, sequence=SEQUENCE
)
CHUNK_BLOCKS = 32
"""4,096 elements, a twelfth of a layer: the copy of a chunk is hidden by the update of the next."""


@pytest.mark.parametrize(
    ("kind", "microbatches", "hidden"),
    [("zero2", 1, 0.8), ("zero2", 3, 0.9), ("zero3", 1, 0.8), ("zero3", 3, 0.9)],
)
def test_only_what_begins_and_ends_a_step_is_waited_for(monkeypatch, kind, microbatches, hidden):
    monkeypatch.setattr(chunked_state_optimizer, "CHUNK_BLOCKS", CHUNK_BLOCKS)
    flags = Flags(
        kind=kind, vocabulary=64, microbatches=microbatches, compute=1.1, bucket_size=20000,
        simulated=True,
    )  # fmt: skip
    training = Training(PlainGPT2(SIZES).bfloat16(), flags)
    training.step()
    step = training.step()
    assert step.hidden > hidden


@pytest.mark.parametrize(("microbatches", "hidden"), [(1, 0.87), (3, 0.95)])
def test_weights_are_waited_for_where_a_step_begins_and_nowhere_else(microbatches, hidden):
    sizes = replace(SIZES, num_layers=6)
    training = Training(
        PlainGPT2(sizes),
        Flags(vocabulary=64, simulated=True, microbatches=microbatches, compute=1.05),
    )
    training.step()
    begin = training.now()
    step = training.step()
    copies, waits = (
        [each for each in intervals if each.name == "weights" and each.end > each.begin]
        for intervals in (training.record.copies, training.record.waits)
    )
    assert 1 - seconds_of(waits) / seconds_of(copies) > hidden
    assert 0 < len(waits) <= 2
    assert max(wait.begin - begin for wait in waits) < step.seconds / 20


def seconds_of(intervals):
    return sum(each.end - each.begin for each in intervals)
