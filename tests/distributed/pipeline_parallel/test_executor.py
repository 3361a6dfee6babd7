"""A pipeline computes, bit for bit, what one process computes."""

import math
import time
import weakref

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedule import StepPlan, register_schedule
from megatron.core.pipeline_parallel.schedule_definitions import SCHEDULES
from megatron.core.pipeline_parallel.step_plan import plan_report, validated_orders
from megatron.training.cli.parser import parse_command_line
from megatron.training.rules import resolve_and_check
from tests.distributed.pipeline_parallel.linear_pipeline import (
    LinearConfig,
    assert_equal_to_serial,
    build_chunks,
    run_step,
    serial_gradients,
)
from tests.distributed.pipeline_parallel.own_schedule import EAGER
from tests.harness.distributed import DistributedFailure, distributed, run_distributed


def train_and_compare(groups, schedule, num_chunks, num_microbatches, options):
    config = LinearConfig(
        pipeline_model_parallel_size=groups.pp.size(), pipeline_schedule=schedule, **options
    )
    chunks = build_chunks(groups, config, num_chunks)
    run_step(groups, chunks, num_microbatches)
    assert_equal_to_serial(groups, chunks, num_microbatches)


CASES = [
    # world, schedule, chunks, micro batches, config
    (1, "1f1b", 1, 3, {}),
    (2, "gpipe", 1, 4, {}),
    (2, "1f1b", 1, 1, {}),
    (2, "1f1b", 1, 5, {}),
    (2, "1f1b", 2, 4, {}),
    (2, "1f1b", 3, 5, {}),
    (2, "1f1b", 2, 6, {"microbatch_group_size_per_vp_stage": 4}),
    (2, "1f1b", 2, 4, {"deallocate_pipeline_outputs": False}),
    (2, "1f1b", 2, 4, {"overlap_p2p_comm": False}),
    (4, "gpipe", 1, 6, {}),
    (4, "1f1b", 1, 2, {}),
    (4, "1f1b", 1, 6, {}),
    (4, "1f1b", 2, 4, {}),
    (4, "1f1b", 2, 7, {}),
    (4, "1f1b", 3, 8, {"overlap_p2p_comm": False}),
    (2, "zb-h1", 1, 1, {}),
    (4, "zb-h1", 1, 6, {}),
    (2, "zb-v", 2, 1, {}),
    (4, "zb-v", 2, 7, {}),
    (4, "zb-v", 2, 6, {"pipeline_step_durations": (3, 4, 2), "overlap_p2p_comm": False}),
    (2, "dualpipe-v", 2, 4, {}),
    (4, "dualpipe-v", 2, 9, {}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:4])))
def test_every_schedule_gives_the_gradients_of_one_process_to_the_bit(case):
    world, schedule, num_chunks, num_microbatches, options = case
    run_distributed(
        train_and_compare, world, schedule, num_chunks, num_microbatches, options, pp=world
    )


def train_with_own_schedule(groups, num_microbatches):
    register_schedule(EAGER)
    try:
        train_and_compare(groups, EAGER.name, 1, num_microbatches, {})
    finally:
        del SCHEDULES[EAGER.name]


def test_a_schedule_of_one_file_is_checked_timed_and_run(monkeypatch):
    monkeypatch.setitem(SCHEDULES, EAGER.name, EAGER)
    words = (
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data"
        " --micro-batch-size 2 --lr 1e-3 --train-iters 10 --pipeline-model-parallel-size 4"
        " --pipeline-schedule eager-1f1b --global-batch-size "
    )

    def resolved(rest):
        given = (words + rest).split()
        return resolve_and_check(lambda: parse_command_line(given), lambda config: 4)

    assert resolved("16").parallelism.pipeline_schedule == "eager-1f1b"
    with pytest.raises(ConfigError, match=r"2 micro batches.* for eager-1f1b"):
        resolved("4")
    with pytest.raises(ConfigError, match="eager-1f1b with virtual stages"):
        resolved("16 --num-virtual-stages-per-pipeline-rank 2")
    plan = StepPlan("eager-1f1b", 4, 1, 8)
    assert validated_orders(plan).schedule == "eager-1f1b"
    assert plan_report(plan).peak_live_activations == [7, 5, 3, 1]
    run_distributed(train_with_own_schedule, 4, 6, pp=4)


@distributed(world_size=2, pp=2)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_micro_batches_of_different_lengths_give_the_serial_gradients(groups, num_chunks):
    config = LinearConfig(pipeline_model_parallel_size=2, variable_seq_lengths=True)
    chunks = build_chunks(groups, config, num_chunks)
    sequences = [3, 6, 1, 9]
    run_step(groups, chunks, 4, sequences=sequences)
    assert_equal_to_serial(groups, chunks, 4, sequences)


@distributed(world_size=2, pp=2)
def test_a_second_step_reuses_the_channels(groups):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 2)
    for num_microbatches in (4, 6, 2):
        for chunk in chunks:
            chunk.zero_grad()
        run_step(groups, chunks, num_microbatches)
        assert_equal_to_serial(groups, chunks, num_microbatches)


@distributed(world_size=2, pp=2)
@pytest.mark.parametrize("num_chunks", [1, 2])
def test_forward_only_reports_every_loss_and_leaves_no_gradient(groups, num_chunks):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), num_chunks)
    reports = run_step(groups, chunks, 4, forward_only=True)
    assert len(reports) == (4 if groups.pp.rank() == 1 else 0)
    assert all(p.grad is None for chunk in chunks for p in chunk.parameters())


def two_tensor_step(iterator, model):
    x = next(iterator)
    if model.input is None:
        hidden = model(x)
        return [hidden, hidden[:3] * 2.0], None
    first, second = model.input
    model.input = None
    return model(first) + second.mean(), lambda out: (out.square().mean(), {})


@distributed(world_size=2, pp=2)
def test_a_stage_may_hand_over_several_tensors_of_its_own_shapes(groups):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 1)

    def shapes(receive, send):
        both = [receive[0], (3, *receive[0][1:])]
        return both, both

    run_step(groups, chunks, 2, forward_step=two_tensor_step, adjust_tensor_shapes_fn=shapes)
    assert all(p.grad is not None and p.grad.any() for p in chunks[0].parameters())


@distributed(world_size=2, pp=2)
def test_a_stage_that_does_not_use_its_input_sends_zero_gradients(groups):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 1)

    def step(iterator, model):
        output = model(next(iterator))
        if groups.pp.rank() == 1:
            output = output.detach() + sum(p.sum() for p in model.parameters())
        return output, lambda out: (out.sum(), {})

    run_step(groups, chunks, 3, forward_step=step)
    for parameter in chunks[0].parameters():
        assert bool(parameter.grad.any()) == (groups.pp.rank() == 1)


def step_with_a_different_number_of_microbatches(groups, forward_only):
    config = LinearConfig(pipeline_model_parallel_size=groups.pp.size())
    chunks = build_chunks(groups, config, 1)
    run_step(groups, chunks, 4, forward_only=forward_only)
    last = groups.pp.rank() == groups.pp.size() - 1
    run_step(groups, chunks, 5 if last else 4, forward_only=forward_only)


@pytest.mark.parametrize("forward_only", [False, True])
def test_ranks_with_different_numbers_of_micro_batches_say_so(forward_only):
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(
            step_with_a_different_number_of_microbatches, 2, forward_only, pp=2, timeout_s=30
        )
    outcomes = failure.value.outcomes
    assert all(outcome.error_type == "TopologyError" for outcome in outcomes)
    for outcome in outcomes:
        assert "num_microbatches=4" in outcome.error_message
        assert "num_microbatches=5" in outcome.error_message
        assert "global rank 1" in outcome.error_message


def test_ranks_far_from_a_disagreement_stop_too_and_name_their_neighbour():
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(step_with_a_different_number_of_microbatches, 4, False, pp=4, timeout_s=30)
    errors = [outcome.error_message for outcome in failure.value.outcomes]
    kinds = [outcome.error_type for outcome in failure.value.outcomes]
    assert kinds == ["PeerLostError"] * 2 + ["TopologyError"] * 2, errors
    assert "num_microbatches=5" in errors[2]
    assert "num_microbatches=5" in errors[3]
    assert "look at the log of pipeline rank" in errors[0]


def evaluate_twice(groups):
    """Return when the first rank ended its first step and the last rank its first forward."""
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 1)
    started = []

    def step(iterator, model):
        started.append(time.perf_counter())
        if groups.pp.rank() == 1:
            time.sleep(0.1)
        return model(next(iterator)), lambda out: (out.mean(), {})

    for _ in range(2):
        run_step(groups, chunks, 2, forward_step=step, forward_only=True)
    return started


def test_the_first_rank_starts_the_next_evaluation_step_while_the_last_still_works():
    first, last = run_distributed(evaluate_twice, 2, pp=2)
    assert first[2] < last[1] + 0.1


def step_with_a_wrong_sequence_length(groups):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 1)
    run_step(groups, chunks, 2, sequences=[4, 4])


def test_an_output_of_another_shape_than_announced_is_refused():
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(step_with_a_wrong_sequence_length, 2, pp=2, timeout_s=20)
    first = min((o for o in failure.value.outcomes if o.failed), key=lambda o: o.failed_at)
    assert first.error_type == "ConfigError"
    assert "(4, 2, 5)" in first.error_message
    assert "(6, 2, 5)" in first.error_message


def record(groups, num_chunks):
    config = LinearConfig(pipeline_model_parallel_size=2)
    recorder = PipelineRecorder()
    run_step(groups, build_chunks(groups, config, num_chunks), 4, recorder=recorder)
    return recorder.trace(groups.pp)


def test_a_recorded_step_holds_every_compute_step_of_every_rank():
    traces = run_distributed(record, 2, 2, pp=2)
    assert traces[0] == traces[1]
    steps = [(span.rank, *span.step) for span in traces[0].spans]
    assert len(steps) == len(set(steps)) == 2 * 2 * 4 * 2
    assert all(span.end >= span.start >= 0 for span in traces[0].spans)


@distributed(world_size=2, pp=2)
def test_outputs_are_freed_once_sent(groups):
    config = LinearConfig(pipeline_model_parallel_size=2, pipeline_schedule="gpipe")
    chunks = build_chunks(groups, config, 1)
    made: list[weakref.ref] = []
    alive = []

    def step(iterator, model):
        output = model(next(iterator))
        made.append(weakref.ref(output))
        alive.append(sum(reference() is not None for reference in made))
        return output, lambda out: (out.sum(), {})

    run_step(groups, chunks, 6, forward_step=step)
    if groups.pp.rank() == 0:
        assert max(alive) <= 3, alive  # the new one and the two that the channel may hold


def test_the_serial_oracle_is_not_trivial():
    grads = serial_gradients(2, 3)
    assert all(math.isfinite(float(g.sum())) and bool(torch.any(g != 0)) for s in grads for g in s)
