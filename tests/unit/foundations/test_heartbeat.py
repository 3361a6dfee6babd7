"""From the records of ranks to the ranks that hold up the others."""

import os
from dataclasses import replace

import pytest

from megatron.core.foundation import flight_recorder
from megatron.core.foundation.flight_recorder import NUM_RECORDS, Channel, Field, RankProgress
from megatron.resilience.diagnosis import Diagnosis, RankView, StuckRanks
from megatron.resilience.recorder_reader import Operation, RecorderReader, Snapshot

TP, DP = Channel((0, 1), 0, name="tp"), Channel((0, 1), 7, name="dp")
RECV = Channel((0, 1), -1 - 0 * 2 - 1, name="pp")  # from rank 0 to rank 1
NAMES = {0: "forward", 1: "backward"}
SECONDS = 7.0


def rank(number, *operations, waits=False, letter="S", quiet=0.0, activity="training", **seen):
    """Return a view; operations are (channel, operation, elements)."""
    of_channel, records = {}, {}
    for at, (channel, operation, size) in enumerate(operations):
        same = of_channel.setdefault(channel, {})
        records[at] = Operation(at, channel, operation, len(same) + 1, size, 0)
        same[len(same) + 1] = records[at]
    fields = [0] * len(Field)
    fields[Field.NUM_RECORDS] = len(records)
    fields[Field.WAITS_IN] = len(records) if waits else 0
    fields[Field.IS_TRAINING], fields[Field.NUM_STEPS] = int(activity == "training"), 3
    return RankView(
        number, Snapshot(tuple(fields), activity, records, of_channel), letter, quiet, **seen
    )


def stuck(*views, sees_all=True, **options) -> StuckRanks | None:
    return Diagnosis(
        views={view.rank: view for view in views},
        timeout_s=SECONDS,
        instructions=NAMES,
        sees_all=sees_all,
        **options,
    ).find()


def found(*views, sees_all=True):
    """Return (kind, ranks) of the finding, None without one."""
    finding = stuck(*views, sees_all=sees_all)
    return finding and (finding.kind, finding.ranks)


REDUCE, GATHER = (TP, "all_reduce", 8), (TP, "all_gather", 8)
WAITING = {"waits": True, "quiet": 9.0}


@pytest.mark.parametrize(
    ("views", "expected"),
    [
        (
            (rank(0, REDUCE, **WAITING), rank(1, quiet=9.0, letter="T", stopped_s=9.0)),
            ("HANG", (1,)),
        ),
        (
            (rank(0, REDUCE, **WAITING), rank(1, quiet=9.0, letter="T", stopped_s=3.0)),
            None,
        ),
        ((rank(0, letter="T", stopped_s=9.0), rank(1, letter="T", stopped_s=9.0)), None),
        ((rank(0, REDUCE, **WAITING), rank(1, quiet=9.0, beatless_s=9.0)), ("HANG", (1,))),
        ((rank(0, REDUCE, **WAITING), rank(1, quiet=9.0)), ("WAITING", (1,))),
        ((rank(0, REDUCE, **WAITING), rank(1, quiet=9.0, activity="evaluating")), None),
        (
            (rank(0, REDUCE, **WAITING), rank(1, quiet=9.0, beatless_s=9.0, activity="saving")),
            None,
        ),
        ((rank(0, REDUCE), rank(1, GATHER)), ("COLLECTIVE_MISMATCH", (0, 1))),
        ((rank(0, REDUCE, letter="X"), rank(1, GATHER)), ("COLLECTIVE_MISMATCH", (0, 1))),
        ((rank(0, letter="X"), rank(1, quiet=9.0, beatless_s=9.0)), ("PEER_LOST", (0,))),
        ((rank(0, letter="X"), rank(1, quiet=9.0), rank(2, quiet=5.0)), None),
        ((rank(0, REDUCE), rank(1, (TP, "all_reduce", 9))), ("COLLECTIVE_MISMATCH", (0, 1))),
        ((rank(0, (TP, "all_to_all", 8)), rank(1, (TP, "all_to_all", 9))), None),
        (
            (rank(0, REDUCE, **WAITING), rank(1, (DP, "all_reduce", 8), **WAITING)),
            ("DEADLOCK", (0, 1)),
        ),
        ((rank(0, REDUCE, **WAITING), rank(1, REDUCE, **WAITING)), None),
        ((rank(0, REDUCE, **WAITING), rank(1, (RECV, "recv", 0), **WAITING)), ("DEADLOCK", (0, 1))),
        (
            (rank(0, (RECV, "send", 8), REDUCE, **WAITING), rank(1, (RECV, "recv", 0), **WAITING)),
            None,
        ),
    ],
)
def test_the_cause_is_told_from_those_who_wait(views, expected):
    assert found(*views) == expected


def blocked_on(view, peer):
    """Return a view of a rank that waits for another one within an operation."""
    fields = list(view.snapshot.fields)
    fields[Field.BLOCKED_ON] = peer + 1
    return replace(view, snapshot=replace(view.snapshot, fields=tuple(fields)))


def test_a_rank_that_has_gone_on_to_a_later_operation_is_no_part_of_a_circle():
    late = rank(0, REDUCE, **WAITING)
    ahead = rank(1, REDUCE, REDUCE, **WAITING)
    assert found(blocked_on(late, 1), ahead) is None
    assert found(blocked_on(late, 1), rank(1, (DP, "all_reduce", 8), **WAITING)) == (
        "DEADLOCK",
        (0, 1),
    )


def test_no_circle_is_reported_while_a_rank_may_be_about_to_be_found_locked():
    views = rank(0, REDUCE, **WAITING), rank(1, (DP, "all_reduce", 8), **WAITING, beatless_s=6.0)
    assert found(*views) is None
    locked = rank(1, (DP, "all_reduce", 8), waits=True, quiet=9.5, beatless_s=9.5)
    assert found(views[0], locked) == ("HANG", (1,))


@pytest.mark.parametrize("activity", ["saving a checkpoint", "evaluating", "loading"])
def test_a_rank_that_is_stuck_outside_training_is_a_warning_after_a_longer_time(activity):
    for quiet, expected in ((9.0, None), (40.0, ("WAITING", (1,)))):
        waiting = rank(0, REDUCE, REDUCE, waits=True, quiet=quiet)
        assert found(waiting, rank(1, REDUCE, quiet=quiet, activity=activity)) == expected
        locked = {"waits": True, "beatless_s": quiet}
        stuck = rank(1, REDUCE, quiet=quiet, activity=activity, **locked)
        assert found(waiting, stuck) == expected


@pytest.mark.parametrize(
    ("quiet", "longest", "expected"), [(9.0, 0.5, True), (9.0, 5.0, False), (3.0, 0.1, False)]
)
def test_a_wait_for_another_machine_far_beyond_the_usual_names_global_rank_and_host(
    quiet, longest, expected
):
    view = rank(0, REDUCE, waits=True, quiet=quiet, longest_s=longest)
    finding = stuck(view, sees_all=False, hosts={0: "node-a", 1: "node-b"})
    assert (finding is not None) == expected
    if finding is not None:
        assert (finding.kind, finding.ranks) == ("WAITING", (1,))
        assert "for ranks on other machines: 1 (node-b)" in finding.text
        assert "all_reduce of 8 elements, number 1 on tp [0, 1]" in finding.text


def test_an_evaluation_is_watched_for_a_held_lock_from_the_second_one_on():
    progress, seen = RankProgress(), []
    for activity in ("training", "evaluating", "training", "evaluating", "saving a checkpoint"):
        progress.set_activity(activity)
        seen.append(progress.fields[Field.IS_TRAINING])
    assert seen == [1, 0, 1, 1, 0]


def test_who_waits_in_what_all_have_entered_waits_for_the_rank_that_hangs():
    finding = stuck(
        rank(0, REDUCE, **WAITING), rank(1, REDUCE, quiet=9.0, letter="T", stopped_s=9.0)
    )
    assert finding.waiting[0].endswith("for rank 1")


def test_a_circle_is_only_seen_by_who_sees_all_ranks():
    views = rank(0, REDUCE, **WAITING), rank(1, (DP, "all_reduce", 8), **WAITING)
    assert found(*views, sees_all=False) is None


def test_both_sides_of_a_mismatch_are_named():
    finding = stuck(rank(0, REDUCE), rank(1, GATHER))
    assert "rank 0 is in all_reduce of 8 elements, number 1 on tp [0, 1]" in finding.text
    assert "rank 1 is in all_gather of 8 elements, number 1 on tp [0, 1]" in finding.text


class Group:
    """Stands for a process group of two ranks."""


@pytest.mark.parametrize("num_operations", [0, 5, NUM_RECORDS, 3 * NUM_RECORDS + 7])
def test_the_newest_operations_are_read_in_their_order(num_operations, monkeypatch):
    monkeypatch.setattr(flight_recorder, "describe_group", lambda group: ((0, 1), "tp"))
    here, groups = RankProgress(), [Group(), Group()]
    reader = RecorderReader(os.getpid(), here.share())
    for number in range(num_operations):
        if number == num_operations // 2:
            reader.snapshot()  # a table that grows later
        here.begin_op("all_reduce", groups[number % 2 if number > 2 else 0], number)
    shot = reader.snapshot()
    assert list(shot.operations) == list(range(num_operations))[-NUM_RECORDS:]
    assert all(record.num_elements == number for number, record in shot.operations.items())
    channels = [Channel((0, 1), 0), Channel((0, 1), 0, occurrence=1)]
    for channel, group in zip(channels, groups, strict=True):
        assert shot.count(channel) == here.count(group)
        same = [r for r in shot.operations.values() if r.channel == channel]
        assert list(shot.of_channel.get(channel, {}).values()) == same
