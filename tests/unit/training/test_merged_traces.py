"""Traces of ranks whose clocks differ become one trace in which collectives line up."""

import json
import random
from dataclasses import replace

import pytest

from megatron.core.foundation.collective_log import CollectiveLog
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.flight_recorder import Channel
from megatron.training.reports.trace_clocks import CollectiveTimes, clock_offsets, matched
from megatron.training.reports.trace_merge import RankTrace, merge_traces, read_trace
from tests.harness.trace_format import trace_problems
from tools.merge_traces import main as merge

BASE_NS = 1_790_000_000_000_000_000


def collectives(num_ranks, offsets_ns, *, seed=1, number=30, groups=None, operation="all_reduce"):
    """Return what each rank saw of collectives whose ranks come and leave at random moments."""
    draw = random.Random(seed)
    seen = {rank: [] for rank in range(num_ranks)}
    now = BASE_NS
    for index in range(number):
        group = draw.choice(groups) if groups else tuple(range(num_ranks))
        starts = {rank: now + draw.randrange(2_000_000) for rank in group}
        for rank in group:
            end = max(starts.values()) + draw.randrange(1_000, 400_000)
            seen[rank].append(
                CollectiveTimes(
                    operation=operation, group="g", ranks=group, tag=0, number=index,
                    num_elements=4, start_ns=starts[rank] - offsets_ns[rank],
                    end_ns=end - offsets_ns[rank],
                )
            )  # fmt: skip
        now += 5_000_000
    return seen


def trace_of(rank, seen):
    slices = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "dur": 10.0,
         "ts": (each.start_ns - BASE_NS) / 1e3 - 20.0 + 1e7, "args": {}}
        for each in seen
    ]  # fmt: skip
    return RankTrace(rank, f"node{rank}", BASE_NS - 10_000_000_000, slices, seen)


@pytest.mark.parametrize("seed", range(5))
def test_clocks_that_differ_by_seconds_are_found_within_what_is_said(seed):
    offsets = [0, 3_700_000_000, -250_000_000, 42_000]
    seen = collectives(4, offsets, seed=seed, groups=[(0, 1), (2, 3), (1, 3), (0, 2)])
    found = clock_offsets(matched(seen), [0, 1, 2, 3])
    for rank, true in enumerate(offsets):
        assert abs(found[rank].offset_ns - true) <= found[rank].uncertainty_ns
        assert 0 <= found[rank].uncertainty_ns < 2_000_000


def test_a_message_arrives_after_it_was_sent_in_both_directions():
    def message(operation, source, target, number, start, end):
        tag = -1 - source * 2 - target
        return CollectiveTimes(operation, "pp", (0, 1), tag, number, 1, start, end)

    seen = {
        0: [message("send", 0, 1, 1, 100, 110), message("recv", 1, 0, 1, 150, 260)],
        1: [message("recv", 0, 1, 1, 1050, 1140), message("send", 1, 0, 1, 1220, 1230)],
    }
    # 100 + 1000 + latency <= 1140, and 1220 - 1000 + latency <= 260.
    offset = clock_offsets(matched(seen), [0, 1])[1]
    assert (offset.offset_ns, offset.uncertainty_ns) == (-1000.0, 40.0)


def test_a_rank_without_common_collectives_keeps_its_clock_and_says_so():
    seen = collectives(2, [0, 5_000])
    offsets = clock_offsets(matched(seen), [0, 1, 2])
    assert (offsets[2].offset_ns, offsets[2].uncertainty_ns) == (0.0, float("inf"))


def test_clocks_of_unequal_rates_are_told_by_a_negative_uncertainty():
    seen = collectives(2, [0, 0])
    later = seen[1][-1]
    seen[1][-1] = replace(later, start_ns=later.start_ns + 10**9, end_ns=later.end_ns + 10**9)
    assert clock_offsets(matched(seen), [0, 1])[1].uncertainty_ns < 0
    merged = merge_traces([trace_of(rank, seen[rank]) for rank in (0, 1)])
    aligned, number = merged.num_aligned()
    assert aligned < number


def test_the_merged_trace_has_the_format_and_its_collectives_overlap():
    offsets = [0, 900_000_000, -3_000_000_000]
    seen = collectives(3, offsets)
    merged = merge_traces([trace_of(rank, seen[rank]) for rank in (2, 0, 1)])
    assert list(trace_problems(merged.content)) == []
    assert merged.num_aligned() == (30, 30)
    slices = [e for e in merged.content["traceEvents"] if e.get("cat") == "collective"]
    for name in {each["name"] for each in slices}:
        of_name = [each for each in slices if each["name"] == name]
        assert sorted(each["pid"] for each in of_name) == [0, 100, 200]
        assert max(e["ts"] for e in of_name) <= min(e["ts"] + e["dur"] for e in of_name) + 0.002


def test_arrows_lead_from_the_rank_that_came_last_which_is_the_one_waited_for():
    seen = collectives(2, [0, 0])
    merged = merge_traces([trace_of(rank, seen[rank]) for rank in (0, 1)])
    late_s = {0: 0.0, 1: 0.0}
    for zero, one in zip(seen[0], seen[1], strict=True):
        late_s[int(one.start_ns > zero.start_ns)] += abs(one.start_ns - zero.start_ns) / 1e9
    most_s = 30 * merged.offsets[1].uncertainty_ns / 1e9
    assert merged.waited_for_s() == pytest.approx(late_s, abs=most_s)
    arrows = [e for e in merged.content["traceEvents"] if e["ph"] in "sf"]
    begins = {e["id"]: e["pid"] for e in arrows if e["ph"] == "s"}
    assert len(begins) == 30
    assert all(begins[e["id"]] != e["pid"] for e in arrows if e["ph"] == "f")


def test_slices_that_overlap_on_a_thread_get_one_of_their_own():
    overlapping = [
        {"ph": "X", "name": name, "pid": 7, "tid": 7, "ts": ts, "dur": 10.0}
        for name, ts in (("outer", 0.0), ("in flight", 5.0), ("after", 12.0))
    ]
    merged = merge_traces([RankTrace(0, "node", 0, overlapping, [])])
    assert list(trace_problems({"traceEvents": overlapping}))
    assert list(trace_problems(merged.content)) == []
    threads = {e["name"]: e["tid"] for e in merged.content["traceEvents"] if e["ph"] == "X"}
    assert threads["outer"] == threads["after"] == 7 != threads["in flight"]


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "X", "pid": 1, "tid": 1, "ts": 0.0, "dur": 1.0},
        {"ph": "X", "name": "x", "pid": "1", "tid": 1, "ts": 0.0, "dur": 1.0},
        {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0.0},
        {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": -5.0, "dur": 1.0},
        {"ph": "f", "name": "x", "cat": "c", "id": 1, "pid": 1, "tid": 1, "ts": 0.0},
        {"ph": "Q", "name": "x", "pid": 1, "tid": 1},
        {"ph": "M", "name": "x", "pid": 1, "tid": 1},
    ],
)
def test_the_check_of_the_format_finds_events_that_are_wrong(event):
    assert len(list(trace_problems({"traceEvents": [event]}))) == 1


def test_files_that_are_no_traces_and_traces_of_one_rank_twice_are_refused(tmp_path, capsys):
    assert merge([str(tmp_path)]) == 1
    assert "has no traces" in capsys.readouterr().err
    (tmp_path / "trace-rank0.json").write_text("[1]")
    with pytest.raises(DataError, match="not the trace of a rank"):
        read_trace(tmp_path / "trace-rank0.json")
    seen = collectives(2, [0, 0])
    with pytest.raises(DataError, match="several of one rank"):
        merge_traces([trace_of(0, seen[0]), trace_of(0, seen[0])])


class InFlight:
    """A result that is not there yet."""

    def is_completed(self):
        return False


def test_an_operation_ends_where_its_result_is_there():
    log = CollectiveLog({3: Channel((0, 1), 0, name="tp")}, host_waits=True)
    log.enter(1, "all_reduce", 3, 7, 64)
    log.wait_in(1)
    log.wait_in(0)
    log.started(1, InFlight())
    assert log.entries() == []
    log.wait_in(1)
    log.wait_in(0)
    (entry,) = json.loads(json.dumps(log.entries()))
    assert (entry["operation"], entry["group"], entry["number"]) == ("all_reduce", "tp", 7)
    assert entry["start_ns"] <= entry["end_ns"]


def test_where_a_stream_waits_only_operations_on_objects_have_an_end():
    log = CollectiveLog({3: Channel((0, 1), 0, name="tp")}, host_waits=False)
    for record, name in ((1, "all_reduce"), (2, "all_gather_object")):
        log.enter(record, name, 3, record, 64)
        log.wait_in(record)
        log.wait_in(0)
    assert [entry["operation"] for entry in log.entries()] == ["all_gather_object"]
