"""Preprocess on many machines through datatrove's executors: this one, SLURM or Ray.

    python tools/preprocess_on_cluster.py --executor slurm --tasks 64 --partition cpu \
        --time 04:00:00 --cpus-per-task 8 --logging-dir /shared/logs/corpus -- \
        --input '/shared/corpus/*.jsonl.zst' --output-prefix /shared/data/corpus \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model /shared/tokenizer --workers 8

The flags of tools/preprocess_data.py follow `--`. Each task writes one shard. To continue a killed
task, give the same command again. The bytes of a shard depend only on the input and the number of
shards. Join the shards with tools/merge_datasets.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.preprocessing.flags import usable_cores
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.foundation.optional_imports import require
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, positional

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))


class ShardTask:
    """A step of a datatrove pipeline: one shard in a separate process.

    The process is separate, because datatrove's workers may not start processes themselves, and
    because their state must not affect the output.
    """

    name = "preprocess"
    type = "megatron-lattice"

    def __init__(self, python: str, flags: Sequence[str], num_shards: int) -> None:
        self.python = python
        self.script = os.path.join(ROOT, "tools", "preprocess_data.py")
        self.flags = list(flags)
        self.num_shards = num_shards

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> list[Any]:
        """Write the shards of a rank; raise if a shard fails."""
        # The class is pickled by value: the globals of this file are missing on the machines.
        import subprocess
        import sys

        place = ["--num-shards", str(self.num_shards), "--rank", str(rank)]
        command = [self.python, self.script, *self.flags, *place, "--world-size", str(world_size)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        if done.returncode:
            raise RuntimeError(f"shard of rank {rank} failed:\n{done.stderr[-2000:]}")
        return []


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    executor: str = flag(choices=["local", "slurm", "ray"])
    tasks: int
    """Number of tasks; each writes one shard."""
    logging_dir: str
    """Directory of logs and of marks of finished tasks; shared by all machines."""
    at_once: int = -1
    """Tasks that run at one time."""
    python: str = sys.executable
    """Interpreter on the machines that run tasks."""
    cpus_per_task: int = 1
    """Cores of a task on SLURM or Ray, and its number of workers."""
    mem_per_cpu_gb: int = 2
    """Memory of a task on SLURM or Ray."""
    partition: str | None = None
    """SLURM."""
    time: str = "24:00:00"
    """SLURM: limit of a task."""
    qos: str = "normal"
    """SLURM."""
    env_command: str | None = None
    """SLURM: run before each task, to set up Python."""
    flags: tuple[str, ...] = positional(metavar="-- FLAGS")
    """Flags of preprocess_data.py."""


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Read the command line; what follows `--` is kept for preprocess_data.py."""
    return read_command_line(
        Flags,
        argv,
        description="Preprocess on many machines through datatrove's executors.",
        allow_abbrev=False,
        usage="%(prog)s --executor {local,slurm,ray} --tasks N --logging-dir DIR [...] -- FLAGS",
    )


def workers_of(args: Flags) -> list[str]:
    """Return a --workers flag that divides a machine's cores among its tasks; a later flag wins."""
    if args.executor != "local":
        return ["--workers", str(args.cpus_per_task)]
    at_once = args.tasks if args.at_once < 1 else min(args.at_once, args.tasks)
    return ["--workers", str(max(1, usable_cores() // max(1, at_once)))]


def make_executor(args: Flags) -> Any:
    """Return datatrove's executor for the command line.

    Raises:
        ConfigError: flags that each task sets itself, or SLURM without a partition.
        MissingExtraError: datatrove (or Ray) is not installed.
    """
    own = {"--num-shards", "--rank", "--world-size"} & set(args.flags)
    if own:
        raise ConfigError(
            f"{', '.join(sorted(own))} after --.",
            rule="each task sets its own shard",
            flags=["--tasks"],
            fix="leave it out; --tasks sets the number of shards",
        )
    if args.executor == "slurm" and not args.partition:
        raise ConfigError(
            "--executor slurm without a partition.",
            rule="SLURM runs the tasks in a partition",
            flags=["--partition"],
            fix="name one that `sinfo` lists",
        )
    pipeline = [ShardTask(args.python, [*workers_of(args), *args.flags], args.tasks)]
    common = {"pipeline": pipeline, "tasks": args.tasks, "logging_dir": args.logging_dir}
    purpose = f"--executor {args.executor}"
    if args.executor == "local":
        library = require("datatrove.executor.local", purpose=purpose)
        return library.LocalPipelineExecutor(**common, workers=args.at_once)
    of_machines = {
        "cpus_per_task": args.cpus_per_task,
        "mem_per_cpu_gb": args.mem_per_cpu_gb,
        "workers": args.at_once,
    }
    if args.executor == "ray":
        require("ray", purpose=purpose)
        library = require("datatrove.executor.ray", purpose=purpose)
        return library.RayPipelineExecutor(**common, **of_machines)
    library = require("datatrove.executor.slurm", purpose=purpose)
    return library.SlurmPipelineExecutor(
        **common,
        **of_machines,
        time=args.time,
        partition=args.partition,
        qos=args.qos,
        env_command=args.env_command,
        job_name="preprocess",
    )


def check_all_done(executor: Any) -> None:
    """Raise if shards are missing.

    With Ray, datatrove logs that a task failed and returns; the other executors raise, or have only
    submitted the tasks.

    Raises:
        RuntimeError: names the tasks without a mark in the logging directory.
    """
    missing = executor.get_incomplete_ranks()
    if missing:
        raise RuntimeError(
            f"{len(missing)} of {executor.world_size} tasks did not finish"
            f" ({', '.join(map(str, missing))}); their errors are above. The same command runs"
            " them again."
        )


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run or submit the tasks; return the exit status."""
    try:
        args = parse_args(argv)
        executor = make_executor(args)
        executor.run()
        if args.executor == "ray":
            check_all_done(executor)
    except FileNotFoundError as error:  # no sbatch
        print(f"{error.filename}: no such command on this machine", file=sys.stderr)
        return ExitStatus.FAILED
    except (RuntimeError, subprocess.CalledProcessError) as error:  # a task, or sbatch, failed
        print(error, file=sys.stderr)
        return ExitStatus.FAILED
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
