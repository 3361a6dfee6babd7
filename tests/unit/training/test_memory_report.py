"""The memory report: rows of stages and layouts, and what is left out."""

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


def test_every_stage_holds_less_between_steps(capsys):
    _, lines = rows_of(capsys, "--world-size", "4", "--hidden-size", "1024")
    states = [sum(map(float, line.split()[8:12])) for line in lines[:4]]
    assert states == sorted(states, reverse=True) and states[3] < 0.3 * states[0]


def test_all_layouts_are_rows_or_named_with_their_reason(capsys):
    found, lines = rows_of(capsys, "--world-size", "4", "--all-layouts")
    assert {"1x1x1x4", "2x1x1x2", "1x2x1x2", "2x2x1x1"} <= {layout for layout, _ in found}
    # Two heads cannot be split over four ranks.
    assert any(line.startswith("4 x 1 x 1 x 1, stage 0, 1, 2, 3: ") for line in lines)


def test_rows_that_do_not_fit_are_left_out(capsys):
    found, lines = rows_of(capsys, "--world-size", "2", "--fits", "0")
    assert not found and lines == ["nothing fits in 0 GiB"]


def test_a_mistake_in_the_flags_is_told(capsys):
    assert main(["--no-such-flag"]) == 2
    assert "unknown flag --no-such-flag" in capsys.readouterr().err


def test_an_axis_without_ranks_is_told(capsys):
    assert main([*MODEL.split(), "--world-size", "2", "--tensor-model-parallel-size", "0"]) == 2
    assert "--tensor-model-parallel-size 0" in capsys.readouterr().err
