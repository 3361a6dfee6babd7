"""The files of runs are read back, drawn, compared and merged."""

import gzip
import json
import math

import pytest
import torch.utils.tensorboard
from matplotlib.figure import Figure

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.failure_file import write_failure
from megatron.training.reports import RunRecord, Series, read_run
from tests.harness.trace_format import trace_problems
from tools.compare import comparison_text, curve_differences
from tools.compare import main as compare
from tools.merge_traces import OF_RANK
from tools.merge_traces import main as merge
from tools.report import draw, key_figures
from tools.report import main as report


def line(step, time, **values):
    scalars = {"lm loss": 3.0 - step / 20, "grad-norm": 1.0, "iteration-time": 0.5, **values}
    return {"iteration": step, "time": time, **scalars}


def write_metrics(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return path


@pytest.fixture
def broken_run(tmp_path):
    """Ten steps, a failure, then steps 7 to 12: four of them taken again."""
    directory = tmp_path / "broken"
    first = [line(step, 1000.0 + step) for step in range(1, 11)]
    second = [line(step, 1040.0 + step, **{"lm loss": 9.0 - step}) for step in range(7, 13)]
    evaluation = {"iteration": 12, "time": 1053.0, "lm loss validation": 2.5}
    write_metrics(directory / "metrics.jsonl", [*first, *second, evaluation])
    record = {"class": "PEER_LOST", "iteration": 10, "rank": 1, "host": "<node>", "time": 1012.0}
    write_failure({**record, "message": "a <b>rank</b> was killed", "places": [1] * 99}, directory)
    return directory


def record_of(name="run", settings=None, **series):
    of_name = {n.replace("_", "-"): Series(range(1, len(v) + 1), v) for n, v in series.items()}
    return RunRecord(name=name, series=of_name, settings=settings or {})


def test_a_step_that_was_taken_twice_counts_as_the_later_attempt_saw_it(broken_run):
    run = read_run(broken_run)
    assert list(run.series["lm loss"].steps) == list(range(1, 13))
    assert run.series["lm loss"].values[5:8] == [3.0 - 6 / 20, 2.0, 1.0]
    assert [(a.first_step, a.last_step) for a in run.attempts] == [(1, 10), (7, 12)]


def test_goodput_is_the_time_of_steps_that_count_in_all_the_time(broken_run):
    run = read_run(broken_run)
    assert run.wall_s == pytest.approx(1052.0 - 1001.0 + 0.5)
    assert run.goodput == pytest.approx(12 * 0.5 / run.wall_s)


def test_every_failure_stays_in_the_history_without_the_places_of_ranks(broken_run):
    write_failure({"class": "HANG", "time": 1060.0, "places": [1]}, broken_run)
    run = read_run(broken_run)
    assert [failure["class"] for failure in run.failures] == ["PEER_LOST", "HANG"]
    assert "places" not in run.failures[0]
    assert run.has_failed


def test_event_files_are_attempts_and_hold_the_settings(tmp_path):
    for attempt, steps in enumerate(((1, 2, 3), (3, 4))):
        writer = torch.utils.tensorboard.SummaryWriter(
            tmp_path / "scalars", filename_suffix=f".{attempt}"
        )
        writer.add_text("seq_length", str(64 + attempt))
        for step in steps:
            writer.add_scalar("lm loss", 10.0 * attempt + step, step)
            writer.add_scalar("iteration-time", 0.5, step)
        writer.add_scalar("lm loss validation", 7.0, steps[-1])
        writer.close()
    run = read_run(tmp_path)
    assert run.series["lm loss"].values == [1.0, 2.0, 13.0, 14.0]
    assert [(a.first_step, a.last_step) for a in run.attempts] == [(1, 3), (3, 4)]
    assert run.settings == {"seq_length": "65"}
    assert run.series["lm loss validation"].steps == [3, 4]


def test_a_line_that_is_being_written_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = write_metrics(tmp_path / "metrics.jsonl", [line(1, 1.0), line(2, 2.0)])
    path.write_text(path.read_text() + '{"iteration": 3, "lm l')
    assert read_run(path).last_step == 2
    path.write_text(path.read_text() + "\n")
    with pytest.raises(DataError, match="line 3: not a line of scalars"):
        read_run(path)


def test_nothing_to_report_and_several_runs_are_refused(tmp_path):
    with pytest.raises(DataError, match="no scalars"):
        read_run(tmp_path)
    for name in ("a", "b"):
        write_metrics(tmp_path / name / "metrics.jsonl", [line(1, 1.0)])
    with pytest.raises(DataError, match="several runs"):
        read_run(tmp_path)


def test_equal_curves_are_called_equal_and_the_first_difference_is_named():
    losses = [3.0, 2.0, 1.0, math.nan]
    one = record_of("one", **{"lm loss": losses, "grad_norm": [1.0] * 4})
    assert [each.first_step for each in curve_differences(one, one)] == [None, None]
    other = record_of(
        "other", **{"lm loss": [3.0, math.nextafter(2.0, 3), 0.5, 1.0], "grad_norm": [1.0] * 4}
    )
    found = curve_differences(one, other)
    loss, norm = found
    assert (loss.first_step, loss.largest, loss.largest_step) == (2, math.inf, 4)
    assert norm.first_step is None
    assert "step 2" in comparison_text(one, other, found)
    assert not curve_differences(one, record_of("none"))


def test_settings_that_differ_are_listed_by_their_flags():
    one = record_of("one", {"num_layers": "4", "clip_grad": "1.0", "own_setting": "x"})
    other = record_of("other", {"num_layers": "8", "clip_grad": "1.0", "seed": "1"})
    lines = comparison_text(one, other, []).splitlines()
    assert [line.split() for line in lines[-4:]] == [
        ["setting", "one", "other"], ["--num-layers", "4", "8"], ["own_setting", "x", "-"],
        ["--seed", "-", "1"],
    ]  # fmt: skip


def test_the_figures_name_steps_losses_goodput_attempts_and_failures(broken_run):
    run = read_run(broken_run)
    found = dict(key_figures(run))
    assert found["steps"] == "12"
    assert found["lm loss validation"] == "2.5 (lowest 2.5)"
    assert found["time of a step (ms)"] == "500 (median)"
    assert found["goodput"].startswith(f"{100 * 12 * 0.5 / run.wall_s:.1f} %")
    assert found["attempt"] == "steps 7 to 12"
    assert found["failure"] == "PEER_LOST at step 10: a <b>rank</b> was killed"


def test_the_tools_print_draw_and_check_equality(broken_run, tmp_path, capsys):
    other = write_metrics(
        tmp_path / "other.jsonl", [line(1, 1.0), line(2, 2.0, **{"lm loss": 0.0})]
    )
    assert report([str(broken_run), "--against", str(other)]) == 0
    assert "goodput" in capsys.readouterr().out
    assert (broken_run / "report.png").read_bytes().startswith(b"\x89PNG")
    words = [str(broken_run), str(other)]
    assert compare(words) == 0
    assert "first difference" in capsys.readouterr().out
    assert compare([*words, "--check-equal"]) == 1
    assert compare([words[0], words[0], "--check-equal"]) == 0


def test_every_panel_shows_the_curves_of_all_runs(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    one = record_of("one", **{"lm loss": [3.0, 2.0], "grad_norm": [1.0, 1.5]})
    other = record_of("other", **{"lm loss": [3.0, 1.0], "lm loss validation": [2.5, 2.0]})
    draw([one, other], tmp_path / "picture.png")
    panels = {axes.get_title(): axes.get_lines() for axes in drawn[0].axes}
    curves = {title: [list(line.get_ydata()) for line in lines] for title, lines in panels.items()}
    assert curves == {
        "lm loss": [[3.0, 2.0], [3.0, 1.0], [2.5, 2.0]], "grad-norm": [[1.0, 1.5]],
    }  # fmt: skip


def trace_file(folder, rank, base_ns=0):
    events = [
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "name": "matmul", "pid": 7, "tid": 1, "ts": 5.0, "dur": 2.0},
        {"ph": "s", "name": "ac2g", "cat": "ac2g", "id": 3, "pid": 7, "tid": 1, "ts": 5.5},
        {"ph": "f", "name": "ac2g", "cat": "ac2g", "id": 3, "pid": 7, "tid": 1, "ts": 6.0},
    ]
    content = {"distributedInfo": {"rank": rank}, "baseTimeNanoseconds": base_ns}
    (folder / f"trace-rank{rank}.json").write_text(json.dumps({**content, "traceEvents": events}))


def test_a_merged_trace_has_the_events_of_all_ranks_as_processes_of_their_own(tmp_path):
    trace_file(tmp_path, 0, base_ns=1_000_000)
    trace_file(tmp_path, 2, base_ns=4_000_000)
    assert merge([str(tmp_path)]) == 0
    merged = json.loads(gzip.decompress((tmp_path / "trace-merged.json.gz").read_bytes()))
    assert list(trace_problems(merged)) == []
    names = {e["pid"]: e["args"]["name"] for e in merged["traceEvents"] if e["ph"] == "M"}
    assert names == {7: "rank 0: python", 2 * OF_RANK + 7: "rank 2: python"}
    begins = {e["pid"]: e["ts"] for e in merged["traceEvents"] if e["ph"] == "X"}
    assert begins == {7: 5.0, 2 * OF_RANK + 7: 5.0 + 3000.0}


def test_what_is_no_trace_of_one_run_is_refused(tmp_path, capsys):
    assert merge([str(tmp_path)]) == 1
    assert "has no traces" in capsys.readouterr().err
    trace_file(tmp_path, 0)
    (tmp_path / "again").mkdir()
    trace_file(tmp_path / "again", 0)
    assert merge([str(tmp_path)]) == 1
    assert "the same rank" in capsys.readouterr().err
    (tmp_path / "trace-rank0.json").write_text("[]")
    assert merge([str(tmp_path)]) == 1
    assert "is not the trace of a rank" in capsys.readouterr().err
