"""The memory report: rows of stages and layouts, and what is left out."""

import pytest

from tools.memory_report import main

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --micro-batch-size 1"
    " --bf16 --vocab-size 128 --mock-data"
)


def rows_of(capsys, *words):
    """Return {(layout, stage): total} and the other lines of a report."""
    assert main([*MODEL.split(), *words]) == 0
    _, *lines = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in lines]
    found = {("".join(c[:7]), int(c[7])): float(c[-1]) for c in cells if c[0].isdigit() and
             len(c) > 9 and c[7].isdigit()}  # fmt: skip
    return found, lines


def test_optimizer_state_is_divided_by_the_replicas_from_stage_1_on(capsys):
    _, lines = rows_of(capsys, "--world-size", "4", "--hidden-size", "1024")
    optimizer = [float(line.split()[10]) for line in lines[:4]]
    assert optimizer[1:] == pytest.approx([optimizer[0] / 4] * 3, rel=0.02)


def test_all_layouts_are_rows_or_named_with_their_reason(capsys):
    found, lines = rows_of(capsys, "--world-size", "2", "--all-layouts", "--num-layers", "1")
    assert {layout for layout, _ in found} == {"1x1x1x2", "2x1x1x1", "1x1x2x1"}
    # One layer cannot be split over two stages.
    assert any(line.startswith("1 x 2 x 1 x 1, stage 0, 1, 2, 3: ") for line in lines)


def test_rows_that_do_not_fit_are_left_out(capsys):
    found, lines = rows_of(capsys, "--world-size", "2", "--fits", "0")
    assert not found and lines == ["nothing fits in 0 GiB"]


def test_an_axis_without_ranks_is_told(capsys):
    assert main([*MODEL.split(), "--world-size", "2", "--tensor-model-parallel-size", "0"]) == 2
    assert "--tensor-model-parallel-size 0" in capsys.readouterr().err
