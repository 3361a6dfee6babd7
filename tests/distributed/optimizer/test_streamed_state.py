"""Optimizer state in host memory and in files: the bits of state on the device, in any layout."""

import math
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import OptimizerConfig, chunked_state_optimizer, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.resilience.replica_check import ReplicaCheck
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    Run,
    load_each_and_save_again,
    resume_and_train,
    train_and_save,
)
from tests.distributed.distributed.replicas import wrap
from tests.distributed.optimizer.state_bytes import TOLERANCE
from tests.distributed.optimizer.state_bytes import Wide as Stack
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, assert_close

NUM_STEPS = 3


def weights_of(run: Run) -> list[torch.Tensor]:
    return [p.detach().clone() for chunk in run.chunks for p in chunk.module.parameters()]


def check_places(groups, layout: Layout, model: Model, rule: str, directory: Path) -> None:
    """Train with state on the device, in memory and in a file, and compare all bits."""
    # Chunks of two blocks, so that parameters are cut and buffers are used again and again.
    usual, chunked_state_optimizer.CHUNK_BLOCKS = chunked_state_optimizer.CHUNK_BLOCKS, 2
    try:
        chosen = {"optimizer": rule, "initial_loss_scale": 2.0**10}
        plain = Run(groups, layout, model, optimizer=chosen)
        plain.train(NUM_STEPS)
        overlap = {"overlap_cpu_optimizer_d2h_h2d": layout.zero >= 2}
        for place, ddp in (
            ({"optimizer_cpu_offload": True}, overlap),
            ({"optimizer_offload_path": str(directory)}, {}),
            ({"optimizer_offload_path": str(directory), "optimizer_offload_fraction": 0.4}, {}),
        ):
            run = Run(groups, layout, model, optimizer=chosen | place, ddp=ddp)
            run.train(NUM_STEPS)
            assert all(math.isfinite(norm) for norm in run.norms)
            assert (run.losses, run.norms) == (plain.losses, plain.norms), place
            for ours, theirs in zip(weights_of(run), weights_of(plain), strict=True):
                assert_close(ours, theirs, EXACT, f"weight {place}")
    finally:
        chunked_state_optimizer.CHUNK_BLOCKS = usual


CASES = [
    (Layout(), "fp32", "adam"),
    (Layout(dp=2, zero=1), "bf16", "adam"),
    (Layout(dp=2, zero=2), "fp32", "lion"),
    (Layout(pp=2, dp=2, zero=2), "fp16", "adam"),
    (Layout(dp=2, zero=3), "bf16", "adam"),
    (Layout(tp=2, pp=2), "bf16", "sgd"),
    (Layout(dp=2), "fp16", "adam"),
]


@pytest.mark.parametrize(("layout", "dtype", "rule"), CASES, ids=str)
def test_the_place_of_state_changes_no_bit(layout: Layout, dtype: str, rule: str, tmp_path) -> None:
    arguments = (layout, Model(dtype=dtype), rule, tmp_path)
    run_distributed(check_places, layout.size, *arguments, **layout.axes())


def host_bytes(groups, stage: int) -> tuple[int, int]:
    """Return (parameters, bytes of a rank's gradients and optimizer state) after a step."""
    strategy = SHARDING_STRATEGIES[stage]
    overlap = {"overlap_cpu_optimizer_d2h_h2d": True}
    ddp = wrap(
        groups,
        model=Stack(512, 4, torch.bfloat16),
        grad_reduce_in_fp32=True,
        data_parallel_sharding_strategy=strategy,
        **overlap,
    )
    config = OptimizerConfig(
        bf16=True, optimizer_cpu_offload=True, use_distributed_optimizer=True, **overlap
    )
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    ddp.zero_grad_buffer()
    ddp(torch.ones(3, 512, dtype=torch.bfloat16)).float().sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    held = [owned for buffer in ddp.gradient_buffers for owned in buffer.owned_gradients()]
    for part in optimizer.optimizer.parts:
        held += [part.store.column(number) for number, _ in enumerate(part.fields)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    return sum(p.numel() for p in ddp.module.parameters()), sum(storages.values())


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_and_state_in_host_memory_take_sixteen_bytes_a_parameter(stage: int) -> None:
    """fp32: the gradient, the main weight and two moments."""
    for num_parameters, held in run_distributed(host_bytes, 2, stage):
        assert held == pytest.approx(16 * num_parameters / 2, rel=TOLERANCE)


COMPACT: dict[str, Any] = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": torch.uint8,
    "exp_avg_sq_dtype": torch.float16,
}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_stopped_run_goes_on_to_the_bit_in_few_bytes_and_in_a_file(dtype: str, tmp_path) -> None:
    model, steps = Model(dtype=dtype), [2, 2]
    settings = COMPACT | {"optimizer_offload_path": str(tmp_path)}
    losses = {}
    for zero in (0, 1):
        for name, stops in (("stopped", steps), ("unbroken", [sum(steps)])):
            layout, directory = Layout(dp=2, zero=zero), tmp_path / f"{name}{zero}"
            losses[zero, name] = run_distributed(
                resume_and_train, 2, layout, model, directory, stops, False, settings
            )
    # Random rounding belongs to the element, so sharding does not change it either.
    assert len({str(found) for found in losses.values()}) == 1


def check_tied_copies(groups, layout: Layout, dtype: str) -> None:
    run = Run(groups, layout, Model(dtype=dtype), optimizer=COMPACT)
    run.train(NUM_STEPS)
    ReplicaCheck(run.chunks, run.optimizer, groups).compare(NUM_STEPS)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, dp=2, zero=2)], ids=str)
def test_a_tied_weight_is_rounded_alike_on_both_of_its_stages(layout: Layout) -> None:
    run_distributed(check_tied_copies, layout.size, layout, "bf16", **layout.axes())


def test_a_checkpoint_of_one_place_is_loaded_by_another(tmp_path) -> None:
    """fp32 state goes to a file in another layout and comes back unchanged."""
    model = Model(dtype="bf16")
    run_distributed(train_and_save, 1, Layout(), model, tmp_path / "device", 2)
    away = Layout(dp=2, zero=1)
    settings = {"optimizer_offload_path": str(tmp_path)}
    pair = [(tmp_path / "device", tmp_path / "file")]
    run_distributed(load_each_and_save_again, 2, away, model, pair, settings)
    pair = [(tmp_path / "file", tmp_path / "back")]
    run_distributed(load_each_and_save_again, 1, Layout(), model, pair)
    expected, found = (
        run_distributed(states_of, 1, model, tmp_path / name)[0] for name in ("device", "back")
    )
    for name, tensor in expected.items():
        assert_close(found[name], tensor, EXACT, name)


def states_of(groups, model: Model, directory: Path) -> dict[str, torch.Tensor]:
    """Return all optimizer state of a checkpoint."""
    run = Run(groups, Layout(), model, load=str(directory))
    assert run.load() is not None
    return {
        f"{item.shard.name} {name}": tensor.clone()
        for item in run.optimizer.shards
        for name, tensor in [
            *run.optimizer.state[item.main_param].items(),
            ("main", item.main_param.detach()),
        ]
    }


SINGLE = ProcessGroupCollection.single()
MIB = 2**20


class Wide(nn.Module):
    """16 million weights in one matrix: 64 MiB, as much in gradients, twice that in moments."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(4096, 4096, bias=False)
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(4096, 4096, generator=generator) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def data_bytes() -> int:
    """Return the private writable memory of this process: what RLIMIT_DATA limits."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def train_in_little_memory(_, settings: dict[str, Any], spare: int | None) -> Any:
    """Train three steps with `spare` bytes beside weights and gradients; return the weights."""
    torch.set_num_threads(1)
    ddp = wrap(SINGLE, model=Wide())
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    if spare is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + spare, limits[1]))
    try:
        config = OptimizerConfig(lr=1e-3, clip_grad=0.0, **settings)
        optimizer = get_megatron_optimizer(config, [ddp], pg_collection=SINGLE)
        for step in range(3):
            ddp.zero_grad_buffer()
            inputs = torch.randn(4, 4096, generator=torch.Generator().manual_seed(step))
            ddp(inputs).backward()
            ddp.finish_grad_sync()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    return ddp.module.layer.weight.detach().clone()


def test_a_model_whose_state_does_not_fit_trains_from_a_file(tmp_path) -> None:
    """Moments take 128 MiB; 110 are allowed: 64 for a gradient on its way to the buffer, and the
    chunks and threads of the file."""
    spare = 110 * MIB
    in_file = {"optimizer_offload_path": str(tmp_path)}
    expected = run_distributed(train_in_little_memory, 1, {}, None)[0]
    refused = run_distributed(train_in_little_memory, 1, {}, spare)[0]
    assert isinstance(refused, str) and "allocate memory" in refused
    found = run_distributed(train_in_little_memory, 1, in_file, spare)[0]
    assert isinstance(found, torch.Tensor), found
    assert_close(found, expected, EXACT, "weights")


def test_too_little_host_memory_is_refused_with_the_numbers(monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.offload.state_stores.available_host_bytes", lambda: 10_000)
    with pytest.raises(ConfigError, match=r"needs \d+ MiB per rank.*left"):
        train_in_little_memory(None, {"optimizer_cpu_offload": True}, None)


def offload_where_one_rank_has_no_directory(groups, directory: Path) -> str:
    path = directory if groups.dp.rank() == 0 else directory / "missing"
    config = OptimizerConfig(lr=1.0, optimizer_offload_path=str(path))
    with pytest.raises(ConfigError) as caught:
        get_megatron_optimizer(config, [wrap(groups)], pg_collection=groups)
    return str(caught.value)


def test_a_directory_that_one_rank_misses_stops_all(tmp_path) -> None:
    first, second = run_distributed(offload_where_one_rank_has_no_directory, 2, tmp_path)
    assert "missing: No such file" in first and "rank 1" in first
    assert "missing: No such file" in second
    assert os.listdir(tmp_path) == []
