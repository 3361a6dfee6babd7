"""Weights are gathered in FP8, and training computes the same numbers as with bf16 gathers."""

from collections import Counter
from unittest import mock

import pytest
import torch

from megatron.core.distributed.zero import gathered_params
from megatron.core.distributed.zero.gathered_params import GatheredParams, QuantizedParams
from megatron.core.foundation.errors import ConfigError
from tests.distributed.checkpointing.gpt_run import Layout, Model, Run, resume_and_train
from tests.harness.distributed import run_distributed

NUM_STEPS = 3
FP8_GATHER = {"fp8_param_gather": True}
UNCLIPPED = {"clip_grad": 0.0}
"""The norm is summed buffer by buffer, and rounded weights are in one of their own."""


def trained(groups, layout, model, ddp):
    """Return losses, main weights, and the bytes gathered in a step by kind of buffer."""
    num_bytes = Counter()
    gather = gathered_params.gather_parameters

    def counting(bucket, mesh, **options):
        num_bytes[bucket.dtype] += bucket.nbytes
        return gather(bucket, mesh, **options)

    with (
        mock.patch.object(gathered_params, "gather_parameters", counting),
    ):
        run = Run(groups, layout, model, optimizer=UNCLIPPED, ddp=ddp)
        run.train(NUM_STEPS)
    (chunk,) = run.chunks
    kinds = {type(buffer.params) for buffer in chunk.gradient_buffers}
    rounded = sum(b.flat.plan.numel for b in chunk.gradient_buffers if b.flat.quantized)
    main = Counter()
    for item in run.optimizer.shards:  # a weight may be in several buckets
        main[item.shard.name] += item.main_param.detach().double().sum().item()
    of_a_step = {dtype: total // NUM_STEPS for dtype, total in num_bytes.items()}
    return run.losses, _whole(main), of_a_step, rounded, kinds


def _whole(main):
    """Return a number for each weight that any change of its pieces would change."""
    whole = Counter()
    for of_rank in _gathered(main):
        whole.update(of_rank)
    return dict(whole)


def _gathered(value):
    found = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


@pytest.mark.parametrize(
    ("layout", "recipe", "experts"),
    [
        (Layout(dp=2, zero=1), "tensorwise", 0),
        (Layout(tp=2, dp=2, sp=True, zero=2), "delayed", 0),
        (Layout(dp=4, ep=2, zero=1), "delayed", 4),
    ],
)
def test_one_byte_travels_per_element_and_nothing_else_changes(layout, recipe, experts):
    model = Model(dtype="bf16", fp8="hybrid", recipe=recipe, experts=experts, dropout=0.0)
    plain, few = (
        run_distributed(trained, layout.size, layout, model, ddp, **layout.axes())
        for ddp in ({}, FP8_GATHER)
    )
    for (losses, main, *_), (same_losses, same_main, num_bytes, rounded, kinds) in zip(
        plain, few, strict=True
    ):
        assert same_losses == losses
        assert same_main == pytest.approx(main, rel=1e-12, abs=1e-12)
        assert num_bytes[torch.uint8] == rounded > 0
        assert kinds == {GatheredParams, QuantizedParams}
    assert few[0][2][torch.bfloat16] < plain[0][2][torch.bfloat16]


def test_recipes_that_round_a_weight_by_blocks_gather_it_as_it_is():
    model = Model(dtype="bf16", fp8="hybrid", recipe="mxfp8", dropout=0.0)
    layout = Layout(dp=2, zero=1)
    for *_, kinds in run_distributed(trained, 2, layout, model, FP8_GATHER, **layout.axes()):
        assert kinds == {GatheredParams}


def test_a_run_that_goes_on_in_another_layout_is_the_same_run(ram_path):
    # By delayed scaling, whose histories hold what unrounded weights were.
    model = Model(dtype="bf16", fp8="hybrid", recipe="delayed", dropout=0.0)
    found = {}
    for name, ddp in (("plain", {}), ("FP8", FP8_GATHER)):
        for layout, stops in ((Layout(dp=2, zero=2), [2]), (Layout(tp=2, dp=2, zero=1), [1, 1])):
            found[name, layout] = run_distributed(
                resume_and_train, layout.size, layout, model, ram_path / name, stops,
                False, UNCLIPPED, ddp, **layout.axes(),
            )  # fmt: skip
    for (name, layout), losses in found.items():
        assert losses == found["plain", layout], name


def refused(groups):
    state = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
    with pytest.raises(ConfigError, match="fp8_param_gather with optimizer state that completes"):
        Run(groups, Layout(dp=2, zero=1), Model(dtype="bf16", fp8="hybrid"), optimizer=state,
            ddp=FP8_GATHER)  # fmt: skip


def test_state_that_completes_the_weights_of_the_model_is_refused():
    run_distributed(refused, 2)
