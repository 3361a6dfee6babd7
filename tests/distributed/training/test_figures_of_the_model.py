"""Figures that the log gives of the whole model are those of one process, in every layout."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.metrics.params_norm import params_norm
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import (
    SEQUENCE,
    VOCABULARY,
    forward_step,
    local_micro_batches,
    transformer_config,
)

DENSE = ModelCase("llama", False, 0.0)
EXPERTS = ModelCase("llama", False, 0.0, experts="deepseek")


def build(config, model, layout, groups):
    """Return a model with more rows of padding the more tensor-parallel ranks there are."""
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, False),
        vocab_size=(VOCABULARY + 3) * layout.tp,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        pg_collection=groups,
    )


def figures(groups, layout, model, wrapper):
    """Take one step; return the gradient's zeros and norm, the weights' norm before and after."""
    rng_state().set_seed(7)
    config = transformer_config(layout, model)
    chunk = build(config, model, layout, groups)
    for name, parameter in chunk.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            first_row = groups.tp.rank() * len(parameter)
            parameter.data[max(VOCABULARY - first_row, 0) :] = 5.0
    ddp = wrapper(config, chunk, groups)
    settings = OptimizerConfig(
        lr=1e-3,
        log_num_zeros_in_grad=True,
        use_distributed_optimizer=ddp.ddp_config.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, [ddp], pg_collection=groups)
    norm = params_norm([ddp], groups)
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    config.no_sync_func = ddp.no_sync
    dp_rank = groups.dp.rank()
    rng_state().begin_step(0, micro_batch_size=1, dp_rank=dp_rank, dp_size=layout.dp)
    get_forward_backward_func(pp_size=1, vp_size=1)(
        forward_step_func=forward_step,
        data_iterator=local_micro_batches(0, layout, dp_rank),
        model=ddp,
        num_microbatches=layout.num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=1,
        forward_only=False,
        pg_collection=groups,
    )
    _, grad_norm, num_zeros = optimizer.step()
    return num_zeros, grad_norm, norm, params_norm([ddp], groups)


def replicate(config, chunk, groups, stage="no_shard", **overlap):
    settings = DistributedDataParallelConfig(data_parallel_sharding_strategy=stage, **overlap)
    return DistributedDataParallel(config, settings, chunk, pg_collection=groups)


def shard(config, chunk, groups):
    return replicate(config, chunk, groups, "optim_grads_params")


def gather_in_forward(config, chunk, groups):
    return replicate(
        config, chunk, groups, "optim", overlap_grad_reduce=True, overlap_param_gather=True
    )


@pytest.mark.parametrize(
    ("layout", "model", "wrapper"),
    [
        (LayoutCase(dp=2), DENSE, gather_in_forward),
        (LayoutCase(tp=2), DENSE, replicate),
        (LayoutCase(tp=2, dp=2), DENSE, shard),
        (LayoutCase(dp=2, ep=2), EXPERTS, replicate),
        (LayoutCase(tp=2, expt_tp=1, ep=2), EXPERTS, replicate),
        (LayoutCase(dp=4, ep=2), EXPERTS, shard),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_zeros_and_norms_count_each_element_of_the_model_once(layout, model, wrapper):
    expected = figures(ProcessGroupCollection.single(), layout.serial, model, replicate)
    results = run_distributed(
        figures, layout.world_size, layout, model, wrapper,
        tp=layout.tp, ep=layout.ep, expt_tp=layout.expt_tp,
    )  # fmt: skip
    assert expected[0] > 0
    for zeros, grad_norm, before, after in results:
        assert zeros == expected[0]
        assert_close(grad_norm, expected[1], FP32_REORDERED_SUM, "norm of the gradient")
        assert_close(before, expected[2], FP32_REORDERED_SUM, "norm of the weights")
        assert_close(after, expected[3], FP32_REORDERED_SUM, "norm of the updated weights")


def initial_weights(groups, layout):
    rng_state().set_seed(7)
    model = ModelCase("llama", True, 0.0)
    config = transformer_config(layout, model)
    config.init_method = config.embedding_init_method = nn.init.xavier_uniform_
    chunk = build(config, model, layout, groups)
    weight = chunk.shared_embedding_or_output_weight().detach()
    first_row = groups.tp.rank() * len(weight)
    return weight[: max(VOCABULARY - first_row, 0)].clone()


def test_an_initialiser_that_reads_the_shape_sees_no_padding_of_the_vocabulary():
    expected = initial_weights(ProcessGroupCollection.single(), LayoutCase())
    parts = run_distributed(initial_weights, 4, LayoutCase(tp=4), tp=4)
    assert_close(torch.cat(parts), expected, EXACT, "embedding")
    bound = math.sqrt(6 / (VOCABULARY + expected.shape[1]))
    assert 0.9 * bound < expected.abs().max() <= bound
