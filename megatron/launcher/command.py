"""Write or submit a job for a cluster, from one description.

    lattice launch job.yaml --backend slurm --dry-run
    lattice launch job.yaml --backend trainjob --nodes 16
    lattice launch --backend ssh --hostfile hosts --nodes 2 -- pretrain_gpt.py --preset llama3-8b

The description is a YAML file, flags, or both; a flag is stronger. Words after `--` are the
training command, or flags that are added to the command of the file. See docs/clusters.md.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.foundation import standard_output
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, positional
from megatron.launcher import hosts, kubernetes, ray_train, skypilot, slurm
from megatron.launcher.job import Job
from megatron.launcher.plan import LaunchPlan
from megatron.launcher.reading import read_description

_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY")
USAGE = "lattice launch [JOB.yaml] [flags] [-- SCRIPT ...]"
BACKENDS: Mapping[str, Callable[[Job], LaunchPlan]] = {
    "slurm": slurm.plan,
    "ssh": hosts.plan_ssh,
    "mpi": hosts.plan_mpi,
    "trainjob": kubernetes.plan_train_job,
    "pytorchjob": kubernetes.plan_pytorch_job,
    "jobset": kubernetes.plan_job_set,
    "ray": ray_train.plan,
    "sky": skypilot.plan,
}
"""Kind of cluster -> what would be written and run there."""


@dataclass(frozen=True, kw_only=True)
class LaunchFlags:
    """What is done, and the job."""

    file: str = positional("", metavar="JOB.yaml", help="Description of the job.")
    backend: str = flag("slurm", choices=tuple(BACKENDS))
    """Kind of cluster."""
    dry_run: bool = False
    """Show the files and the commands that would submit them; write and submit nothing."""
    write_only: bool = False
    """Write the files, and show the commands."""
    job: Job = field(default_factory=Job)


def read_launch(argv: Sequence[str]) -> LaunchFlags:
    """Return what a command line asks for, with the checked description of the job.

    Words after `--` are the training command. If the first of them is a flag, they are added to the
    command of the file.

    Raises:
        ConfigError: the file or the description cannot be used.
    """
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    words, command = words[:cut], tuple(words[cut + 1 :])
    options: dict[str, Any] = {
        "prog": "lattice launch", "usage": USAGE, "description": __doc__, "allow_abbrev": False,
    }  # fmt: skip
    flags = read_command_line(LaunchFlags, words, **options)
    if flags.file:
        defaults = read_description(flags.file)
        flags = read_command_line(LaunchFlags, words, defaults=defaults, **options)
    of_file = flags.job.command
    is_addition = bool(of_file) and bool(command) and command[0].startswith("-")
    command = (*of_file, *command) if is_addition else command or of_file
    flags = replace(flags, job=replace(flags.job, command=command))
    flags.job.check_settings()
    return flags


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `lattice`; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["launch"]:
        standard_output.write(f"usage: {USAGE}\n")
        is_help = words[:1] in (["-h"], ["--help"])
        return ExitStatus.DONE if is_help else ExitStatus.WRONG_USAGE
    flags = read_launch(words[1:])
    plan = BACKENDS[flags.backend](flags.job)
    plan = replace(plan, notes=(*plan.notes, *about_secrets(flags.job)))
    if flags.dry_run:
        standard_output.write(plan.shown() + "\n")
        return ExitStatus.DONE
    write(plan)
    if flags.write_only:
        standard_output.write(plan.shown_commands() + "\n")
        return ExitStatus.DONE
    return submit(plan, flags.job)


def about_secrets(job: Job) -> tuple[str, ...]:
    """Return a line about variables whose names look like secrets; their values are in files."""
    names = [name for name in job.environment if _SECRET.search(name)]
    if not names:
        return ()
    return (f"{', '.join(names)}: the value is written into the files of the job, for all to read"
            " who may read these",)  # fmt: skip


def write(plan: LaunchPlan) -> None:
    """Write the files of a job.

    Raises:
        ConfigError: a directory cannot be made or written to.
    """
    for file in plan.files:
        path = Path(file.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            # Values of --env are in it. A link under this name is not followed.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(path, flags, 0o600), "w") as written:
                written.write(file.text)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}.",
                rule="files and logs of a job go to a directory that all nodes see",
                flags=["--directory"],
                fix="name another with --directory",
            ) from None


def submit(plan: LaunchPlan, job: Job) -> int:
    """Run what submits the job, or the job itself where it is started from here.

    Raises:
        ConfigError: a command is not installed here.
    """
    for note in plan.notes:
        print(f"lattice launch: {note}", file=sys.stderr)
    try:
        if plan.is_concurrent:
            is_ssh = bool(plan.hosts)
            return hosts.run_with_restarts(
                job, partial(hosts.plan_ssh, job) if is_ssh else lambda _: plan
            )
        for words in plan.commands:
            status = subprocess.call(words)
            if status:
                return status
    except FileNotFoundError as error:
        raise ConfigError(
            f"there is no command {error.filename} here.",
            rule="a job is submitted by the cluster's own command",
            flags=["--backend", "--write-only"],
            fix="run this where it is installed, or write the files with --write-only",
        ) from None
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
