"""Checks of nodes find what differs and what is missing, and name the host."""

from dataclasses import replace

import pytest

from megatron.resilience import node_health
from megatron.resilience.node_health import (
    CheckFlags,
    NodeReport,
    State,
    compare,
    time_all_reduce,
)
from tests.harness.distributed import distributed

A = NodeReport("a", 0, 100.0, {"torch": "2.13", "NCCL": "2.27"}, (), 2e9)
B = replace(A, host="b", rank=8, clock_s=100.5, bandwidth=1e9)


def problems(*reports):
    return [one.text for one in compare(reports, 2.0) if one.state is State.PROBLEM]


def test_equal_nodes_have_no_problem_and_the_slowest_rank_is_told():
    assert not problems(A, B)
    assert [one.text for one in compare([A, B], 2.0)] == [
        "0.500 s between a and b", "correct over 2 ranks, 1.00 GB/s per rank",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (dict(clock_s=103.0), "3.000 s between a and b"),
        (dict(versions={"torch": "2.12", "NCCL": "2.27"}), "different: 2.13 on a; 2.12 on b"),
        (dict(problems=("GPUs: 7, but 8 are needed",)), "GPUs: 7, but 8 are needed"),
    ],
)
def test_what_is_wrong_with_a_node_is_told(change, found):
    assert problems(A, replace(B, **change)) == [found]


def test_a_directory_that_cannot_be_written_or_is_full_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for flags, found in (
        (CheckFlags(directory=(str(tmp_path / "file" / "x"),)), "cannot be written"),
        (CheckFlags(directory=(str(tmp_path),), min_free_gib=1e9), "less than"),
        (CheckFlags(min_shared_memory_gib=1e9), "less than"),
    ):
        wrong = [one for one in node_health.examine_node(flags) if one.state is State.PROBLEM]
        assert [found in one.text for one in wrong] == [True], found
    assert not list(tmp_path.glob("tmp*"))


def test_missing_gpus_are_told(monkeypatch, capsys):
    monkeypatch.setenv("LATTICE_DEVICE", "cpu")
    assert node_health.main(["--num-gpus", "8"]) == 1
    assert "GPUs: 0, but 8 are needed" in capsys.readouterr().out


@distributed(world_size=2)
def test_the_all_reduce_is_checked_and_timed(groups):
    assert time_all_reduce(4096) > 0
