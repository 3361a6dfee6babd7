"""One rank that cannot write, or a process that dies: what the others and the next run see."""

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.foundation.errors import CheckpointError
from tests.harness.distributed import run_distributed
from tests.unit.dist_checkpointing.runs import load


def save_with_a_limit(groups, directory: Path, limited_rank: int) -> str:
    """Save; on one rank the kernel refuses files above 4 KiB. Returns the error's text."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    shard = ShardedTensor.from_rank_offsets("w", torch.full((4096,), float(rank)), (0, rank, size))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == limited_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        dist_checkpointing.save({"w": shard}, directory)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return ""


def test_all_ranks_raise_what_one_rank_could_not_write(ram_path: Path) -> None:
    messages = run_distributed(save_with_a_limit, 4, ram_path / "c", 2)
    assert all("EFBIG while writing" in m and "__2_0.safetensors" in m for m in messages)
    assert all(m == messages[2] and m.startswith("rank 2: ") for m in messages)
    assert not list(ram_path.iterdir())
    assert run_distributed(save_with_a_limit, 4, ram_path / "c", 9) == [""] * 4
    found = dist_checkpointing.load_plain_tensors(ram_path / "c")["w"]
    assert found.view(4, -1).unique(dim=1).flatten().tolist() == [0, 1, 2, 3]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
from tests.unit.dist_checkpointing.runs import load, save

directory, seed = Path(sys.argv[1]), int(sys.argv[2])
rng = random.Random(seed)
committed = 0
for _ in range(15):
    said, say = os.pipe()
    child = os.fork()
    if child == 0:
        iteration = committed
        while True:
            iteration += 1
            save(directory, iteration, save_retain_interval=4, async_save=iteration % 2 == 0)
            os.write(say, b"%d\\n" % iteration)
    os.close(say)
    with os.fdopen(said) as lines:
        lines.readline()  # at least one save, then anywhere
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        last = [committed + 1, *map(int, lines.read().split())][-1]
    found = load(directory)
    assert found is not None and last <= found <= last + 1, (last, found)
    committed = found
print("survived", committed)
"""


def test_kill_9_at_random_moments_never_costs_a_committed_checkpoint(ram_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLER, str(ram_path), str(random.randrange(1 << 30))],
        capture_output=True, text=True, timeout=120,
        env=os.environ | {"PYTHONPATH": os.getcwd(), "LATTICE_DEVICE": "cpu"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "survived" in result.stdout
    assert load(ram_path) is not None
