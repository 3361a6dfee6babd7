"""The commands that measure sharding say what they cannot do, and count what they say."""

import dataclasses

import pytest

from benchmarks import data_parallel, offload, overlap
from tests.parity import curves
from tests.parity.layouts import LayoutCase


def test_a_machine_without_the_programs_is_told_what_to_install(monkeypatch):
    monkeypatch.setattr(overlap.shutil, "which", lambda program: None)
    assert "ip, tc; install iproute2" in overlap.problem()


@pytest.mark.parametrize("benchmark", [offload, overlap])
def test_a_user_who_is_not_root_is_told_so(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(overlap.shutil, "which", lambda program: program)
    monkeypatch.setattr(benchmark.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(benchmark.sys, "argv", ["benchmark"])
    assert benchmark.main() == 2
    assert "needs root" in capsys.readouterr().err


def test_a_machine_that_slows_down_evenly_does_not_change_a_ratio():
    yardstick = [1.0, 1.2, 1.4, 1.6]
    assert data_parallel.ratios([1.1, 1.3, 1.5], yardstick) == pytest.approx([1.0, 1.0, 1.0])


def test_bytes_are_counted_in_the_phase_in_which_they_were_sent():
    line = overlap.Timeline(
        phases=[("forward", 0.0, 1.0), ("backward", 1.0, 3.0)] * overlap.STEPS_IN_A_ROW,
        sent=[(0.0, 100), (1.0, 100), (2.0, 500), (3.0, 700)],
    )
    assert line.num_bytes == 600 / overlap.STEPS_IN_A_ROW
    assert (line.bytes_in("forward"), line.bytes_in("backward")) == (0, 600)
    assert (line.duration("forward"), line.duration("backward")) == (1.0, 2.0)
    names = [event["name"] for event in overlap.events(0, "stage 0", line)]
    assert names.count("sent") == 3 and names.count("backward") == overlap.STEPS_IN_A_ROW


def test_offloaded_moments_leave_the_device_and_no_bit_changes(tmp_path):
    options = offload.Flags(directory=str(tmp_path), layers=1, vocabulary=64, steps=2)
    found = {
        place: offload.train(dataclasses.replace(options, place=place)) for place in offload.PLACES
    }
    assert len({report["digest"] for report in found.values()}) == 1
    for place, saved in (("host memory", 2.0), ("file", 2.0), ("file, weights too", 4.0)):
        assert found["device"]["device"] / found[place]["device"] == pytest.approx(saved, rel=0.01)


def test_curves_are_drawn_on_each_other_and_apart():
    curve = [4.0, 3.0, 2.0]
    drawn = curves.picture({LayoutCase(): curve, LayoutCase(dp=2, stage=3): curve})
    assert drawn.count("<polyline") == 4
    assert curves.differences([2.0, 2.0002], [2.0, 2.0]) == pytest.approx([0.0, 1e-4])
