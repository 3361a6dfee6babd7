"""Seconds of a step on this machine, from the work that its program does."""

import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import flop_registry

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.planner.machine_time import (
    TERMS,
    MachineTime,
    StepWork,
    fit_machine_time,
    work_of_step,
)
from megatron_lattice.planner.work import (
    Operation,
    OperationTimes,
    TensorForm,
    WorkOfRank,
    work_of_rank,
)
from tests.harness.resolved_run import run_of
from tests.parity.planned_memory_case import SCRIPT

SMALL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 128"
    " --micro-batch-size 1 --hidden-dropout 0 --attention-dropout 0"
)


def random_works(number: int, seed: int) -> list[StepWork]:
    draw = np.random.default_rng(seed)
    of_units = np.array([0.2, 2e5, 100, 5e6])
    terms = draw.uniform(0.2, 1.0, (number, len(TERMS))) * of_units
    return [StepWork(np.tile(row, (1 + i % 3, 1)), 1.0, 4) for i, row in enumerate(terms)]


def test_what_a_unit_of_work_takes_is_found_from_steps() -> None:
    true = MachineTime(np.array([1.2, 7e-7, 1e-4, 2e-9]), sharing=1.3, deviation=0.0)
    works = random_works(40, seed=2)
    noise = np.exp(np.random.default_rng(3).normal(0, 0.02, 40))
    seconds = np.array([true.seconds(work) for work in works]) * noise
    seconds[3] *= 5  # somebody else was using the machine
    found = fit_machine_time(works[:30], list(seconds[:30]))
    assert [found.seconds(work) for work in works[30:]] == pytest.approx(seconds[30:], rel=0.1)
    assert found.sharing == pytest.approx(true.sharing, abs=0.08)


def test_two_runs_are_enough_where_a_machine_is_a_usual_one() -> None:
    true = MachineTime(np.array([1.2, 4e-7, 2e-4, 8e-10]), sharing=1.15, deviation=0.0)
    works = random_works(40, seed=5)
    found = fit_machine_time(works[1:3], [true.seconds(work) for work in works[1:3]])
    errors = [found.seconds(work) / true.seconds(work) - 1 for work in works]
    assert np.median(np.abs(errors)) < 0.1


@pytest.mark.parametrize("times_usual", [0.3, 1.0, 5.0])
def test_the_one_run_that_was_measured_is_predicted_as_it_was(times_usual: float) -> None:
    [work] = random_works(1, seed=6)
    seconds = times_usual * MachineTime(np.array([1.5, 3e-7, 2e-4, 1e-9]), 1.15, 0.0).seconds(work)
    assert fit_machine_time([work], [seconds]).seconds(work) == pytest.approx(seconds)


def test_what_sharing_a_machine_costs_is_expected_where_no_run_has_shared_it() -> None:
    alone = [work for work in random_works(30, seed=4) if len(work.terms) == 1]
    machine = fit_machine_time(alone, [1e-6 * work.terms[0, 1] for work in alone])
    row = np.array([[0.2, 1e5, 0, 0]])
    one, two = (StepWork(np.tile(row, (n, 1)), stretch=1.0, cores=2) for n in (1, 2))
    assert machine.seconds(two) == pytest.approx(1.15 * machine.seconds(one), rel=0.03)


def test_ranks_share_the_cores_and_stages_wait() -> None:
    terms = np.ones((4, len(TERMS)))

    def waited(stretch: float, cores: int) -> float:
        found = StepWork(terms, stretch, cores).waited_for()
        assert (found == found[0]).all()
        return float(found[0])

    assert (waited(1.0, 8), waited(1.0, 2), waited(1.5, 8)) == (1.0, 2.0, 1.5)
    assert 2.0 < waited(1.5, 2) < 1.5 * 2.0
    assert StepWork(terms, 1.0, 8).waited_for(1.3) == pytest.approx([1.3, 1.3, 1.0, 1.0])
    assert StepWork(terms[:1], 1.0, 8).waited_for(1.3) == pytest.approx(1.0)


def test_the_bytes_of_a_tensor_are_those_of_its_elements_repeated_ones_once() -> None:
    x = torch.empty(3, 4, dtype=torch.float16)
    for each, count in ((x, 12), (x[:2], 8), (x[:, :1].expand(3, 9), 3), (x[0, 0], 1), (x[:0], 0)):
        assert TensorForm.of(each).num_bytes == 2 * count
    assert Operation.of(torch.add, (x, x[:1]), {"out": x}).num_bytes == 2 * (12 + 4 + 12)


def test_the_work_is_that_of_the_program() -> None:
    one = run_of(f"{SMALL} --global-batch-size 4", 1)
    two = run_of(f"{SMALL} --global-batch-size 4 --pipeline-model-parallel-size 2", 2)
    whole = work_of_rank(one, SCRIPT, 0)
    stages = [work_of_rank(two, SCRIPT, rank) for rank in range(2)]
    # Six operations for each weight of a layer or the head and each token, besides attention's.
    weights = 2 * 12 * 64**2 + 64 * 128
    scores = 2 * 2 * 6 * 32 * 64
    assert flops(whole) == pytest.approx(4 * 32 * (6 * weights + scores), rel=0.1)
    assert sum(map(flops, stages)) == pytest.approx(flops(whole), rel=0.01)
    # To and from the other stage, of each micro batch.
    assert all(stage.num_messages >= 4 * 2 > whole.num_messages for stage in stages)
    assert work_of_rank(one, SCRIPT, 0).num_calls == pytest.approx(whole.num_calls, rel=0.01)
    assert sys.getprofile() is None

    times = OperationTimes()
    steps = [work_of_step(run, works, 2, times) for run, works in ((one, [whole]), (two, stages))]
    # (m + p - 1) / m of one stage.
    assert [step.stretch for step in steps] == [1.0, 1.25]
    seconds = [
        n * (times.seconds(operation) + operation.num_bytes * times.seconds_to_read)
        for operation, n in whole.operations.items()
    ]
    assert steps[0].terms[0, 0] == pytest.approx(sum(seconds))


def flops(work: WorkOfRank) -> int:
    total = 0
    for operation, number in work.operations.items():
        # What works in place is counted as what does not: addmm_ as addmm.
        name = operation.function.overloadpacket.__name__.rstrip("_")
        count = flop_registry.get(getattr(torch.ops.aten, name, None))
        if count:
            args, kwargs = operation.arguments()
            total += number * count(*args, **kwargs, out_val=operation.prepared()())
    return total


def test_an_operation_takes_longer_the_more_it_does() -> None:
    times = OperationTimes()
    matmul = torch.ops.aten.mm.default
    square = Operation.of(matmul, [torch.ones(64, 64)] * 2, {})
    first = times.seconds(square)
    times.measure_again()
    assert 0 < times.seconds(square) <= first
    small, large = (Operation.of(matmul, [torch.ones(n, n)] * 2, {}) for n in (64, 512))
    assert times.seconds(large) > 20 * times.seconds(small) > 0
    assert times.seconds(small) == times.seconds(
        Operation.of(matmul, [torch.zeros(64, 64)] * 2, {})
    )


def test_an_operation_that_refuses_made_up_values_counts_as_a_copy_of_its_tensors() -> None:
    rows, lengths = torch.ones(6, 2), torch.tensor([2, 4])
    reduce = torch.ops.aten.segment_reduce.default
    refusing = Operation.of(reduce, [rows, "sum"], {"lengths": lengths, "unsafe": False})
    with pytest.raises(RuntimeError, match="lengths"):
        refusing.prepared()()
    assert [copy.shape for copy in refusing.copies()()] == [rows.shape, lengths.shape]
    assert OperationTimes().seconds(refusing) > 0


def test_what_is_made_up_has_the_form_of_the_original() -> None:
    for original in (torch.rand(3, 4).t(), torch.rand(4, 1).expand(4, 5), torch.ones(0, 2)):
        made = TensorForm.of(original).made()
        assert (made.shape, made.stride()) == (original.shape, original.stride())
        assert torch.equal(made, torch.ones_like(made))


def test_messages_that_no_measured_run_has_sent_are_refused() -> None:
    works = random_works(8, seed=1)
    for work in works:
        work.terms[:, 2:] = 0
    machine = fit_machine_time(works, [1.0] * 8)
    low, high = machine.interval(works[0])
    assert low < machine.seconds(works[0]) < high
    with pytest.raises(ConfigError, match="sent no messages"):
        machine.seconds(StepWork(np.ones((2, len(TERMS))), 1.0, 2))
