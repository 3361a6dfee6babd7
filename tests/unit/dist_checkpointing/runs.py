"""A tiny run to checkpoint: two layers, no optimizer, values that tell which save they are from."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.checkpointing import CheckpointContext, Checkpointer, CheckpointSettings
from megatron.training.run.state import TrainState


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
    directory: Path | str,
    model: nn.Module,
    *,
    peers: Any = None,
    groups: ProcessGroupCollection | None = None,
    **settings: Any,
) -> Checkpointer:
    """Return a checkpointer that saves to and loads from one directory.

    Args:
        groups: where the ranks of a process group hold replicas of the model.
    """
    groups = groups or ProcessGroupCollection.single()
    parts = CheckpointContext(model=[model], groups=groups, args={"lr": 0.1})
    both = {"save": str(directory), "load": str(directory)} | settings
    return Checkpointer(CheckpointSettings(**both), parts, process_group=peers)


SAVES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "a first save": ((), 10, {}),
    "a later save": ((5,), 10, {}),
    "a save of the same iteration": ((10,), 10, {}),
    "a save that retires old ones": ((3, 5), 10, {"save_retain_interval": 10}),
}
"""What a save may meet: iterations that are there, the one that is saved, settings."""


def prepare(root: Path, iterations: tuple[int, ...]) -> Path:
    """Make a save directory with these checkpoints and the leftover of a dead run."""
    root.mkdir()
    directory = root / "run"
    for iteration in iterations:
        save(directory, iteration)
    (directory / "iter_0000007.tmp-0badcafe").mkdir(parents=True)
    (directory / "iter_0000007.tmp-0badcafe" / "__0_0.safetensors").write_bytes(b"half")
    return directory


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
    assert model.value() == restored.train_state.iteration
    assert restored.train_state.consumed_train_samples == 4 * restored.train_state.iteration
    return restored.train_state.iteration
