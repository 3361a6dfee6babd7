"""State in few bytes trains as state in fp32 does, within bounds, and takes what the table says."""

from typing import Any

import pytest
import torch

from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.chunked_state_optimizer import state_fields
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_lattice.planner.run_workload import state_bytes
from tests.distributed.distributed.replicas import accumulate, wrap
from tests.harness.tolerances import EXACT, assert_close

SINGLE = ProcessGroupCollection.single()
FP32, BF16, FP16, FP8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8


def compact(first: torch.dtype, second: torch.dtype, main: torch.dtype = FP32) -> dict[str, Any]:
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": first,
        "exp_avg_sq_dtype": second,
        "main_params_dtype": main,
    }


def train(dtype: torch.dtype, num_steps: int, **settings: Any) -> tuple[list[float], dict]:
    ddp = wrap(SINGLE, dtype=dtype, grad_reduce_in_fp32=True)
    config = OptimizerConfig(lr=3e-3, clip_grad=1.0, bf16=dtype == BF16, **settings)
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=SINGLE)
    losses = []
    for step in range(num_steps):
        losses.append(accumulate(ddp, SINGLE, step % 2, 1))
        assert optimizer.step()[0]
    return losses, ddp.state_dict()


def test_fp32_state_is_the_plain_optimizer_to_the_bit():
    for update in ("adam", "sgd", "lion"):
        plain, ours = (
            train(FP32, 5, optimizer=update, **settings) for settings in ({}, compact(FP32, FP32))
        )
        assert ours[0] == plain[0]
        for name, tensor in plain[1].items():
            assert_close(ours[1][name], tensor, EXACT, f"{update} {name}")


@pytest.fixture(scope="module")
def plain():
    """Forty steps of AdamW on two batches, by the dtype of the model."""
    return {dtype: train(dtype, 40)[0] for dtype in (FP32, BF16)}


@pytest.mark.parametrize(
    ("model", "first", "second", "main", "bound"),
    [
        (FP32, BF16, BF16, FP32, 0.01),
        (FP32, FP16, FP16, FP32, 0.01),
        (FP32, FP8, FP8, FP32, 0.05),
        (BF16, FP32, FP32, FP32, 0.01),
        (BF16, BF16, BF16, FP32, 0.02),
        (BF16, FP8, FP16, FP32, 0.05),
        (BF16, FP16, FP16, FP16, 0.03),
    ],
)
def test_the_loss_falls_as_with_fp32_state(model, first, second, main, bound, plain):
    """Each rounding moves an update by at most the spacing of its type, in either direction."""
    losses = train(model, 40, **compact(first, second, main))[0]
    expected = plain[model]
    fallen = expected[0] - expected[-1]
    assert fallen > 1.0
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert worst <= bound * fallen, worst / fallen


BYTES = [
    (FP32, {}, 8.0),
    (BF16, {}, 12.0),
    (FP32, compact(BF16, BF16), 4.0),
    (BF16, compact(FP32, FP32), 10.0),
    (BF16, compact(BF16, BF16), 6.0),
    (BF16, compact(FP8, FP16), 5.0625),
    (BF16, compact(FP8, FP8), 4.0625),
    (BF16, compact(FP16, FP16, FP16), 6.09375),
]


@pytest.mark.parametrize(("model", "settings", "expected"), BYTES)
def test_bytes_per_parameter_are_those_of_the_table(model, settings, expected):
    config = OptimizerConfig(bf16=model == BF16, **settings)
    update = OPTIMIZERS["adam"].elementwise(config)
    fields = state_fields(update, config, model, keeps_main=model != FP32)
    assert sum(field.codec.block_bytes for field in fields) / BLOCK == expected
    precision = HalfPrecision(bf16=model == BF16)
    state = state_bytes(config, precision, grads_in_fp32=True)
    estimate = state.main + state.moments
    assert estimate == expected


def test_what_does_not_go_together_is_refused_in_one_message():
    with pytest.raises(ConfigError) as caught:
        OptimizerConfig(
            optimizer="muon",
            exp_avg_dtype=BF16,
            exp_avg_sq_dtype=torch.float64,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=1.5,
        )
    message = str(caught.value)
    for part in ("4 problems", "without use_precision_aware", "float64", "offloaded", "=1.5"):
        assert part in message


def test_a_rule_whose_elements_depend_on_each_other_has_no_state_in_low_precision():
    config = OptimizerConfig(**compact(BF16, BF16))
    with pytest.raises(ConfigError, match="muon with optimizer state in low precision"):
        OPTIMIZERS["muon"].elementwise(config)
