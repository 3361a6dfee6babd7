"""Save and load with megatron-core's own checkpoints, in an environment that has it.

Started by `benchmarks.checkpoint` with that environment's Python; reads `save`, `load`, `begin`
and `finish` from standard input and answers `peer: WALL_S PROCESSOR_S`. It imports nothing of
this project.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
HIDDEN = 1024


def main() -> None:
    """Execute commands until the input ends."""
    directory, million, rank, size, port = sys.argv[1], *map(int, sys.argv[2:6])
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        # megatron-core waits for a GPU before it copies, and exchanges errors in GPU tensors.
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    num_layers = max(1, million * 10**6 // (12 * HIDDEN * HIDDEN))
    rows = {"qkv": 3 * HIDDEN, "proj": HIDDEN, "fc1": 4 * HIDDEN, "fc2": 4 * HIDDEN}
    state = {
        f"{kind}{layer}.{name}": torch.randn(count // size, HIDDEN)
        for kind in ("", "exp_avg.", "exp_avg_sq.")
        for layer in range(num_layers)
        for name, count in rows.items()
    }
    requests = []

    def declared() -> dict:
        place = (0, rank, size)
        return {k: ShardedTensor.from_rank_offsets(k, t, place) for k, t in state.items()}

    def save() -> None:
        dist_checkpointing.save(declared(), directory)

    def load() -> None:
        dist_checkpointing.load(declared(), directory)

    def begin() -> None:
        request = dist_checkpointing.save(declared(), directory, async_sharded_save=True)
        if request.preload_fn is not None:
            arguments = list(request.async_fn_args)
            arguments[1] = request.preload_fn()
            request = request._replace(async_fn_args=tuple(arguments), preload_fn=None)
        requests.append(request)

    def finish() -> None:
        request = requests.pop()
        if request.async_fn is not None:
            request.async_fn(*request.async_fn_args, **request.async_fn_kwargs)
        for function in request.finalize_fns:
            function()

    commands = {"save": save, "load": load, "begin": begin, "finish": finish}
    print("peer: 0 0", flush=True)
    for line in sys.stdin:
        name = line.strip()
        if name in ("save", "begin"):
            if rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
                os.makedirs(directory)
            os.sync()
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        commands[name]()
        dist.barrier()
        taken = time.perf_counter() - wall, time.process_time() - processor
        print(f"peer: {taken[0]} {taken[1]}", flush=True)


if __name__ == "__main__":
    main()
