"""Files as people write them: each loads, or is refused for the right reason."""

from pathlib import Path

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.deepspeed.settings import (
    data_parallel_config,
    engine_settings,
    optimizer_config,
)

FILES = Path(__file__).parents[2] / "fixtures" / "deepspeed"
REPLICAS = 4


def load(name, **options):
    return engine_settings(FILES / name, replicas=REPLICAS, **options)


@pytest.mark.parametrize(
    ("name", "stage", "dtype", "batch"),
    [
        ("zero0_fp32.json", "no_shard", torch.float32, (32, 8, 1)),
        ("zero1_bf16.json", "optim", torch.bfloat16, (128, 4, 8)),
        ("zero2_fp16.json", "optim_grads", torch.float16, (64, 8, 2)),
        ("zero2_offload_cpu.json", "optim_grads", torch.bfloat16, (32, 2, 4)),
        ("zero3_all_auto.json", "optim_grads_params", torch.float32, (4, 1, 1)),
        ("cycle_sgd.json", "optim", torch.float32, (128, 16, 2)),
    ],
)
def test_file_becomes_settings(name, stage, dtype, batch):
    settings = load(name)
    assert data_parallel_config(settings).data_parallel_sharding_strategy == stage
    assert settings.dtype == dtype
    sizes = settings.batch
    assert (sizes.train, sizes.micro, sizes.accumulation) == batch
    assert optimizer_config(settings).use_distributed_optimizer == (stage != "no_shard")


def test_fp16_settings_are_those_of_the_file():
    config = optimizer_config(load("zero2_fp16.json"))
    assert config.fp16 and config.loss_scale is None
    assert (config.initial_loss_scale, config.loss_scale_window) == (2.0**15, 500)
    assert config.on_loss_scale_floor == "raise"


def test_offload_goes_to_the_host():
    config = optimizer_config(load("zero2_offload_cpu.json"))
    assert config.optimizer_cpu_offload and config.optimizer_offload_fraction == 1.0


def test_nvme_needs_its_directory(tmp_path):
    with pytest.raises(ConfigError, match="no directory '/local_nvme'"):
        load("zero3_offload_nvme.json")
    text = (FILES / "zero3_offload_nvme.json").read_text()
    mine = tmp_path / "ds.json"
    mine.write_text(text.replace("/local_nvme", str(tmp_path)))
    config = optimizer_config(engine_settings(mine, replicas=REPLICAS))
    assert config.optimizer_offload_path == str(tmp_path)


def test_parameters_go_to_the_host_or_to_a_file_at_stage_3(tmp_path):
    assert data_parallel_config(load("zero3_offload_parameters.json")).param_cpu_offload
    text = (FILES / "zero3_offload_parameters.json").read_text()
    mine = tmp_path / "ds.json"
    offload = f'"offload_param": {{"device": "nvme", "nvme_path": "{tmp_path}"'
    mine.write_text(text.replace('"offload_param": {"device": "cpu"', offload))
    settings = engine_settings(mine, replicas=REPLICAS)
    assert data_parallel_config(settings).param_offload_path == str(tmp_path)
    mine.write_text(mine.read_text().replace('"stage": 3', '"stage": 2'))
    with pytest.raises(ConfigError, match="offload_param at stage 2"):
        engine_settings(mine, replicas=REPLICAS)


def test_auto_is_resolved_and_reported():
    settings = load("zero3_all_auto.json", model_dtype=torch.bfloat16)
    assert settings.dtype == torch.bfloat16
    lines = settings.describe().split("\n")
    assert 'bf16.enabled: "auto" -> True (the dtype of the model)' in lines
    assert 'gradient_clipping: "auto" -> 1.0 (the default)' in lines
    assert 'optimizer.params.lr: "auto" -> 0.001 (the default of its type)' in lines
    assert any(line.startswith("train_batch_size") or "4 = 1 x 1 x 4" in line for line in lines)
    assert any("stage3_max_live_parameters has no effect here" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("zero3_decay_without_length.json", ['total_num_steps is missing ("auto")']),
        (
            "onebit_adam.json",
            [
                "3 problems",
                "did you mean gradient_clipping?",
                "did you mean offload_optimizer?",
                "zero_quantized_gradients",
            ],
        ),
    ],
)
def test_file_is_refused_with_every_reason(name, messages):
    with pytest.raises(ConfigError) as raised:
        load(name)
    for message in messages:
        assert message in str(raised.value)
