"""Timelines as text, SVG, PNG and JSON."""

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from megatron.core.foundation.errors import ConfigError, DataError
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import interleaved_orders
from megatron.core.pipeline_parallel.schedule_definitions.one_f_one_b import one_f_one_b_orders
from megatron.core.pipeline_parallel.timeline import (
    Trace,
    load_trace,
    planned_trace,
    save,
    timeline_text,
)
from tools import plot_schedule

PLAN = planned_trace(lower(one_f_one_b_orders(3, 4)))
INTERLEAVED = planned_trace(lower(interleaved_orders(2, 4, 2)))


def test_the_text_grid_shows_the_textbook_picture():
    assert timeline_text(PLAN).splitlines()[1:] == [
        "rank  0 | F0 F1 F2 ............B0=== F3 B1=== ...B2=== ...B3===",
        "rank  1 | ...F0 F1 ......B0=== F2 B1=== F3 B2=== ...B3=== ......",
        "rank  2 | ......F0 B0=== F1 B1=== F2 B2=== F3 B3=== ............",
    ]


def test_the_caption_gives_bubble_and_memory():
    caption = timeline_text(PLAN).splitlines()[0]
    assert "makespan 18" in caption
    assert "bubble 33.3%" in caption
    assert "peak live activations 3, 2, 1" in caption


def test_a_text_grid_of_fixed_width_keeps_the_width():
    rows = timeline_text(INTERLEAVED, width=60).splitlines()[1:]
    assert {len(row) for row in rows} <= set(range(20, 10 + 60 + 1))


def test_a_picture_has_a_panel_per_trace_and_labels_its_steps(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.svg"
    save([PLAN, INTERLEAVED], path)
    texts = [e.text for e in ElementTree.fromstring(path.read_text()).iter() if e.text]
    assert len([text for text in texts if "makespan" in text]) == 2
    labels = [s.step.label(1) for s in PLAN.spans] + [s.step.label(2) for s in INTERLEAVED.spans]
    assert {label: texts.count(label) for label in labels} == Counter(labels)


def test_a_trace_survives_its_file(tmp_path):
    path = tmp_path / "trace.json"
    save([INTERLEAVED], path)
    again = load_trace(path)
    assert again == INTERLEAVED
    assert again.report() == INTERLEAVED.report()


def test_a_chrome_trace_has_a_process_per_rank():
    events = json.loads(PLAN.to_chrome_json())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1, 2}
    assert [e["dur"] for e in events if e["ph"] == "X"][:2] == [1000.0, 1000.0]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".txt", ".chrome.json"])
def test_every_format_is_written(tmp_path, suffix):
    if suffix in (".svg", ".png"):
        pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    save([PLAN, INTERLEAVED], path)
    assert path.stat().st_size > 500


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"picture\.gif"):
        save([PLAN], tmp_path / "picture.gif")


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "other"}', '{"format": 3}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(DataError, match="is not a pipeline trace"):
        load_trace(path)


def test_the_tool_prints_a_plan(capsys):
    assert plot_schedule.main(["--schedule", "1f1b", "-p", "3", "-m", "4"]) == 0
    assert timeline_text(PLAN) in capsys.readouterr().out
    turns = ["--combined", "--pair-cost", "2.5"]
    assert plot_schedule.main([*turns, "--schedule", "1f1b", "-p", "3", "-m", "4"]) == 0
    assert "makespan 16.5" in capsys.readouterr().out


def test_the_tool_draws_a_plan_above_its_measured_trace(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    measured = Trace("measured", INTERLEAVED.placement, 4, "s", INTERLEAVED.spans)
    trace_path, out = tmp_path / "run.json", tmp_path / "both.svg"
    trace_path.write_text(measured.to_json())
    assert plot_schedule.main(["--measured", str(trace_path), "--out", str(out)]) == 0
    captions = [line for line in out.read_text().splitlines() if "makespan" in line]
    assert "plan: interleaved, p=2, v=2, m=4" in captions[0]
    assert "measured" in captions[-1]
    assert "both.svg" in capsys.readouterr().out


def test_the_tool_explains_an_impossible_plan(capsys):
    assert plot_schedule.main(["-p", "4", "-v", "2", "-m", "8", "--group-size", "2"]) == 2
    assert "too small for 4 pipeline ranks" in capsys.readouterr().err
    assert plot_schedule.main(["--schedule", "gpipe", "-p", "4", "-m", "8", "--combined"]) == 2
    assert "overlapped forwards and backwards in the gpipe" in capsys.readouterr().err
