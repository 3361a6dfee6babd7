"""A tiny run to checkpoint: two layers, no optimizer, values that tell which save they are from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing import Checkpointer, CheckpointSettings, RunParts
from megatron.training.state import TrainState


class TinyModel(nn.Module):
    """Two parameters and a buffer, all filled with one value."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.second = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.register_buffer("seen", torch.zeros(2))
        self.fill(value)

    def fill(self, value: float) -> None:
        """Set every tensor to `value`."""
        with torch.no_grad():
            for tensor in self.state_dict().values():
                tensor.fill_(value)

    def value(self) -> float:
        """Return the one value, which must be the same everywhere."""
        (value,) = {float(x) for t in self.state_dict().values() for x in t.flatten()}
        return value


def checkpointer(
    directory: Path | str, model: nn.Module, *, peers: Any = None, **settings: Any
) -> Checkpointer:
    """Return a checkpointer that saves to and loads from one directory."""
    parts = RunParts(model=[model], groups=ProcessGroupCollection.single(), args={"lr": 0.1})
    both = {"save": str(directory), "load": str(directory)} | settings
    return Checkpointer(CheckpointSettings(**both), parts, process_group=peers)


def save(directory: Path | str, iteration: int, **settings: Any) -> None:
    """Save a model whose values equal the iteration."""
    saver = checkpointer(directory, TinyModel(float(iteration)), **settings)
    try:
        saver.save(TrainState(iteration=iteration, consumed_train_samples=4 * iteration))
    finally:
        saver.close()


def load(directory: Path | str, **settings: Any) -> int | None:
    """Load, check that all of it is from one save, and return the iteration; None if nothing."""
    model = TinyModel(-1.0)
    restored = checkpointer(directory, model, **settings).load()
    if restored is None:
        assert model.value() == -1.0
        return None
    assert model.value() == restored.progress.iteration
    assert restored.progress.consumed_train_samples == 4 * restored.progress.iteration
    return restored.progress.iteration
