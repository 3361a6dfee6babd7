"""The terminal view says where a run stands, and is right about what is late."""

import io
import json
import math

import pytest
import rich.console

from megatron.training.reports.live_view import frame, seconds_left, silence, sparkline, watch
from megatron.training.reports.run_record import Attempt, RunRecord, Series
from tools.watch import main


def run_at(step, goal="20", end=1000.0, **series):
    steps = range(1, step + 1)
    of_name = {
        "lm loss": Series(steps, [3.0 - s / 10 for s in steps]),
        "iteration-time": Series(steps, [0.5] * step),
        "compute-share": Series(steps, [0.75] * step),
        **{name: Series(steps, values) for name, values in series.items()},
    }
    attempts = [Attempt(1, step, 0.0, end)]
    return RunRecord(name="run", series=of_name, settings={"train_iters": goal}, attempts=attempts)


def text_of(run, now=1001.0, width=100):
    console = rich.console.Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(frame(run, now=now, width=width))
    return console.file.getvalue()


def test_a_frame_fits_the_width_and_names_what_counts():
    text = text_of(run_at(5))
    assert all(len(line) <= 100 for line in text.splitlines())
    for word in ("at step 5 of 20", "25.0%", "00:00:08 left", "lm loss", "2.5", "compute", "75.0%"):
        assert word in text


def test_a_sparkline_has_the_width_the_extremes_and_what_is_not_finite():
    assert sparkline([0.0, 7.0], 10) == "▁█"
    line = sparkline([float(i) for i in range(1000)], 40)
    assert len(line) == 40
    assert (line[0], line[-1]) == ("▁", "█")
    assert sparkline([1.0, math.nan, 2.0], 10) == "▁×█"
    assert sparkline([5.0, 5.0], 10) == "▁▁"
    assert sparkline([], 10) == ""


def test_a_run_is_silent_only_when_a_step_is_late_for_it():
    assert silence(run_at(5), now=1004.0) == ""
    assert silence(run_at(5), now=1030.0) == "no step for 00:00:30"
    assert silence(run_at(20), now=9999.0) == ""
    slow = run_at(5, **{"iteration-time": [60.0] * 5})
    assert silence(slow, now=1300.0) == ""


def test_the_time_left_is_that_of_recent_steps():
    assert seconds_left(run_at(10)) == pytest.approx(10 * 0.5)
    assert math.isnan(seconds_left(run_at(10, goal="")))


def test_the_last_failure_is_shown_in_one_line():
    run = run_at(5)
    run.failures.append({"class": "OOM", "iteration": 4, "message": "[red]no memory\nmore"})
    text = text_of(run)
    assert "OOM at iteration 4: [red]no memory" in text and "more" not in text


def test_watching_ends_with_the_run(capsys):
    seen = iter([run_at(5), run_at(20)])
    watch(lambda: next(seen), interval_s=0.0, is_over=lambda run: run.last_step == 20)
    assert "finished" in capsys.readouterr().out


def test_the_tool_prints_one_picture(tmp_path, capsys):
    lines = [
        {"iteration": s, "time": 10.0 + s, "lm loss": 2.0, "iteration-time": 1.0} for s in (1, 2)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main([str(tmp_path), "--once"]) == 0
    assert "lm loss" in capsys.readouterr().out
    assert main([str(tmp_path / "nothing")]) == 1
