"""MPI is taken where torch has it; elsewhere settings that ask for it are refused, with the fix.

The packages of torch have no MPI: where a test needs one, the calls that would reach it are noted.
"""

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.core.foundation.errors import ConfigError, TopologyError
from megatron.core.foundation.mpi import init_mpi_process_group
from megatron.training.cli.parser import parse_command_line
from megatron.training.launch.rank_info import RankInfo
from megatron.training.rules import resolve_and_check
from megatron.training.setup.distributed import start_processes
from megatron_lattice.deepspeed import init_distributed

WORDS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--lr 1e-3 --train-iters 10 --mock-data --distributed-backend mpi"
)


def resolved(*words):
    return resolve_and_check(lambda: parse_command_line([*WORDS.split(), *words]), lambda config: 1)


@pytest.fixture
def mpi_calls(monkeypatch):
    """Let torch have an MPI of four ranks, this one number 2; return what is asked of it."""
    calls = []
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *words, **named: calls.append((words, named))
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    return calls


@pytest.fixture
def no_mpi(monkeypatch):
    monkeypatch.setattr(dist, "is_mpi_available", lambda: False)


def test_a_torch_without_mpi_is_a_problem_of_the_settings_beside_all_others(no_mpi):
    with pytest.raises(ConfigError) as raised:
        resolved("--overlap-param-gather")
    found = next(p for p in raised.value.problems if "no MPI" in p.found)
    assert len(raised.value.problems) > 1
    assert found.found == "--distributed-backend mpi, and this torch has no MPI."
    assert "built from source" in found.rule
    assert found.flags == ("--distributed-backend",)
    assert "drop --distributed-backend" in found.fix


def test_deepspeed_without_mpi_names_its_argument(no_mpi):
    with pytest.raises(ConfigError, match="dist_backend mpi, and this torch has no MPI"):
        init_distributed(dist_backend="mpi")


def test_a_torch_with_mpi_connects_by_it_and_is_given_no_ranks(mpi_calls):
    run = resolved()
    assert run.parallelism.distributed_backend == "mpi"
    start_processes(run, RankInfo(2, 0, 4, True, 4), store=None)
    assert mpi_calls == [(("mpi",), {"timeout": timedelta(minutes=10)})]


def test_deepspeed_connects_by_mpi_and_takes_its_ranks(mpi_calls):
    init_distributed(dist_backend="mpi")
    assert mpi_calls == [(("mpi",), {"timeout": None})]


def test_ranks_that_mpi_numbers_differently_are_told_how_to_start(mpi_calls):
    with pytest.raises(TopologyError, match=r"rank 0 of 1 by its environment, and rank 2 of 4 by"):
        init_mpi_process_group("--distributed-backend", ranks=(0, 1))
