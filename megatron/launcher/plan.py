"""What a back end would write and run, and the lines that start torchrun on a node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError
from megatron.launcher.job import Job

CHECK_MODULE = "megatron.resilience.node_health"
"""Run by torchrun on all nodes for `--check`; on one node without torchrun it is a health probe."""
_MARGIN_S = 30
"""Between the end of what torchrun waits for its ranks and the end that the scheduler makes."""


@dataclass(frozen=True)
class JobFile:
    """A file of a job."""

    path: str
    text: str


@dataclass(frozen=True)
class LaunchPlan:
    """What submits a job."""

    files: tuple[JobFile, ...]
    commands: tuple[tuple[str, ...], ...]
    """Run one after the other, from the directory of `lattice launch`."""
    notes: tuple[str, ...] = ()
    """What the user has to know or do beside."""
    is_concurrent: bool = False
    """Whether the commands run at the same time, and all end when one fails."""
    hosts: tuple[str, ...] = ()
    """Where each of them runs, if it is one for each node."""

    def shown(self) -> str:
        """Return the files and commands as text that a shell would take."""
        lines = [f"# {note}" for note in self.notes]
        for file in self.files:
            lines += [f"# ---- {file.path}", file.text.rstrip("\n"), "# ----"]
        lines += ["# submitted by:" if not self.is_concurrent else "# started together:"]
        return "\n".join([*lines, self.shown_commands()])

    def shown_commands(self) -> str:
        """Return the commands alone."""
        return "\n".join(shlex.join(words) for words in self.commands)


def variables(job: Job) -> dict[str, str]:
    """Return the environment of all ranks, with what the launcher adds."""
    threads = max(1, job.cpus_per_node // job.ranks_per_node) if job.cpus_per_node else 0
    found = {"OMP_NUM_THREADS": str(min(threads, 8))} if threads else {}
    # torchrun gives its ranks 30 s after SIGTERM, which a large checkpoint exceeds.
    found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(max(30, job.save_before_end_s - _MARGIN_S))
    return found | job.environment


def check_paths(job: Job, where: str) -> None:
    """Refuse mounts of what only Kubernetes has.

    Raises:
        ConfigError: the source of a mount is no path.
    """
    claims = [mount.source for mount in job.mounts if not mount.is_path]
    if claims:
        raise ConfigError(
            f"the source of a mount is {claims[0]}, and the back end {where}.",
            rule="only Kubernetes has volume claims; elsewhere a source is an absolute path",
            flags=["--mount"],
            fix=f"write for example --mount /scratch/{claims[0]}:/{claims[0]}",
        )


def exports(job: Job) -> list[str]:
    """Return the environment as lines of shell."""
    return [f"export {name}={shlex.quote(value)}" for name, value in variables(job).items()]


def torchrun(job: Job, num_nodes: str, node_rank: str, address: str, port: str) -> str:
    """Return the beginning of a line of shell that starts the ranks of a node.

    Args:
        num_nodes, node_rank, address, port: text for the shell, which may hold its variables.
    """
    return (
        f"torchrun --nnodes {num_nodes} --node-rank {node_rank}"
        f" --nproc-per-node {job.ranks_per_node}"
        f" --master-addr {address} --master-port {port}"
    )


def check_words(job: Job) -> list[str]:
    """Return what torchrun starts for `--check`."""
    return ["-m", CHECK_MODULE, *_check_flags(job)]


def probe_words(job: Job) -> list[str]:
    """Return the command that examines one node, alone."""
    return ["python", "-m", CHECK_MODULE, *_check_flags(job)]


def _check_flags(job: Job) -> list[str]:
    directories = [d for d in (job.value_of("--save"), job.value_of("--data-cache-path")) if d]
    return [
        "--num-gpus", str(job.gpus_per_node),
        *(["--directory", *directories] if directories else []),
    ]  # fmt: skip


def node_script(
    job: Job,
    num_nodes: str,
    node_rank: str,
    address: str,
    port: str,
    *,
    exported: Sequence[str] | None = None,
) -> list[str]:
    """Return lines of shell for one node: environment, setup, the check, the training.

    Args:
        num_nodes, node_rank, address, port: as of `torchrun`.
        exported: lines that set the environment, if it is set in another way.
    """
    start = torchrun(job, num_nodes, node_rank, address, port)
    lines = ["set -e", *(exports(job) if exported is None else exported), *job.setup]
    if job.check:
        lines.append(f"{start} {shlex.join(check_words(job))}")
    return [*lines, f"exec {start} {shlex.join(job.command)}"]


def option_lines(options: Sequence[tuple[str, object]]) -> list[str]:
    """Return `--name=value` for options that have a value."""
    return [f"--{name}={value}" for name, value in options if value not in ("", 0)]
