"""Measure this machine's accelerators, and write a report. It has never run on a GPU.

    python -m benchmarks.gpu                          # everything, on 1, 2, 4 ... of them
    python -m benchmarks.gpu --parts limits train     # some parts
    python -m benchmarks.gpu --rehearse               # tiny sizes on the CPU: figures mean nothing

The parts: `tests` (those of a GPU), `limits` (matrix products, copies, attention, what ranks
exchange), `train` (published models, beside the dry run's memory and the planner's time) and
`peers` (the same model by megatron-core and by Transformer Engine's layers). What fails in one is
named in the report, and the others run. LATTICE_DEVICE=cpu rehearses too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu import limits, peers, report, suite, train
from benchmarks.gpu.processes import Machine
from benchmarks.gpu.report import Found, Row
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.planner.step_command import gpu_of_this_machine

PARTS: dict[str, Callable[[Machine], Found]] = {
    "tests": suite.measure,
    "limits": limits.measure,
    "train": train.measure,
    "peers": peers.measure,
}
_MOST_RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    output: Path = Path("gpu_report")
    """Directory of report.md, report.json, logs and traces."""
    parts: tuple[str, ...] = flag(tuple(PARTS), choices=PARTS)
    ranks: tuple[int, ...] = ()
    """Numbers of ranks. Default 1, 2, 4, 8, as many as there are; 1 and 2 in a rehearsal."""
    rehearse: bool = False
    """Run everything on the CPU with tiny sizes."""
    peer_python: Path | None = None
    """Python of an environment with megatron-core, and Transformer Engine if it has that."""


def machine_of(options: Flags) -> tuple[Machine, Row]:
    """Return what is measured, and what the report says of it.

    Raises:
        ConfigError: there is no accelerator and this is no rehearsal, or there are too few.
    """
    if options.rehearse:
        os.environ["LATTICE_DEVICE"] = "cpu"
        device.device_type.cache_clear()
    is_rehearsal = os.environ.get("LATTICE_DEVICE") == "cpu"
    kind = device.device_type()
    if kind == "cpu" and not is_rehearsal:
        raise ConfigError(
            "torch sees no accelerator on this machine.",
            rule="what is measured is an accelerator",
            flags=["--rehearse"],
            fix="on a machine with GPUs install a torch for them (TORCH='torch --index-url URL'"
            " make gpu); --rehearse runs all parts on the CPU, with figures that mean nothing",
        )
    present = 2 if is_rehearsal else torch.accelerator.device_count()
    ranks = options.ranks or tuple(n for n in (1, 2, 4, _MOST_RANKS) if n <= present)
    if not is_rehearsal and max(ranks) > present:
        raise ConfigError(
            f"--ranks {max(ranks)} on a machine with {present}.",
            rule="each rank has an accelerator of its own",
            flags=["--ranks"],
            fix=f"name at most {present}",
        )
    gpu = None
    if not is_rehearsal:
        try:
            gpu = gpu_of_this_machine()
        except MegatronError as error:
            print(f"no comparison with a data sheet or a plan: {error}", file=sys.stderr)
    machine = Machine(
        ranks=ranks,
        directory=options.output,
        is_rehearsal=is_rehearsal,
        gpu=gpu,
        memory_bytes=device.total_memory_bytes(),
        peer_python=options.peer_python and options.peer_python.absolute(),
    )
    shown: Row = {
        "device": device.device_name(), "number": present,
        "GiB of one": machine.memory_bytes / 2**30, "torch": torch.__version__,
        "NCCL": device.nccl_version(), "data sheet": gpu.name if gpu else None,
    }  # fmt: skip
    return machine, shown


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; write the report after each, so that what is measured is kept."""
    options = read_command_line(Flags, argv, prog="python -m benchmarks.gpu", description=__doc__)
    machine, shown = machine_of(options)
    machine.directory.mkdir(parents=True, exist_ok=True)
    found: dict[str, Found] = {}
    for part in options.parts:
        print(f"{part} ...", flush=True)
        try:
            found[part] = PARTS[part](machine)
        except Exception as error:  # the other parts have something to say
            found[part] = Found(failures=[f"{type(error).__name__}: {error}"])
        report.write(machine.directory, shown, found, is_rehearsal=machine.is_rehearsal)
    failed = [part for part, each in found.items() if each.failures]
    print(
        f"{machine.directory / 'report.md'}" + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return ExitStatus.FAILED if failed else ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
