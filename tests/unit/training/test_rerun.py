"""What is at fault follows from where a step is wrong again."""

import pytest
import torch

from megatron.core.foundation.failure_file import add_to_quarantine, read_quarantine
from megatron.resilience.rerun import ErrorInjector, StepBatches
from megatron.resilience.rerun_verdict import (
    EARLIER,
    OWN,
    Cause,
    Observation,
    RerunDiagnostic,
    find_cause,
)
from megatron.training.run.state import BatchPlan


def bad(*replicas: int) -> Observation:
    return Observation(dict.fromkeys(replicas, "lm loss is nan"))


@pytest.mark.parametrize(
    ("num_replicas", "answers", "cause", "replicas"),
    [
        (4, {OWN: bad()}, Cause.HARDWARE_ONCE, ()),
        (4, {OWN: bad(2), 2: bad(2)}, Cause.HARDWARE_PERSISTENT, (2,)),
        (4, {OWN: bad(2), 2: bad()}, Cause.HARDWARE_PERSISTENT, (2,)),
        (4, {OWN: bad(2), 2: bad(0, 1, 2, 3), 0: bad()}, Cause.DATA, (2,)),
        (4, {OWN: bad(2), 2: bad(0, 1, 2, 3), 0: bad(1)}, Cause.HARDWARE_PERSISTENT, (1,)),
        (2, {OWN: bad(0, 1), 0: bad(0, 1), EARLIER: bad(0, 1)}, Cause.MODEL, ()),
        (2, {OWN: bad(0, 1), 0: bad(0, 1), EARLIER: bad()}, Cause.DATA, (0, 1)),
        (1, {OWN: bad()}, Cause.HARDWARE_ONCE, ()),
        (1, {OWN: bad(0), EARLIER: bad()}, Cause.DATA, (0,)),
        (1, {OWN: bad(0), EARLIER: bad(0)}, Cause.MODEL, ()),
    ],
)
def test_the_cause_follows_from_where_it_is_wrong_again(num_replicas, answers, cause, replicas):
    asked = []

    def observe(samples):
        asked.append(samples)
        return answers[samples]

    found = find_cause("NaN", observe, num_replicas=num_replicas, has_earlier=True)
    assert (found.cause, found.replicas) == (cause, replicas)
    assert asked == list(answers)
    assert len(found.evidence) >= 1 + len(asked)


def test_weights_that_are_not_finite_anywhere_are_the_models_fault():
    found = Observation({0: "NaN", 1: "NaN"}, {0: "weight", 1: "weight"})
    verdict = find_cause("NaN", lambda _: found, num_replicas=2, has_earlier=False)
    assert verdict.cause is Cause.MODEL
    assert "weights of replica 1: weight is not finite" in verdict.describe()


def test_samples_are_given_again_as_they_were():
    source = iter([{"tokens": 1}, {"tokens": 2}, {"tokens": 3}])
    batches = StepBatches.of(source, 0, BatchPlan(2, 1, 2), 0)
    given = batches.iterators()
    first = [next(given) for _ in range(2)]
    first[0].clear()  # what a forward step does to its batch is its own affair
    again = batches.iterators()
    assert [next(again) for _ in range(2)] == [{"tokens": 1}, {"tokens": 2}]
    assert next(source) == {"tokens": 3}


def test_machines_are_listed_once_and_remarks_are_not_names(tmp_path):
    path = tmp_path / "quarantine.txt"
    assert read_quarantine(path) == []
    assert add_to_quarantine(path, ["node3", "node1", "node3"], "iteration 7") == ["node3", "node1"]
    assert add_to_quarantine(path, ["node1", "node2"], "iteration 9") == ["node2"]
    assert read_quarantine(path) == ["node3", "node1", "node2"]


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        (RerunDiagnostic.TRANSIENT_ERROR, [True, False, False]),
        (RerunDiagnostic.PERSISTENT_ERROR, [True, True, True]),
        (RerunDiagnostic.CORRECT_RESULT, [True, True, False]),
    ],
)
def test_an_injected_error_comes_again_as_its_kind_says(kind, runs):
    def step():
        return 1.0, lambda output: (torch.tensor(output), {"lm loss": torch.tensor(output)})

    injector = ErrorInjector(1, kind, seed=3, dp_rank=0, dp_size=1)
    found = []
    for is_rerun, samples_of in ((False, 0), (True, 0), (True, None)):
        injector.begin_run(5, is_rerun=is_rerun, samples_of=samples_of)
        output, loss_func = injector.around(step)()
        loss, report = loss_func(output)
        assert bool(loss.isnan()) == bool(report["lm loss"].isnan())
        found.append(bool(loss.isnan()))
    assert found == runs
