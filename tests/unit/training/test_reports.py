"""Reports of runs: what was written is read back, drawn where it belongs, and opens offline."""

import html.parser
import json
import math
import re

import pytest
import torch.utils.tensorboard

from megatron.core.foundation.errors import DataError
from megatron.core.foundation.failure_file import write_failure
from megatron.training.reports.comparison import compare_runs, comparison_page, comparison_text
from megatron.training.reports.line_chart import Axis, Chart, Curve, figure_html, quantity
from megatron.training.reports.run_charts import running_mean
from megatron.training.reports.run_page import run_page, status_of
from megatron.training.reports.run_record import RunRecord, Series, read_run
from megatron.training.reports.settings_table import changed_from_default, differences
from tools.compare import main as compare
from tools.report import main as report

PIPELINE = {
    "pipeline_model_parallel_size": "4", "pipeline_schedule": "1f1b", "global_batch_size": "16",
    "micro_batch_size": "2", "data_parallel_size": "1", "tensor_model_parallel_size": "2",
    "train_iters": "30", "seq_length": "64",
}  # fmt: skip


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
    assert status_of(run) == ("failed: HANG", "bad")


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


class BalancedTags(html.parser.HTMLParser):
    """Checks that what is opened is closed, and collects what a browser would load."""

    VOID = ("meta", "link", "img", "br")
    IMPLIED = ("tr", "td", "th", "li")

    def __init__(self, text):
        super().__init__()
        self.opened, self.loaded, self.tags = [], [], []
        self.feed(text)
        assert not self.opened

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loaded += [v for n, v in attributes if n in ("src", "href", "srcset", "data")]
        if tag not in self.VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag):
        while self.opened[-1] != tag and self.opened[-1] in self.IMPLIED:
            self.opened.pop()
        assert self.opened.pop() == tag


def test_the_page_is_whole_and_loads_nothing(broken_run):
    page = run_page(read_run(broken_run))
    found = BalancedTags(page)
    assert found.loaded == []
    assert "@import" not in page and "url(http" not in page
    assert "default-src 'none'" in page
    assert found.tags.count("figure") >= 3


def test_names_and_messages_of_a_run_are_text_on_the_page(broken_run):
    page = run_page(read_run(broken_run))
    assert "&lt;node&gt;" in page and "&lt;b&gt;rank&lt;/b&gt;" in page
    assert "<node>" not in page and "<b>rank" not in page
    hostile = record_of("</script><script>x", **{"lm loss": [1.0]}, iteration_time=[1.0])
    assert "<script>x" not in run_page(hostile)


def test_the_page_tells_the_textbook_bubble_of_the_schedule(tmp_path):
    run = record_of(settings=PIPELINE, **{"lm loss": [3.0, 2.0], "iteration_time": [1.0, 1.0]})
    # (p - 1) / (m + p - 1) with p = 4 stages and m = 8 micro batches.
    assert f"the bubble is {100 * 3 / 11:.1f}%" in run_page(run)


def test_every_layer_with_experts_has_its_load_on_the_page(broken_run):
    loads = {
        f"experts/layer {n} {kind} load": 0.5 + n
        for n in (1, 2)
        for kind in ("lowest", "median", "highest")
    }
    write_metrics(broken_run / "metrics.jsonl", [line(s, 1000.0 + s, **loads) for s in (1, 2)])
    page = run_page(read_run(broken_run))
    assert "Load of the experts of layer 2" in page
    assert page.count("<title>layer 1, step") == 2


def points_of(figure, kind):
    found = re.findall(rf'<polyline class="{kind} c\d" points="([^"]*)"', figure)
    return [[tuple(map(float, p.split(","))) for p in run.split()] for run in found]


def test_points_are_where_their_values_are_on_the_axes():
    curve = Curve(label="x", steps=[0, 5, 10], values=[0.0, 1.0, 4.0])
    (points,) = points_of(figure_html(Chart(title="t", unit="", curves=[curve])), "line")
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
    assert y0 - y1 == pytest.approx((y0 - y2) / 4, abs=0.11)


def test_no_spike_is_lost_among_many_points():
    values = [1.0] * 50_000
    values[31_415] = 99.0
    figure = figure_html(
        Chart(title="t", unit="", curves=[Curve(label="x", steps=range(50_000), values=values)])
    )
    (points,) = points_of(figure, "line")
    assert len(points) <= 1000
    assert min(y for _, y in points) < min(y for x, y in points[:3])


def test_a_value_that_is_not_finite_interrupts_the_curve_and_is_marked():
    values = [1.0, 2.0, math.nan, 2.0, math.inf, 1.0]
    figure = figure_html(
        Chart(title="t", unit="", curves=[Curve(label="x", steps=range(6), values=values)])
    )
    assert [len(run) for run in points_of(figure, "line")] == [2, 2, 2]
    assert figure.count('class="lost"') == 2


def test_outliers_do_not_flatten_the_rest_and_are_counted():
    curve = Curve(label="x", steps=range(200), values=[900.0, *(1.0 + i % 7 for i in range(199))])
    figure = figure_html(Chart(title="t", unit="", curves=[curve], drops_outliers=True))
    ys = [y for _, y in points_of(figure, "line")[0][1:]]
    assert max(ys) - min(ys) > 30
    assert "1 values outside" in figure


def test_ticks_are_round_and_on_the_axis():
    assert Axis(0.0, 1.0).ticks() == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert Axis(0.4, 12.0, is_logarithmic=True).ticks() == pytest.approx([0.5, 1, 2, 5, 10])
    assert Axis(1e-6, 1e3, is_logarithmic=True).ticks() == pytest.approx(
        [10.0**power for power in range(-6, 4, 2)]
    )
    assert [quantity(x) for x in (0.0, 1e-5, 0.25, 1234.0, 45_600.0, 7.1e9)] == [
        "0", "1e-05", "0.25", "1,234", "45.6k", "7.1G",
    ]  # fmt: skip


def test_a_running_mean_leaves_out_what_is_not_finite():
    assert running_mean([2.0, math.nan, 2.0]) == [2.0, 2.0, 2.0]
    assert math.isnan(running_mean([math.nan, 1.0])[0])


def test_settings_are_compared_with_defaults_and_with_another_run():
    settings = {"num_layers": "4", "clip_grad": "1.0", "own_setting": "x"}
    changed = {row.flag: (row.value, row.other) for row in changed_from_default(settings)}
    assert changed == {"--num-layers": ("4", "None"), "own_setting": ("x", "—")}
    other = {"num_layers": "8", "clip_grad": "1.0", "seed": "1"}
    assert [(r.flag, r.value, r.other) for r in differences(settings, other)] == [
        ("--num-layers", "4", "8"), ("own_setting", "x", "—"), ("--seed", "—", "1"),
    ]  # fmt: skip


def test_equal_curves_are_called_equal_and_the_first_difference_is_named():
    losses = [3.0, 2.0, 1.0, math.nan]
    one = record_of("one", **{"lm loss": losses, "grad_norm": [1.0] * 4})
    assert compare_runs(one, one).curves_are_equal
    other = record_of(
        "other", **{"lm loss": [3.0, math.nextafter(2.0, 3), 0.5, 1.0], "grad_norm": [1.0] * 4}
    )
    found = compare_runs(one, other)
    assert not found.curves_are_equal
    loss, norm = found.curves
    assert (loss.first_step, loss.largest, loss.largest_step) == (2, math.inf, 4)
    assert norm.first_step is None
    assert "step 2" in comparison_text(found)
    assert not compare_runs(one, record_of("none")).curves_are_equal


def test_the_tools_write_pages_and_check_equality(broken_run, tmp_path, capsys):
    other = write_metrics(
        tmp_path / "other.jsonl", [line(1, 1.0), line(2, 2.0, **{"lm loss": 0.0})]
    )
    assert report([str(broken_run), "--against", str(other)]) == 0
    assert "<!doctype html>" in (broken_run / "report.html").read_text()
    out = tmp_path / "pages" / "both.html"
    words = [str(broken_run), str(other)]
    assert compare([*words, "--out", str(out)]) == 0
    assert "first difference" in capsys.readouterr().out
    BalancedTags(out.read_text())
    assert compare([*words, "--check-equal"]) == 1
    assert compare([words[0], words[0], "--check-equal"]) == 0


def test_a_comparison_draws_both_runs_in_every_chart():
    one = record_of("one", **{"lm loss": [3.0, 2.0], "grad_norm": [1.0, 1.0]})
    other = record_of("other", **{"lm loss": [3.0, 1.0], "grad_norm": [1.0, 2.0]})
    page = comparison_page(one, other)
    assert page.count("one: running mean") == page.count("other: running mean") == 2
