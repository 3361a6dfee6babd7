"""Stopping and going on changes no bit: of the state, of any loss."""

from pathlib import Path

import pytest

from tests.distributed.checkpointing.gpt_run import Layout, Model, resume_and_train
from tests.harness.distributed import run_distributed
from tools.checkpoint.state_digest import checkpoint_digest

CASES = [
    (Layout(), Model(dtype="fp16"), [1, 2, 1]),  # with skipped steps: the loss scale is state
    (Layout(tp=2, sp=True), Model(is_llama=False), [1, 3]),
    (Layout(pp=2), Model(is_tied=False), [3, 1]),
    (Layout(pp=2, vp=2), Model(), [2, 2]),
    (Layout(dp=2, zero=1), Model(dtype="bf16"), [3, 1]),
    (Layout(tp=2, dp=2), Model(dtype="bf16"), [1, 1, 2]),
]


@pytest.mark.parametrize(("layout", "model", "stops"), CASES, ids=str)
def test_any_number_of_stops_is_bit_identical_to_none(
    layout: Layout, model: Model, stops: list[int], ram_path: Path
) -> None:
    def run(name: str, pieces: list[int], is_async: bool = False) -> list:
        arguments = (layout, model, ram_path / name, pieces, is_async)
        return run_distributed(resume_and_train, layout.size, *arguments, **layout.axes())

    total = sum(stops)
    unbroken = run("unbroken", [total])
    assert run("stopped", stops) == unbroken
    last = f"iter_{total:07d}"
    digest = checkpoint_digest(ram_path / "unbroken" / last)
    assert checkpoint_digest(ram_path / "stopped" / last) == digest
    if layout.size <= 2:
        assert run("asynchronous", stops, True) == unbroken
        assert checkpoint_digest(ram_path / "asynchronous" / last) == digest
