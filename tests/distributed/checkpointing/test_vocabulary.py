"""A vocabulary of another size is refused; of another padding (`test_any_layout`) it is loaded."""

from pathlib import Path

import pytest

from megatron.core.foundation.errors import CheckpointError
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed.checkpointing import gpt_run
from tests.distributed.checkpointing.gpt_run import VOCABULARY, Layout, Model, Run, train_and_save


@pytest.fixture
def checkpoint(ram_path: Path) -> Path:
    train_and_save(ProcessGroupCollection.single(), Layout(), Model(), ram_path, 1)
    return ram_path


def run(monkeypatch, checkpoint: Path, classes: int, **settings) -> Run:
    monkeypatch.setattr(gpt_run, "VOCABULARY", classes)
    return Run(ProcessGroupCollection.single(), Layout(), Model(), load=str(checkpoint), **settings)


@pytest.mark.parametrize("is_finetuning", [False, True])
@pytest.mark.parametrize(
    ("classes", "found", "fix"),
    [
        (VOCABULARY + 1, "are missing", "use the tokenizer of the checkpoint"),
        (VOCABULARY + 40, "are missing", "use the tokenizer of the checkpoint"),
        (VOCABULARY - 1, "are dropped", f"give --vocab-size {VOCABULARY}"),
    ],
)
def test_another_number_of_rows_is_refused(
    monkeypatch, checkpoint, classes: int, found: str, fix: str, is_finetuning: bool
) -> None:
    loading = run(monkeypatch, checkpoint, classes, finetune=is_finetuning)
    with pytest.raises(CheckpointError, match=f"of the vocabulary {found}") as caught:
        loading.load()
    assert fix in str(caught.value)


def test_rows_that_the_user_lets_go_are_told(monkeypatch, checkpoint, capsys) -> None:
    options = {"finetune": True, "dist_ckpt_strictness": "ignore_all"}
    assert run(monkeypatch, checkpoint, VOCABULARY + 40, **options).load()
    first, last = VOCABULARY, VOCABULARY + 39
    assert f"rows {first} to {last} of the vocabulary are missing" in capsys.readouterr().out
