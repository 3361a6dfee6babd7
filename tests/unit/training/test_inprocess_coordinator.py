"""Which processes train together after some were lost: the launcher's decisions."""

import pytest

from megatron.resilience.inprocess_restart import Flags, limits_of, main
from megatron.resilience.restart_coordinator import Coordinator, ElasticLimits, ProcessExit

KILLED = ProcessExit("", -9)


def ranks_of(decision):
    return {each.process: each.rank for each in decision.assigned}


def started(limits, *processes):
    """Return a coordinator whose first attempt are `processes` (name, node)."""
    coordinator = Coordinator(limits)
    for name, node in processes:
        coordinator.has_joined(name, node)
    assert coordinator.decide(0.0).assigned
    return coordinator


def test_a_spare_takes_the_rank_of_the_lost_process_and_the_others_keep_theirs():
    limits = ElasticLimits(max_ranks=3, min_ranks=3)
    coordinator = started(limits, ("a", 0), ("b", 0), ("c", 0))
    coordinator.has_joined("spare", 0)
    coordinator.has_ended("b", KILLED)
    decision = coordinator.decide(1.0)
    assert decision.broken == 0 and not decision.assigned, "a and c have not left their groups"
    for name in "ac":
        coordinator.has_joined(name, 0)
    assert ranks_of(coordinator.decide(2.0)) == {"a": 0, "c": 1, "spare": 2}


@pytest.mark.parametrize(
    ("available", "ranks"), [(8, 8), (7, 6), (5, 4), (4, 4), (3, 0)], ids=lambda n: str(n)
)
def test_ranks_come_and_go_by_replicas_that_divide_the_batch(available, ranks):
    limits = ElasticLimits(max_ranks=8, min_ranks=4, ranks_per_replica=2, global_batch=12)
    assert limits.size_for(available) == ranks


def test_a_number_of_replicas_that_does_not_divide_the_batch_is_passed_over():
    limits = ElasticLimits(max_ranks=4, min_ranks=1, global_batch=8)
    assert [limits.size_for(n) for n in (4, 3, 2, 1)] == [4, 2, 2, 1]


def test_fewer_go_on_at_once_and_more_join_after_a_step():
    coordinator = started(ElasticLimits(max_ranks=3, min_ranks=2), ("a", 0), ("b", 0), ("c", 0))
    coordinator.has_ended("c", KILLED)
    for name in "ab":
        coordinator.has_joined(name, 0)
    assert [place.may_grow for place in coordinator.decide(1.0).assigned] == [True, True]
    coordinator.has_joined("d", 0)
    decision = coordinator.decide(2.0)
    assert (decision.grows, decision.broken) == (1, None)
    for name in "ab":
        coordinator.has_joined(name, 0)
    assert ranks_of(coordinator.decide(3.0)) == {"a": 0, "b": 1, "d": 2}
    assert coordinator.num_failures == 1, "growing is none"


def test_who_does_not_give_up_its_groups_is_killed():
    coordinator = started(ElasticLimits(max_ranks=2, min_ranks=2, meet_s=5.0), ("a", 0), ("b", 0))
    coordinator.has_ended("a", KILLED)
    assert not coordinator.decide(10.0).killed
    assert coordinator.decide(16.0).killed == ["b"]


def test_ranks_of_a_node_follow_each_other():
    limits = ElasticLimits(max_ranks=4, min_ranks=4)
    coordinator = started(limits, ("a", 1), ("b", 0), ("c", 1), ("d", 0))
    assert coordinator.members == {"b": 0, "d": 1, "a": 2, "c": 3}


@pytest.mark.parametrize(
    ("text", "times"),
    [("FATAL[CONFIG] rank=0", 1), ("FATAL[CRASH] iter=7 rank=1 where=training", 3)],
    ids=["useless to repeat", "three times the same"],
)
def test_a_failure_that_comes_back_ends_the_job(text, times):
    coordinator = started(ElasticLimits(max_ranks=1, min_ranks=1), ("0", 0))
    for number in range(times):
        assert coordinator.decide(number).status is None
        coordinator.has_ended(str(number), ProcessExit(text, 10))
        coordinator.has_joined(str(number + 1), 0)
    assert coordinator.decide(99.0).status == 10


def test_failures_at_different_steps_end_nothing():
    coordinator = started(ElasticLimits(max_ranks=1, min_ranks=1), ("0", 0))
    for number in range(9):
        exit = ProcessExit(f"FATAL[CRASH] iter={number} rank=0", 1)
        coordinator.has_ended(str(number), exit)
        coordinator.has_joined(str(number + 1), 0)
        assert coordinator.decide(number).status is None


def test_the_job_is_over_when_all_members_have_ended_well():
    coordinator = started(ElasticLimits(max_ranks=2, min_ranks=2), ("a", 0), ("b", 0))
    coordinator.has_ended("a", ProcessExit("", 0))
    assert coordinator.decide(1.0).status is None
    coordinator.has_ended("b", ProcessExit("", 0))
    assert coordinator.decide(2.0).status == 0


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--nproc-per-node", "2"], "there is no script"),
        (["--nproc-per-node", "2", "--min-ranks", "3", "s.py"], "--min-ranks 3"),
        (["--nproc-per-node", "3", "s.py", "--global-batch-size", "4"], "3 ranks in replicas"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_a_way_out(words, what, capsys):
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert what in shown and "fix" in shown.lower()


def test_the_batch_of_the_command_limits_the_replicas():
    command = (
        "s.py",
        "--global-batch-size",
        "8",
        "--global-batch-size=24",
        "--micro-batch-size",
        "2",
    )
    limits = limits_of(Flags(nproc_per_node=4, min_ranks=1, command=command))
    assert (limits.global_batch, limits.size_for(3)) == (12, 3)
