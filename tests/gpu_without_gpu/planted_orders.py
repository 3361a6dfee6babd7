"""A step of every kind of communication, of each rank in turn, in which one rank does otherwise."""

from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.zero.stage import ReductionPolicy, reduce_bucket
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import Message, P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport import collectives, torch_collectives
from megatron.core.transport.work import AnyWork
from tests.gpu_without_gpu.collective_order.calls import RankLog
from tests.gpu_without_gpu.collective_order.recording import recorded
from tests.gpu_without_gpu.process_group_calls import ways_of_nccl

WORLD_SIZE = 8
PLANTED = (
    "a bucket is not reduced",
    "a gather of fewer rows",
    "a bucket in bf16",
    "the norm before the sum of a layer",
    "two sums in flight cross",
    "a message that nobody receives",
)


def program(groups: ProcessGroupCollection, planted: str) -> None:
    """Do what a step of tp 2, pp 2, dp 2 does; `planted` is what this rank does otherwise.

    Args:
        planted: one of `PLANTED`, or nothing.
    """
    mesh = Mesh(shard=groups.dp, replicate=SINGLE_RANK)
    channels = P2PCommunicator(groups.pp, ModelParallelConfig(params_dtype=torch.float32))
    shape, stage = (4, 2), groups.pp.rank()
    if stage == 1:
        channels.receive([shape], 0, Message(False, 0, 1), requires_grad=False).wait()
    rows = 3 if planted == "a gather of fewer rows" else 4
    collectives.all_gather(torch.ones(rows, 2), groups.tp)

    def sum_of_layer() -> None:
        collectives.all_reduce(torch.ones(4, 2), groups.tp)

    def norm() -> None:
        torch_collectives.all_reduce(torch.zeros(1), groups.mp, dist.ReduceOp.MAX)

    works: list[AnyWork] = []
    for number in range(2):
        collectives.all_reduce(torch.ones(4, 2), groups.tp)
        dtype = torch.bfloat16 if planted == "a bucket in bf16" else torch.float32
        bucket = torch.ones(8, dtype=dtype)
        if number == 0 or planted != "a bucket is not reduced":
            works.append(reduce_bucket(bucket, mesh, ReductionPolicy(), tag=number))
    for work in works:
        work.wait()
    if stage == 0:
        channels.send([torch.ones(shape)], 1, Message(False, 0, 1)).wait()
    if planted == "a message that nobody receives":
        channels.send([torch.ones(shape)], 1 - stage, Message(True, 0, 1)).wait()
    in_flight = (groups.tp, groups.mp)
    if planted == "two sums in flight cross":
        in_flight = (groups.mp, groups.tp)
    for work in [collectives.start_all_reduce(torch.ones(2), group) for group in in_flight]:
        work.wait()
    last = [sum_of_layer, norm]
    for do in reversed(last) if planted == "the norm before the sum of a layer" else last:
        do()


def logs_of_all_ranks(
    _groups: ProcessGroupCollection, planted: str, other_rank: int
) -> list[RankLog]:
    """Return what each of the ranks would start, all in this process: nothing is sent.

    Args:
        planted: what `other_rank` does otherwise.
    """
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    logs = []
    for rank in range(WORLD_SIZE):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD_SIZE)
        groups = parallel_state.initialize_model_parallel(2, 2)

        def pair(_self: object, _store: object, rank: int) -> object:
            return FakeProcessGroup._create_internal(rank, 2)

        with mock.patch.object(P2PCommunicator, "_create_pair", pair), ways_of_nccl():
            with recorded() as finish:
                program(groups, planted if rank == other_rank else "")
            logs.append(finish())
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return logs
