"""Run commands in processes that are forked from one that has torch imported: half a second each.

    python server.py < jobs

A job is a line of JSON: {"directory", "words", "log", "path"}; the answer is its exit status.
`torchrun --nproc-per-node N` starts N ranks, as torchrun does. `path` goes before all else on
`sys.path`, so that a command imports the `megatron` of that directory. Nothing of `megatron` may be
imported here.
"""

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback

import torch._dynamo
import torch.distributed.tensor
import torch.utils.data  # noqa: F401

LIMIT_S = 300
"""After which a rank that hangs is killed."""


def ranks_of(words: list[str]) -> tuple[int, list[str]]:
    """Return the number of ranks, and the script with its arguments."""
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node", words
        return int(words[2]), words[3:]
    assert words[0] == "python", words
    return 1, words[1:]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def become_rank(job: dict, script: list[str], rank: int, count: int, port: int) -> int:
    """Run the script in this process, and return its exit status."""
    signal.alarm(LIMIT_S)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(job["directory"])
    if job["is_torchrun"]:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    sys.path[:] = [*job["path"], *sys.path]
    sys.argv = script
    target = script[0]
    if os.path.isdir(target):
        target = os.path.join(target, "__main__.py")
    try:
        runpy.run_path(target, run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    """Serve jobs until the input ends."""
    gc.freeze()  # what is imported stays: ranks need not look at it
    sys.path.pop(0)  # the directory of this file
    for line in sys.stdin:
        job = json.loads(line)
        count, script = ranks_of(job["words"])
        job["is_torchrun"] = job["words"][0] == "torchrun"
        port = free_port()
        children = []
        for rank in range(count):
            child = os.fork()
            if child == 0:
                code = become_rank(job, script, rank, count, port)
                atexit._run_exitfuncs()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # taking torch apart would cost another second
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(next((code for code in codes if code), 0), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
