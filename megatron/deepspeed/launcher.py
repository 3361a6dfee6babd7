"""The arguments of DeepSpeed's launcher, for torchrun.

    python -m megatron.deepspeed.launcher --num_gpus 2 train.py --deepspeed ...
    python -m megatron.deepspeed.launcher --hostfile hosts --include "a:0,1@b" train.py ...

On this machine the script is started. For several machines the command of each is printed, or
started from here with --launcher ssh or pdsh. A hostfile has lines `host slots=4`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from argparse import REMAINDER
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, positional
from megatron.deepspeed.hosts import Node, Slots, run_together, slots_in

DEFAULT_HOSTFILE = "/job/hostfile"
EXPORTED = ("NCCL", "GLOO", "PYTHON", "UCX", "OMP", "LATTICE")
"""Beginnings of the names of variables that other machines get, too."""
ENVIRONMENT_FILE = ".deepspeed_env"
"""NAME=VALUE a line, in the home or the working directory: further variables for all machines."""
_LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True, kw_only=True)
class LauncherFlags:
    """The command line, with the spellings of DeepSpeed."""

    hostfile: str | None = flag(
        None, "-H", "--hostfile", help=f"Lines `host slots=4`; {DEFAULT_HOSTFILE} if it is."
    )
    include: str = flag("", "-i", "--include")
    """For example "a:0,1@b": these alone."""
    exclude: str = flag("", "-e", "--exclude")
    """For example "a:0@b": all but these."""
    num_nodes: int = flag(-1, "--num_nodes")
    """The first machines of the file."""
    num_gpus: int = flag(-1, "--num_gpus", "--num_accelerators")
    """Processes on each machine; all of its accelerators, or 1 on CPUs."""
    master_addr: str = flag("", "--master_addr")
    """Of the first machine."""
    master_port: int = flag(29500, "--master_port")
    launcher: str = flag("print", parse=str.lower)
    """Of several machines: print the commands, or start them by ssh or pdsh."""
    launcher_args: str = flag("", "--launcher_args")
    """For ssh or pdsh."""
    ssh_port: int | None = flag(None, "--ssh_port")
    """Of ssh on the other machines."""
    no_ssh: bool = flag(False, "--no_ssh")
    """Start this machine's part; give --node_rank."""
    node_rank: int = flag(-1, "--node_rank")
    """This machine's number."""
    force_multi: bool = flag(False, "--force_multi")
    """Also one machine by the launcher."""
    module: bool = False
    """The script is a module, as python -m."""
    no_python: bool = flag(False, "--no_python")
    """The script is a program."""
    no_local_rank: bool = flag(False, "--no_local_rank")
    """Do not pass --local_rank=N."""
    enable_each_rank_log: str | None = flag(None, "--enable_each_rank_log", metavar="DIR")
    """A log of each process in DIR."""
    autotuning: str | None = flag(None, is_hidden=True)
    elastic_training: bool = flag(False, "--elastic_training", is_hidden=True)
    bind_cores_to_rank: bool = flag(False, "--bind_cores_to_rank", is_hidden=True)
    bind_core_list: str | None = flag(None, "--bind_core_list", is_hidden=True)
    venv_script: str | None = flag(None, "--venv_script", is_hidden=True)
    save_pid: bool = flag(False, "--save_pid", is_hidden=True)
    no_ssh_check: bool = flag(False, "--no_ssh_check", is_hidden=True)
    log_level: str = flag("info", "--log_level", is_hidden=True)
    """No effect, as --no_ssh_check: nothing is checked, and one line is printed."""
    quiet: bool = flag(False, "-q", "--quiet")
    """Do not print the command that is started."""
    user_script: str = positional()
    """The script to start."""
    user_args: tuple[str, ...] = positional((), nargs=REMAINDER)
    """Its arguments."""

    def refused(self) -> Iterator[tuple[str, str]]:
        """Yield the flags given that do not act here, with what to do instead."""
        here = "set OMP_NUM_THREADS, and bind with numactl around the script"
        for flag_name, value, instead in (
            (
                "--autotuning",
                self.autotuning,
                "plan with tools/plan.py search, which starts no job",
            ),
            (
                "--elastic_training",
                self.elastic_training,
                "any number of ranks loads any checkpoint: start anew with them",
            ),
            ("--bind_cores_to_rank", self.bind_cores_to_rank, here),
            ("--bind_core_list", self.bind_core_list, here),
            (
                "--venv_script",
                self.venv_script,
                f"activate it in the shell's profile, or set PATH in {ENVIRONMENT_FILE}",
            ),
            ("--save_pid", self.save_pid, "read the process id with $! in the shell"),
        ):
            if value not in (None, False):
                yield flag_name, instead


def read_flags(words: Sequence[str] | None = None) -> LauncherFlags:
    """Read the command line."""
    return read_command_line(
        LauncherFlags, words, prog="python -m megatron.deepspeed.launcher", description=__doc__
    )


def choose(slots: Slots, include: str, exclude: str) -> Slots:
    """Return the machines and accelerators that are left by --include or --exclude."""
    if include and exclude:
        raise ConfigError(
            "--include beside --exclude.",
            rule="one says what is used, the other what is not",
            flags=["--include", "--exclude"],
            fix="drop one of the two",
        )
    given = "--include" if include else "--exclude"
    named: Slots = {}
    for part in filter(None, (include or exclude).split("@")):
        host, _, numbers = part.strip().partition(":")
        chosen = [int(n) for n in numbers.split(",")] if _is_list(numbers) else slots.get(host, [])
        if host not in slots or (numbers and not _is_list(numbers)) or set(chosen) - {*slots[host]}:
            raise ConfigError(
                f"{given} {include or exclude}: {part!r} is not there.",
                rule="it is HOST or HOST:N,N,..., joined by @, of the hosts "
                + ", ".join(f"{h} (slots 0 to {max(s)})" for h, s in slots.items()),
                flags=[given],
                fix=f"for example {next(iter(slots))}:0",
            )
        named[host] = sorted({*named.get(host, []), *chosen})
    if include:
        return {host: named[host] for host in slots if host in named}
    left = {host: [n for n in own if n not in named.get(host, [])] for host, own in slots.items()}
    left = {host: own for host, own in left.items() if own}
    if not left:
        raise ConfigError(
            f"--exclude {exclude} leaves nothing.",
            rule="a run needs a slot",
            flags=["--exclude"],
            fix="exclude less",
        )
    return left


def _is_list(text: str) -> bool:
    return re.fullmatch(r"\d+(,\d+)*", text) is not None


def slots_of(flags: LauncherFlags) -> Slots:
    """Return what the flags leave of the hostfile, or of this machine."""
    path = flags.hostfile or (DEFAULT_HOSTFILE if os.path.isfile(DEFAULT_HOSTFILE) else None)
    if path is None:
        count = flags.num_gpus if flags.num_gpus > 0 else num_accelerators()
        if device.device_type() == "cpu":  # any number of processes computes there
            asked = re.findall(r"(?<=[:,])\d+", flags.include)
            count = max([count, *(int(number) + 1 for number in asked)])
        found: Slots = {"localhost": list(range(count))}
        if flags.num_nodes > 1:
            raise ConfigError(
                f"--num_nodes {flags.num_nodes} without a hostfile.",
                rule="the other machines have names",
                flags=["--num_nodes", "--hostfile"],
                fix="give --hostfile with a line `host slots=N` for each machine",
            )
    else:
        found = slots_in(path)
    found = choose(found, flags.include, flags.exclude)
    if flags.num_nodes > len(found):
        raise ConfigError(
            f"--num_nodes {flags.num_nodes} of {len(found)} hosts.",
            rule="there are not more machines than are named",
            flags=["--num_nodes"],
            fix=f"use {len(found)}",
        )
    if flags.num_nodes > 0:
        found = dict(list(found.items())[: flags.num_nodes])
    if flags.num_gpus > 0:
        small = [host for host, own in found.items() if len(own) < flags.num_gpus]
        if small:
            raise ConfigError(
                f"--num_gpus {flags.num_gpus}: {small[0]} has {len(found[small[0]])} slots.",
                rule="every machine has so many slots",
                flags=["--num_gpus", "--hostfile"],
                fix=f"use {min(len(own) for own in found.values())}",
            )
        found = {host: own[: flags.num_gpus] for host, own in found.items()}
    return found


def num_accelerators() -> int:
    """Return the accelerators of this machine, or 1: a process that computes on CPUs."""
    kind = device.device_type()
    return 1 if kind == "cpu" else int(torch.get_device_module(kind).device_count())


def plan(flags: LauncherFlags) -> list[Node]:
    """Return the machines of a run, and what each of them starts."""
    for refused, instead in flags.refused():
        raise ConfigError(
            f"{refused} is not supported.",
            rule="the launcher starts one process for each slot, with torchrun",
            flags=[refused],
            fix=instead,
        )
    if flags.launcher not in ("print", "ssh", "pdsh"):
        raise ConfigError(
            f"--launcher {flags.launcher} is not supported.",
            rule="commands are printed, or started by ssh or pdsh",
            flags=["--launcher"],
            fix="for SLURM and Kubernetes start from the files in examples/cluster",
        )
    slots = slots_of(flags)
    master = flags.master_addr or next(iter(slots))
    if len(slots) == 1 and not flags.force_multi:
        master = flags.master_addr or "127.0.0.1"
    return [
        Node(host, tuple(own), tuple(_torchrun(flags, len(slots), number, len(own), master)),
             _environment(own))
        for number, (host, own) in enumerate(slots.items())
    ]  # fmt: skip


def _torchrun(
    flags: LauncherFlags, num_nodes: int, number: int, num_slots: int, master: str
) -> list[str]:
    words = [sys.executable, "-m", "torch.distributed.run"]
    words += [f"--nnodes={num_nodes}", f"--node-rank={number}", f"--nproc-per-node={num_slots}"]
    words += [f"--master-addr={master}", f"--master-port={flags.master_port}"]
    if flags.enable_each_rank_log:
        words += [f"--log-dir={flags.enable_each_rank_log}", "--tee=3"]
    if flags.no_python:
        words += ["--no-python"]
    elif not flags.no_local_rank:
        module = ["--module"] if flags.module else []
        words += ["-m", "megatron.compatibility.local_rank", *module]
    elif flags.module:
        words += ["-m"]
    return [*words, flags.user_script, *flags.user_args]


def _environment(own: Sequence[int]) -> dict[str, str]:
    """Return the variables that a machine gets."""
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    for directory in (Path.home(), Path.cwd()):
        file = directory / ENVIRONMENT_FILE
        if file.is_file():
            lines = [line.strip() for line in file.read_text().splitlines()]
            pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
            found |= {name: value for name, _, value in pairs}
    if list(own) != list(range(len(own))):
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, own))
    return found


def start(nodes: Sequence[Node], flags: LauncherFlags) -> int:
    """Start all machines from here, wait, and return the first exit status that is not 0."""
    options = shlex.split(flags.launcher_args)
    here = os.getcwd()
    if flags.launcher == "pdsh":
        same = {(node.environment.get("CUDA_VISIBLE_DEVICES"), len(node.slots)) for node in nodes}
        if len(same) > 1:
            raise ConfigError(
                "--launcher pdsh with other slots on each machine.",
                rule="pdsh runs one command on all machines",
                flags=["--launcher", "--include", "--exclude"],
                fix="use --launcher ssh",
            )
        line = nodes[0].shell(here).replace("--node-rank=0", "--node-rank=%n")
        port = [] if flags.ssh_port is None else [f"-o'Port={flags.ssh_port}'"]
        hosts = ",".join(node.host for node in nodes)
        commands = [["pdsh", "-S", "-R", "ssh", "-w", hosts, *port, *options, line]]
    else:
        port = [] if flags.ssh_port is None else ["-p", str(flags.ssh_port)]
        commands = [["ssh", *port, *options, n.host, n.shell(here)] for n in nodes]
    return run_together(commands)


def main(words: Sequence[str] | None = None) -> int:
    """Start a script, or print how to; return the exit status."""
    flags = read_flags(words)
    try:
        nodes = plan(flags)
    except MegatronError as error:
        print(error, file=sys.stderr)
        return 2
    is_local = len(nodes) == 1 and nodes[0].host in _LOCAL_NAMES and not flags.force_multi
    if flags.no_ssh or is_local:
        number = 0 if is_local else flags.node_rank
        if not 0 <= number < len(nodes):
            print(f"--no_ssh: give --node_rank, 0 to {len(nodes) - 1}", file=sys.stderr)
            return 2
        node = nodes[number]
        if not flags.quiet:
            print(shlex.join(node.command), flush=True)
        return subprocess.call(node.command, env={**os.environ, **node.environment})
    if flags.launcher == "print":
        for number, node in enumerate(nodes):
            print(f"# machine {number}, {node.host}:\n{node.shell(os.getcwd())}\n")
        print("# or start all of them from here: --launcher ssh, or --launcher pdsh")
        return 0
    return start(nodes, flags)


if __name__ == "__main__":
    sys.exit(main())
