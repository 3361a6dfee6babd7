"""Read checkpoints of the real DeepSpeed: `python -m tests.parity.interop_deepspeed --peer PYTHON`.

PYTHON is the interpreter of an environment with deepspeed. It trains with ZeRO stages 1, 2 and 3
on two and three ranks, saves, and says what the full fp32 weights and Adam's moments are; the same
tensors are read here from its files. All must be equal to the bit. Exits with status 1 otherwise.
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.dist_checkpointing import load_plain_tensors
from megatron.core.dist_checkpointing.interop.opening import find_deepspeed
from megatron.core.dist_checkpointing.interop.stored_view import ViewReader
from megatron.core.dist_checkpointing.interop.torch_file import read_torch_file
from megatron.core.settings.command_line import read_command_line

PEER_SCRIPT = Path(__file__).with_name("interop_deepspeed_peer.py")
CASES = ((1, 2), (2, 2), (2, 3), (3, 2), (3, 3))
"""(ZeRO stage, ranks)."""


def differing(peer: str, stage: int, ranks: int, directory: Path) -> list[str]:
    """Let the other program save, read it, and return the names that are not equal."""
    state = directory / "state.pt"
    line = [peer, str(PEER_SCRIPT), str(directory / "save"), "--stage", str(stage)]
    line += ["--ranks", str(ranks), "--state", str(state)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr[-3000:]}")
    (found, *_) = find_deepspeed(directory / "save")
    ours = load_plain_tensors(found.path)
    with ViewReader() as reader:
        theirs = {k: reader.read_full(view) for k, view in read_torch_file(state).items()}
    assert len(theirs) == 9, sorted(theirs)
    return [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    peer: str
    """A Python that has deepspeed."""


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and print a table."""
    options = read_command_line(Flags, arguments, description=__doc__)
    failures = 0
    for stage, ranks in CASES:
        with tempfile.TemporaryDirectory() as directory:
            try:
                names = differing(options.peer, stage, ranks, Path(directory))
                verdict = f"differs: {', '.join(names)}" if names else "equal to the bit"
            except Exception as error:
                names, verdict = ["all"], f"FAILED: {error}"
        failures += bool(names)
        print(f"ZeRO stage {stage}, {ranks} ranks: {verdict}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
