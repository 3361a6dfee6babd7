"""A GPT in pipeline stages with sharded gradients trains as it does in one process."""

from functools import partial

import pytest

from megatron.core.distributed import DistributedDataParallelConfig
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, FP32_REORDERED_SUM, assert_close
from tests.parity import training_case
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import assemble


def train_with_sharded_gradients(groups, layout, model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            training_case,
            "DistributedDataParallelConfig",
            partial(DistributedDataParallelConfig, data_parallel_sharding_strategy="optim_grads"),
        )
        return training_case.train(groups, layout, model)


@pytest.mark.distributed
def test_zero_2_with_virtual_pipeline_stages_and_a_tied_head_equals_one_process():
    model, layout = ModelCase("llama", True, 0.1), LayoutCase(pp=2, vp=2, dp=2, zero=True)
    serial = assemble(run_distributed(training_case.train, 1, LayoutCase(), model))
    reports = run_distributed(
        train_with_sharded_gradients, layout.world_size, layout, model, pp=layout.pp, vp=layout.vp
    )
    sharded = assemble(reports)
    for step, (norm, expected) in enumerate(
        zip(sharded.grad_norms, serial.grad_norms, strict=True)
    ):
        assert_close(norm, expected, FP32_REORDERED_SUM, f"gradient norm of step {step}")
    for name, expected in serial.weights.items():
        assert_close(sharded.weights[name], expected, FP32_AFTER_OPTIMIZER, name)
