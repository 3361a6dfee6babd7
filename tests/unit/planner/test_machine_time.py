"""Seconds of a step on this machine, from the work that its program does."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.planner.machine_time import (
    TERMS,
    StepWork,
    fit_machine_time,
    work_of_step,
)
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory_case import SCRIPT

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    " --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0"
)


def test_what_a_unit_of_work_takes_is_found_from_steps() -> None:
    draw = np.random.default_rng(2)
    true = np.array([2e-11, 1e-10, 5e-6, 1e-4, 2e-9])
    works = draw.uniform(0.2, 1.0, (40, len(TERMS))) * np.array([1e10, 1e9, 4e3, 100, 5e6])
    seconds = works @ true * np.exp(draw.normal(0, 0.02, 40))
    seconds[3] *= 5  # somebody else was using the machine
    found = fit_machine_time(list(works[:30]), list(seconds[:30]))
    assert [found.seconds(work) for work in works[30:]] == pytest.approx(seconds[30:], rel=0.1)


def test_ranks_share_the_cores_and_stages_wait() -> None:
    terms = np.ones((4, len(TERMS)))
    assert StepWork(terms, stretch=1.0, cores=8).shared() == pytest.approx(1.0)
    assert StepWork(terms, stretch=1.0, cores=2).shared() == pytest.approx(2.0)
    assert StepWork(terms, stretch=1.5, cores=8).shared() == pytest.approx(1.5)


def test_the_work_is_that_of_the_program() -> None:
    one = work_of_step(run_of(f"{SMALL} --global-batch-size 4", 1), SCRIPT, cores=2)
    two = work_of_step(
        run_of(f"{SMALL} --global-batch-size 4 --pipeline-model-parallel-size 2", 2),
        SCRIPT,
        cores=2,
    )
    flops = TERMS.index("flops")
    # Six operations for each weight of a layer or the head and each token, besides attention's.
    weights = 2 * 12 * 64**2 + 64 * 128
    scores = 2 * 2 * 6 * 32 * 64
    assert one.terms[0, flops] == pytest.approx(4 * 32 * (6 * weights + scores), rel=0.1)
    assert two.terms[:, flops].sum() == pytest.approx(one.terms[0, flops], rel=0.01)
    # (m + p - 1) / m of one stage.
    assert (one.stretch, two.stretch) == (1.0, 1.25)


def test_messages_that_no_measured_run_has_sent_are_refused() -> None:
    works = np.random.default_rng(1).uniform(1, 2, (8, len(TERMS)))
    works[:, TERMS.index("num_messages")] = works[:, TERMS.index("message_bytes")] = 0
    machine = fit_machine_time(list(works), [1.0] * 8)
    low, high = machine.interval(works[0])
    assert low < machine.seconds(works[0]) < high
    with pytest.raises(ConfigError, match="sent no messages"):
        machine.seconds(np.ones(len(TERMS)))
