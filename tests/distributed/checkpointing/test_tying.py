"""A tied model becomes one with a head of its own; the way back is refused."""

from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import load_plain_tensors
from megatron.core.foundation.errors import CheckpointError
from megatron.training.checkpointing.restore import EMBEDDING, HEAD, is_head
from tests.distributed.checkpointing.gpt_run import (
    VOCABULARY,
    Layout,
    Model,
    Run,
    load_each_and_save_again,
    resume_and_train,
    train_and_save,
)
from tests.distributed.checkpointing.gpt_run import run_in_layout as run


def refusal(groups, layout: Layout, model: Model, directory: Path, strictness: str) -> str:
    """Load and return the error's text."""
    loading = Run(
        groups, layout, model, seed=1, load=str(directory), dist_ckpt_strictness=strictness
    )
    try:
        loading.load()
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_untied_head_begins_as_the_embedding_it_was_tied_to(dtype: str, ram_path: Path) -> None:
    tied, untied = Model(dtype=dtype), Model(is_tied=False)
    layouts = [Layout(pp=2), Layout(tp=2, sp=True)]
    run(train_and_save, layouts[0], tied, ram_path / "tied", 2)
    work = [(ram_path / "tied", ram_path / "untied")]
    run(load_each_and_save_again, layouts[1], untied, work)
    before = load_plain_tensors(ram_path / "tied" / "iter_0000002")
    after = load_plain_tensors(ram_path / "untied" / "iter_0000002")
    heads = [key for key in after if is_head(key)]
    assert len(heads) == 3, heads  # weight and two moments
    for key in heads:
        copied = after[key.removesuffix(HEAD) + EMBEDDING]
        assert torch.equal(after[key][:VOCABULARY], copied[:VOCABULARY]), key
    main = before.get(f"optimizer.state.fp32_param.{EMBEDDING}", before[EMBEDDING])
    assert torch.equal(after[HEAD][:VOCABULARY], main[:VOCABULARY].float())
    # The function is the same, so the first loss is; then the two go their own ways.
    if dtype == "fp32":
        losses = []
        for model, name in ((tied, "tied"), (untied, "untied")):
            result = run(resume_and_train, Layout(), model, ram_path / name, [2])[0]
            losses.append(result)
        assert losses[0][:4] == pytest.approx(losses[1][:4], rel=1e-6)
        assert losses[0][4:] != losses[1][4:]


def test_a_stored_head_is_not_dropped_silently(ram_path: Path) -> None:
    run(train_and_save, Layout(), Model(is_tied=False), ram_path, 1)
    for layout in (Layout(), Layout(pp=2)):
        for message in run(refusal, layout, Model(), ram_path, "assume_ok_unexpected"):
            assert "contains a separate head (output_layer.weight)" in message
            assert "--untie-embeddings-and-output-weights" in message
    assert run(refusal, Layout(pp=2), Model(), ram_path, "ignore_all") == ["", ""]
