"""Exchange checkpoints with the real Megatron-LM: `python -m tests.parity.interop --peer PYTHON`.

PYTHON is the interpreter of an environment with megatron-core (`pip install megatron-core` there;
it must not be this project's environment, since both are imported as `megatron`). For two model
families and several layouts the other program saves and this one loads, in one process and in two
tensor-parallel ones, and the logits of both are compared in fp32; then this program saves and
exports, the other loads, and logits are compared again. Where optimizers go along, Adam's moments
and the number of updates are compared too, exactly, where one rank has them all. What the other
program has loaded it saves once more: the digest of every tensor must be that of the export. Exits
with status 1 if anything differs by more than rounding.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.interop.stored_view import StoredView, ViewReader
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_file
from megatron.core.settings.command_line import read_command_line
from megatron.core.transport.object_collectives import SingleProcess
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close
from tests.parity.interop_jobs import Exchange, load_here, save_here
from tools.checkpoint.__main__ import main as checkpoint_tool
from tools.checkpoint.state_digest import tensor_digests

PEER_SCRIPT = Path(__file__).with_name("interop_peer.py")


CASES = (
    Exchange("gpt2"),
    Exchange("llama"),
    Exchange("llama", optimizer="fully_reshardable"),
    Exchange("gpt2", optimizer="dp_reshardable"),
    Exchange("llama", tp=2, own_tp=2, optimizer="fully_reshardable"),
    Exchange("gpt2", tp=2, own_tp=2),
    Exchange("llama", tp=2),
    Exchange("llama", pp=2, own_tp=2),
    Exchange("gpt2", pp=2),
    # Untied: the updates over there do not add up the gradients of two tied copies.
    Exchange("llama", tp=2, pp=2, optimizer="fully_reshardable"),
)


def run_here(job: Any, exchange: Exchange, directory: Path) -> dict:
    """Run a job on this program's ranks and return what rank 0 says."""
    size = exchange.own_tp
    return run_distributed(job, size, exchange, str(directory), tp=size)[0]


def run_there(peer: str, command: str, exchange: Exchange, directory: Path) -> dict:
    """Run the other program and return the tensors it wrote."""
    result = directory.parent / f"{command}-there.pt"
    line = [peer, str(PEER_SCRIPT), command, str(directory), "--family", exchange.family]
    line += ["--tp", str(exchange.tp), "--pp", str(exchange.pp), "--logits", str(result)]
    if command == "load":
        line += ["--again", str(directory.parent / "again")]
    if exchange.optimizer:
        line += ["--optimizer", exchange.optimizer]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr[-3000:]}")
    with ViewReader() as reader:
        stored: dict[str, StoredView] = read_torch_file(result)
        return {name: reader.read_full(view) for name, view in stored.items()}


def compare(ours: dict, theirs: dict) -> float:
    """Check logits within fp32 rounding and moments exactly; return the largest logit error."""
    assert_close(ours["logits"], theirs["logits"], FP32_REORDERED_SUM, "logits")
    assert ours.keys() >= theirs.keys(), theirs.keys() - ours.keys()
    for name in theirs.keys() - {"logits"}:
        assert_close(ours[name], theirs[name], EXACT, name)
    return float((ours["logits"] - theirs["logits"]).abs().max())


def digests(save: Path) -> dict[str, str]:
    """Return the digest of every tensor of the other program's checkpoint in `save`."""
    contents = open_any(save / "iter_0000003", peers=SingleProcess())
    return dict(tensor_digests(contents))


def exchange_both_ways(peer: str, exchange: Exchange, directory: Path) -> tuple[float, float]:
    """Return the largest errors of the logits, from there to here and from here to there."""
    theirs = run_there(peer, "save", exchange, directory / "from-there")
    ours = run_here(load_here, exchange, directory / "from-there")
    first = compare(ours, theirs)
    ours = run_here(save_here, exchange, directory / "own")
    options = [] if exchange.optimizer else ["--weights"]
    status = checkpoint_tool(
        ["export", str(directory / "own"), str(directory / "export"), *options]
    )
    assert status == 0
    stored = "fully_reshardable" if exchange.optimizer else ""
    theirs = run_there(peer, "load", replace(exchange, optimizer=stored), directory / "export")
    assert digests(directory / "again") == digests(directory / "export")
    return first, compare(ours, theirs)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    peer: str
    """A Python that has megatron-core."""
    only: str = ""
    """Run cases whose text holds this."""


def main(arguments: list[str] | None = None) -> int:
    """Run all exchanges and print a table."""
    options = read_command_line(Flags, arguments, description=__doc__)
    failures = 0
    print(f"{'exchange':60} {'there to here':>14} {'here to there':>14}   largest logit error")
    for exchange in CASES:
        if options.only not in str(exchange):
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                first, second = exchange_both_ways(options.peer, exchange, Path(directory))
                print(f"{exchange!s:60} {first:14.2e} {second:14.2e}", flush=True)
            except Exception as error:
                failures += 1
                print(f"{exchange!s:60} FAILED: {error}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
