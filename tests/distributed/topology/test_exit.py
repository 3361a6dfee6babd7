"""A process whose work is done ends well, also where its backend's threads lag behind."""

import sys
from pathlib import Path

import pytest

from tests.harness.started import run_python, torchrun

ONE_RANK = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from megatron.core import parallel_state

def add():
    dist.all_reduce(torch.ones(4), group=group)

dist.init_process_group("gloo")
parallel_state.initialize_model_parallel()
group = parallel_state.get_data_parallel_group()
add()
cores = sorted(os.sched_getaffinity(0))
core = {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]}
os.sched_setaffinity(0, core)
for thread in Path("/proc/self/task").iterdir():
    if "runloop" in (thread / "comm").read_text():
        os.sched_setaffinity(int(thread.name), core)
        os.sched_setscheduler(int(thread.name), os.SCHED_IDLE, os.sched_param(0))
add()
"""


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="threads are slowed down by calls of Linux")
def test_the_last_collective_may_still_be_in_another_threads_hands(tmp_path: Path) -> None:
    """Without the pause at the end about every second run is aborted."""
    script = tmp_path / "one_rank.py"
    script.write_text(ONE_RANK)
    for _ in range(2):
        run_python(*torchrun(2), script, timeout_s=120)
