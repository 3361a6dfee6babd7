"""ZeRO-3: parameters are whole only while their unit computes, and no result changes."""

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
import torch

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.zero.sharded_params import HostShards
from megatron.core.foundation.errors import ConfigError
from megatron.core.offload.device_copies import ThreadCopies
from megatron.core.parameters.initialization import has_memory, parameters_without_memory
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.context import WeightGradient
from megatron.core.step_context.deferred_wgrad import (
    capture_wgrads,
    enable_wgrad_deferral,
)
from megatron.core.step_context.overlap import overlap_forward_backward, yield_to_peer
from megatron.training.metrics.params_norm import params_norm
from tests.harness.distributed import distributed
from tests.harness.tolerances import EXACT, FP32_AFTER_OPTIMIZER, FP32_REORDERED_SUM, assert_close
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import build_chunks, global_batch, transformer_config

LAYOUT, GPT2 = LayoutCase(dp=2), ModelCase("gpt2", True, 0.1)


def build(
    groups,
    model=GPT2,
    stage="optim_grads_params",
    offload_path=None,
    cpu_offload=False,
    bucket_size=None,
    **settings,
):
    """Return a wrapped model of 12 layers; `settings` change its config."""
    rng_state().set_seed(7)
    config = transformer_config(LAYOUT, model)
    if settings:
        config = dataclasses.replace(config, **settings)
    with parameters_without_memory():
        (chunk,) = build_chunks(config, model, LAYOUT, groups)
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy=stage,
        param_offload_path=offload_path,
        param_cpu_offload=cpu_offload,
        bucket_size=bucket_size,
    )
    return DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)


def forward(ddp, rank=0):
    batch = global_batch(0, 4)
    tokens, labels = (batch[name][2 * rank : 2 * rank + 2] for name in ("tokens", "labels"))
    rng_state().begin_step(0, micro_batch_size=2, dp_rank=rank, dp_size=2)
    return ddp(tokens, None, None, labels=labels)


def step(ddp, groups):
    """Run one forward and backward pass; return the loss."""
    ddp.zero_grad_buffer()
    loss = forward(ddp, groups.dp.rank()).mean()
    loss.backward()
    finalize_model_grads([ddp], pg_collection=groups)
    return loss.detach()


def gradients(ddp):
    return {
        (shard.name, shard.begin): shard.gradient.clone()
        for span in ddp.spans()
        for shard in span.shards
    }


def whole_layers(ddp):
    """Return which layers have their weights in memory."""
    layers = ddp.module.decoder.layers
    return [i for i, layer in enumerate(layers) if has_memory(layer.mlp.linear_fc1.weight.detach())]


def bytes_of_whole_units(ddp):
    return sum(
        unit.values.nbytes
        for buffer in ddp.gradient_buffers
        for unit in buffer.params.units
        if unit.values.untyped_storage().nbytes() > 0
    )


@distributed(world_size=2)
def test_one_layer_computes_while_one_more_is_on_its_way(groups):
    ddp = build(groups)
    (buffer,) = ddp.gradient_buffers
    layer_bytes = max(s.values.numel() for s in buffer.params.units[1:-2]) * 4
    rest_bytes = sum(s.values.numel() for s in buffer.params.units) * 4 - 12 * layer_bytes
    seen = []

    def note(name):
        seen.append((name, whole_layers(ddp), bytes_of_whole_units(ddp)))

    for index, layer in enumerate(ddp.module.decoder.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: note(("forward", index)))
        layer.mlp.register_full_backward_hook(lambda *_, index=index: note(("backward", index)))
    step(ddp, groups)
    assert [name for name, *_ in seen] == [
        *(("forward", i) for i in range(12)),
        *(("backward", i) for i in reversed(range(12))),
    ]
    for (_, index), whole, num_bytes in seen:
        assert set(whole) <= {index, 11}, (index, whole)
        assert num_bytes <= 2 * layer_bytes + rest_bytes, index
    assert bytes_of_whole_units(ddp) == 0


@distributed(world_size=2)
def test_a_weight_that_is_not_here_reads_as_nan(groups):
    weight = build(groups).module.decoder.layers[3].mlp.linear_fc1.weight
    assert weight.shape == (64, 32)
    assert bool(weight.isnan().all())


@distributed(world_size=2)
def test_a_model_built_without_memory_has_the_values_of_one_built_whole(groups):
    for model in (GPT2, ModelCase("llama", False, 0.0)):
        rng_state().set_seed(7)
        (plain,) = build_chunks(transformer_config(LAYOUT, model), model, LAYOUT, groups)
        for stage in ("optim_grads_params", "no_shard"):
            state = build(groups, model, stage).state_dict()
            for name, expected in plain.state_dict().items():
                if isinstance(expected, torch.Tensor):
                    assert_close(state[name], expected, EXACT, f"{stage} {name}")


@distributed(world_size=2)
def test_one_step_has_the_bits_of_whole_parameters_in_every_way_of_recomputing(groups):
    ways = [
        {},
        {"recompute_granularity": "selective"},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 3,
        },
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 5},
        {"cross_entropy_loss_fusion": True},
        {"gradient_accumulation_fusion": False},
    ]
    for way in ways:
        plain, sharded = build(groups, stage="optim", **way), build(groups, **way)
        for _ in range(2):
            assert_close(step(sharded, groups), step(plain, groups), EXACT, f"loss {way}")
            # The owners differ, as buckets do: compare the sums.
            ours, theirs = (
                sum(float(g.double().square().sum()) for g in gradients(ddp).values())
                for ddp in (sharded, plain)
            )
            totals = torch.tensor([ours, theirs], dtype=torch.float64)
            torch.distributed.all_reduce(totals)
            assert_close(totals[0], totals[1], FP32_REORDERED_SUM, f"gradients {way}")
        assert bytes_of_whole_units(sharded) == 0


@distributed(world_size=2)
def test_a_forward_and_a_backward_that_take_turns_leave_each_other_what_they_use(groups):
    def run_in_a_row(*passes):
        for one in passes:
            one()

    def two_micro_batches(pair):
        """Run F0, then F1 and B0 as `pair` does, then B1."""
        ddp.zero_grad_buffer()
        losses = [forward(ddp, groups.dp.rank()).mean()]
        pair(lambda: losses.append(forward(ddp, groups.dp.rank()).mean()), losses[0].backward)
        losses[1].backward()
        finalize_model_grads([ddp], pg_collection=groups)
        return torch.stack([loss.detach() for loss in losses]), gradients(ddp)

    ddp, seen = build(groups), []
    (buffer,) = ddp.gradient_buffers
    layer_bytes = max(s.values.numel() for s in buffer.params.units[1:-2]) * 4
    rest_bytes = sum(s.values.numel() for s in buffer.params.units) * 4 - 12 * layer_bytes

    def wait(*_):
        yield_to_peer()
        seen.append(bytes_of_whole_units(ddp))

    # The backward waits less often: each pass ends while the other one continues, in some pair.
    for index, layer in enumerate(ddp.module.decoder.layers):
        layer.mlp.register_forward_hook(wait)
        if index % 3:
            layer.mlp.register_full_backward_hook(wait)
    expected_losses, expected = two_micro_batches(run_in_a_row)
    most_in_a_row, seen = max(seen), []
    for pair in (overlap_forward_backward, lambda one, two: overlap_forward_backward(two, one)):
        losses, found = two_micro_batches(pair)
        assert_close(losses, expected_losses, EXACT, "losses")
        for place, gradient in found.items():
            assert_close(gradient, expected[place], EXACT, str(place))
        assert bytes_of_whole_units(ddp) == 0
    # In a row: the second forward's two, and the last layer, which the first one has left whole.
    assert most_in_a_row <= 3 * layer_bytes + rest_bytes
    assert most_in_a_row < max(seen) <= 4 * layer_bytes + rest_bytes


@distributed(world_size=2)
def test_weight_gradients_that_wait_keep_neither_weights_nor_buckets(groups):
    rank = groups.dp.rank()
    expected = build(groups)
    expected.zero_grad_buffer()
    for _ in range(2):
        forward(expected, rank).mean().backward()
    finalize_model_grads([expected], pg_collection=groups)

    ddp, num_whole, num_buckets = build(groups), [], []
    (buffer,) = ddp.gradient_buffers
    for layer in ddp.module.decoder.layers:
        layer.mlp.register_full_backward_hook(lambda *_: num_whole.append(len(whole_layers(ddp))))
    ddp.zero_grad_buffer()
    with enable_wgrad_deferral():
        losses = [forward(ddp, rank).mean() for _ in range(2)]
        waiting: list[list[WeightGradient]] = [[], []]
        for loss, calls in zip(losses, waiting, strict=True):
            with capture_wgrads(calls):
                loss.backward()
            assert bytes_of_whole_units(ddp) == 0 and not buffer.full
        for calls in waiting:
            with torch.no_grad():
                for call in calls:
                    call()
                    num_buckets.append(len(buffer.full))
            assert not buffer.full
    assert num_whole == [1] * 24
    # The rest, the tied embedding, and one layer.
    assert max(num_buckets) <= 3
    finalize_model_grads([ddp], pg_collection=groups)
    for place, gradient in gradients(ddp).items():
        assert_close(gradient, gradients(expected)[place], FP32_REORDERED_SUM, str(place))


@distributed(world_size=2)
def test_evaluation_gathers_and_frees_in_any_order_with_training(groups):
    plain, sharded = build(groups, stage="no_shard"), build(groups)
    for _ in range(2):
        with torch.no_grad():
            assert_close(forward(sharded), forward(plain), EXACT, "evaluation")
        assert whole_layers(sharded) == []
        assert_close(step(sharded, groups), step(plain, groups), EXACT, "training")


def train_alike(groups, found, expected, tolerance=EXACT):
    """Train two replicas of one model, which stay equal; return the places that only one has."""
    for _ in range(3):
        assert_close(step(found, groups), step(expected, groups), tolerance, "loss")
        ours, theirs = gradients(found), gradients(expected)
        alike = {k for k in ours if k in theirs and ours[k].shape == theirs[k].shape}
        for place in alike:
            assert_close(ours[place], theirs[place], tolerance, str(place))
        for ddp in (found, expected):
            for span in ddp.spans():
                for shard in span.shards:
                    shard.values.detach().sub_(shard.gradient, alpha=0.1)
            ddp.start_param_sync()
    weights = found.state_dict()
    for name, weight in expected.state_dict().items():
        if isinstance(weight, torch.Tensor):
            assert_close(weights[name], weight, tolerance, name)
    return (ours.keys() | theirs.keys()) - alike


@pytest.mark.parametrize("is_tied", [False, True])
@distributed(world_size=2)
def test_a_table_whose_gradient_goes_out_in_buckets_has_the_same_gradient(groups, is_tied):
    model = ModelCase("gpt2", is_tied, 0.1)
    whole, cut = build(groups, model), build(groups, model, bucket_size=1000)
    (buffer,) = cut.gradient_buffers
    lengths = {len(section.buckets) for section in buffer.params.units}
    assert 1 in lengths and max(lengths) > 1
    in_layers = {id(p) for p in cut.module.decoder.layers.parameters()}
    numbers = [
        buffer.params.unit_of[i] for i, p in enumerate(buffer.flat.parameters) if id(p) in in_layers
    ]
    assert numbers and not any(
        buffer.params.units[number].has_several_buckets for number in numbers
    )
    # The two uses of a tied table meet in `.grad`, before they are added to the main gradient.
    apart = train_alike(groups, cut, whole, FP32_AFTER_OPTIMIZER if is_tied else EXACT)
    assert apart and not any("layers" in name for name, _ in apart)


@distributed(world_size=2)
def test_what_is_written_to_whole_parameters_is_lost(groups):
    ddp = build(groups)
    weight = ddp.module.decoder.layers[3].mlp.linear_fc1.weight
    with torch.no_grad(), ddp.summon_full_params():
        before = weight.clone()
        weight.fill_(5.0)
    with ddp.summon_full_params():
        assert_close(weight, before, EXACT, "a weight")


@pytest.mark.parametrize("bucket_size", [None, 1000])
@distributed(world_size=2)
def test_a_whole_state_dict_loads_into_shards(groups, bucket_size):
    sharded = build(groups, bucket_size=bucket_size)
    wanted = {
        name: tensor + 1.0 if isinstance(tensor, torch.Tensor) else tensor
        for name, tensor in sharded.state_dict().items()
    }
    sharded.load_state_dict(wanted)
    for name, tensor in sharded.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert_close(tensor, wanted[name], EXACT, name)


@distributed(world_size=4, tp=2)
def test_the_norm_of_sharded_weights_is_that_of_whole_ones(groups):
    layout = LayoutCase(tp=2, dp=2)
    found = []
    for stage in ("no_shard", "optim_grads_params"):
        rng_state().set_seed(7)
        config = transformer_config(layout, GPT2)
        (chunk,) = build_chunks(config, GPT2, layout, groups)
        ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=stage)
        ddp = DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)
        found.append(params_norm([ddp], groups))
    assert_close(found[1], found[0], FP32_REORDERED_SUM, "norm of the weights")


@distributed(world_size=2)
def test_a_frozen_layer_stays_whole_and_trains_the_others(groups):
    rng_state().set_seed(7)
    config = transformer_config(LAYOUT, GPT2)
    results = []
    for stage in ("no_shard", "optim_grads_params"):
        (chunk,) = build_chunks(config, GPT2, LAYOUT, groups)
        chunk.decoder.layers[4].requires_grad_(False)
        ddp_config = DistributedDataParallelConfig(data_parallel_sharding_strategy=stage)
        ddp = DistributedDataParallel(config, ddp_config, chunk, pg_collection=groups)
        results.append(step(ddp, groups))
        if stage == "optim_grads_params":
            frozen = chunk.decoder.layers[4].mlp.linear_fc1.weight
            assert has_memory(frozen.detach()) and not bool(frozen.isnan().any())
            assert 4 not in {int(n.split(".")[2]) for n, _ in gradients(ddp) if "layers" in n}
    assert_close(results[1], results[0], EXACT, "loss")


@distributed(world_size=2)
def test_shards_in_a_file_and_in_host_memory_give_the_same_bits(groups):
    with TemporaryDirectory() as directory:
        for place in ({"offload_path": directory}, {"cpu_offload": True}):
            assert not train_alike(groups, build(groups, **place), build(groups)), place
        assert not list(Path(directory).iterdir())


@distributed(world_size=2)
def test_shards_in_host_memory_are_copied_while_layers_before_compute(groups):
    ddp = build(groups, cpu_offload=True)
    step(ddp, groups)  # in which it is seen that the head reads the embedding's weight
    (buffer,) = ddp.gradient_buffers
    number_of = {shard.data_ptr(): n for n, shard in enumerate(buffer.params.shards)}
    events = []
    start, take = ThreadCopies.start, HostShards.take_copy

    def copy(self, shard):
        events.append(("copy", number_of[shard.data_ptr()]))
        return start(self, shard)

    def gather(self, number):
        events.append(("gather", number))
        return take(self, number)

    with (
        patch.object(ThreadCopies, "start", copy),
        patch.object(HostShards, "take_copy", gather),
    ):
        step(ddp, groups)
    copies, gathers = ([n for what, n in events if what == kind] for kind in ("copy", "gather"))
    assert Counter(copies) == Counter(gathers) and set(gathers) == set(number_of.values())
    assert not any(
        after == ("copy", n) for (what, n), after in pairwise(events) if what == "gather"
    )


@distributed(world_size=2)
def test_a_shard_that_changes_after_it_was_copied_is_copied_again(groups):
    ddp = build(groups, cpu_offload=True)
    (buffer,) = ddp.gradient_buffers
    ddp.start_param_sync()
    for shard in buffer.params.shards:
        shard.fill_(2.0)
    with ddp.summon_full_params():
        for parameter in ddp.parameters():
            assert not parameter.requires_grad or bool((parameter == 2.0).all())


@distributed(world_size=2)
def test_a_rank_without_its_directory_stops_all(groups):
    with TemporaryDirectory() as directory:
        nowhere = f"{directory}/nowhere"
        with pytest.raises(ConfigError, match="rank 1.*nowhere"):
            build(groups, offload_path=nowhere if groups.dp.rank() == 1 else directory)


def test_only_shards_of_parameters_lie_in_a_file():
    with pytest.raises(ConfigError, match="param_offload_path='there' with optim_grads on cpu"):
        DistributedDataParallelConfig(
            data_parallel_sharding_strategy="optim_grads", param_offload_path="there"
        )
