"""Channels between pipeline ranks."""

import re

import pytest
import torch

from megatron.core.pipeline_parallel.p2p_communication import Message, P2PCommunicator
from tests.distributed.pipeline_parallel.linear_pipeline import (
    LinearConfig,
    assert_equal_to_serial,
    build_chunks,
    run_step,
)
from tests.harness.distributed import DistributedFailure, distributed, run_distributed


@distributed(world_size=3, pp=3)
def test_the_blocking_calls_carry_activations_up_and_gradients_down(groups):
    config = LinearConfig(pipeline_model_parallel_size=3)
    channels = P2PCommunicator(groups.pp, config)
    first, last = channels.rank == 0, channels.rank == 2
    shape = (2, 3)
    received = channels.recv_forward(shape, first)
    x = torch.zeros(shape) if first else received
    assert first or (received.requires_grad and received[0, 0] == channels.rank)
    channels.send_forward(x.detach() + 1, last)
    grad = channels.recv_backward(shape, last)
    grad = torch.full(shape, 10.0) if last else grad
    assert grad[1, 2] == 10 + 2 - channels.rank
    channels.send_backward(grad + 1, first)


@distributed(world_size=2, pp=2)
def test_the_fused_calls_exchange_in_both_directions(groups):
    channels = P2PCommunicator(groups.pp, LinearConfig(pipeline_model_parallel_size=2))
    if channels.rank == 0:
        got = channels.send_forward_recv_backward([torch.ones(4)], [(2,)], is_last_stage=False)
        assert [g.tolist() for g in got] == [[7.0, 7.0]]
    else:
        got = channels.send_backward_recv_forward([torch.full((2,), 7.0)], [(4,)], False)
        assert [g.tolist() for g in got] == [[1.0] * 4]


@distributed(world_size=2, pp=2)
def test_tagged_messages_do_not_wait_behind_each_other(groups):
    channels = P2PCommunicator(groups.pp, LinearConfig(pipeline_model_parallel_size=2))
    messages = [Message(False, i, 1) for i in range(3)]
    if channels.rank == 0:
        sent = [channels.send([torch.full((5,), float(i))], 1, m) for i, m in enumerate(messages)]
        for transfer in sent:
            transfer.wait()
    else:
        for i in (2, 0, 1):
            got = channels.receive([(5,)], 0, messages[i], requires_grad=False).wait()
            assert got[0].tolist() == [float(i)] * 5


def train_without_tags(groups, num_chunks, num_microbatches, variable):
    P2PCommunicator.has_tags = property(lambda self: False)
    try:
        config = LinearConfig(
            pipeline_model_parallel_size=groups.pp.size(), variable_seq_lengths=variable
        )
        chunks = build_chunks(groups, config, num_chunks)
        for _ in range(2):
            for chunk in chunks:
                chunk.zero_grad()
            run_step(groups, chunks, num_microbatches)
        assert_equal_to_serial(groups, chunks, num_microbatches)
    finally:
        P2PCommunicator.has_tags = TAGS


TAGS = P2PCommunicator.has_tags


@pytest.mark.parametrize(
    ("world", "num_chunks", "num_microbatches", "variable"),
    [(2, 1, 3, False), (2, 2, 4, False), (2, 2, 4, True), (4, 2, 6, False)],
)
def test_channels_that_match_by_order_alone_give_the_serial_gradients(
    world, num_chunks, num_microbatches, variable
):
    """What NCCL needs: a process group per channel, and sends and receives in one order."""
    run_distributed(train_without_tags, world, num_chunks, num_microbatches, variable, pp=world)


@distributed(world_size=2, pp=2)
def test_activations_travel_in_the_pipeline_dtype(groups):
    config = LinearConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16)
    chunks = [chunk.bfloat16() for chunk in build_chunks(groups, config, 1)]

    def step(iterator, model):
        seen.append(model.input)
        return model(next(iterator).bfloat16()), lambda out: (out.float().mean(), {})

    seen: list = []
    run_step(groups, chunks, 2, forward_step=step)
    if groups.pp.rank() == 1:
        assert [x.dtype for x in seen] == [torch.bfloat16] * 2


def send_another_dtype(groups):
    config = LinearConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.bfloat16)
    run_step(groups, build_chunks(groups, config, 1), 2)


def test_another_dtype_than_announced_is_refused():
    with pytest.raises(DistributedFailure, match=r"as torch.float32, but the pipeline carries"):
        run_distributed(send_another_dtype, 2, pp=2, timeout_s=20)


def die_in_the_second_forward(groups):
    chunks = build_chunks(groups, LinearConfig(pipeline_model_parallel_size=2), 1)
    calls = []

    def step(iterator, model):
        calls.append(1)
        if groups.pp.rank() == 0 and len(calls) == 2:
            raise ValueError("the data ended")
        return model(next(iterator)), lambda out: (out.mean(), {})

    run_step(groups, chunks, 4, forward_step=step)


def test_a_rank_whose_neighbour_died_names_it():
    with pytest.raises(DistributedFailure) as failure:
        run_distributed(die_in_the_second_forward, 2, pp=2, timeout_s=20)
    outcomes = failure.value.outcomes
    assert "the data ended" in outcomes[0].error_message
    assert outcomes[1].error_type == "PeerLostError"
    # The message of micro batch 0 may or may not have left before its sender died.
    assert re.search(
        "activation of micro batch [01] between stages 0 and 1 did not pass",
        outcomes[1].error_message,
    )
    assert "pipeline rank 0 (global rank 0)" in outcomes[1].error_message
