"""A run that saves to a URL and continues from it."""

from pathlib import Path

from tests.harness.distributed import run_distributed
from tests.parity.resume import CASES, words_of
from tests.parity.training_run import read_metrics, train_with_flags


def test_a_run_of_two_ranks_goes_on_from_an_object_store(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case.name == "tp 2")
    url, metrics = f"file://{tmp_path}/store/run", tmp_path / "steps.jsonl"
    words = [*words_of(case, 4), "--save", url, "--load", url, "--metrics-jsonl", str(metrics)]
    words += ["--log-progress"]
    for more in (["--exit-interval", "2"], ["--exit-on-missing-checkpoint"]):
        run_distributed(train_with_flags, 2, [*words, *more], tp=2)
    assert [line["iteration"] for line in read_metrics(metrics)] == [1, 2, 3, 4]
    saved = {path.name for path in (tmp_path / "store" / "run").iterdir()}
    assert saved == {"iter_0000002", "iter_0000004", "latest_checkpointed_iteration.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"store", "steps.jsonl"}
