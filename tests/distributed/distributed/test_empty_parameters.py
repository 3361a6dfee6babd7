"""A parameter without elements trains, is saved and is loaded, as torch trains and stores it."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import dist_checkpointing
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron_lattice import deepspeed
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, assert_close

SAMPLES = torch.linspace(-1, 1, 16).view(4, 4)
ADAM = {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.0}


class Model(nn.Module):
    """An empty parameter among others, and a layer that has no other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.rows = nn.Linear(4, 4), nn.Parameter(torch.zeros(0, 4))
        self.layers = nn.ModuleList([nn.Identity(), nn.Linear(4, 2)])
        self.layers[0].empty = nn.Parameter(torch.zeros(3, 0))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        hidden = self.layers[0](self.first(torch.cat([x, self.rows])))
        return self.layers[1](hidden) + self.layers[0].empty.sum()


def train_serially() -> dict[str, torch.Tensor]:
    """Return the weights after one step of torch's AdamW without clipping."""
    model = Model()
    model(SAMPLES).square().mean().backward()
    torch.optim.AdamW(model.parameters(), **ADAM).step()
    return dict(model.state_dict())


def train_an_engine(groups, directory: Path, stage: int) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": ADAM},
    }
    first, second = (deepspeed.initialize(model=Model(), config=config)[0] for _ in range(2))
    mine = SAMPLES.chunk(2)[dist.get_rank()]
    first.backward(first(mine).square().mean())
    first.step()
    first.save_checkpoint(str(directory))
    second.load_checkpoint(str(directory))
    for engine in (first, second):
        assert_same(engine.state_dict())
    first.save_16bit_model(str(directory))
    second.backward(second(mine).square().mean())
    second.step()


def train_with_fsdp2(groups, directory: Path, _: int) -> None:
    def start():
        chunk = TorchFullyShardedDataParallel(
            None, DistributedDataParallelConfig(), Model(), pg_collection=groups
        )
        config = OptimizerConfig(lr=1e-2, adam_eps=1e-5, weight_decay=0.0, clip_grad=0.0)
        return chunk, get_megatron_optimizer(config, [chunk], pg_collection=groups)

    chunk, optimizer = start()
    chunk.zero_grad_buffer()
    chunk(SAMPLES.chunk(2)[dist.get_rank()]).square().mean().backward()
    finalize_model_grads([chunk], pg_collection=groups)
    optimizer.step()
    declared = chunk.sharded_state_dict()
    state = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    dist_checkpointing.save(state, directory / "c")
    other, optimizer = start()
    declared = other.sharded_state_dict()
    state = {"model": declared, "optimizer": optimizer.sharded_state_dict(declared)}
    other.load_state_dict(dist_checkpointing.load(copy.copy(state), directory / "c")["model"])
    for each in (chunk, other):
        assert_same(each.state_dict())


def assert_same(state: dict[str, torch.Tensor]) -> None:
    expected = train_serially()
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        assert state[name].shape == weight.shape
        assert_close(state[name], weight, FP32_AFTER_OPTIMIZER, what=name)


@pytest.mark.parametrize(
    ("train", "stage"), [*((train_an_engine, n) for n in range(4)), (train_with_fsdp2, 0)]
)
def test_a_parameter_without_elements_trains_and_is_stored(train, stage, tmp_path: Path) -> None:
    run_distributed(train, 2, tmp_path, stage)
