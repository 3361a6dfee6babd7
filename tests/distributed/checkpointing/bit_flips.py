"""Random bit flips: python -m tests.distributed.checkpointing.bit_flips [--flips 10000]

Flips one random bit of one random file of a checkpoint, loads it, and restores the bit; beside it
the same for torch's distributed checkpoint format. Exits 1 if one of ours is accepted.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.durable import DamagedCheckpointError


def tensors() -> dict[str, Tensor]:
    """Return the state: matrices in two dtypes."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer{i}": torch.randn(48, 32, generator=generator).to(dtype)
        for i, dtype in enumerate((torch.float32, torch.bfloat16) * 2)
    }


def flip_and_load(directory: Path, load: Callable[[], bool], flips: int, seed: int) -> Counter:
    """Return how many loads were refused, accepted with the right or with wrong values."""
    rng, outcomes = random.Random(seed), Counter[str]()
    files = sorted(path for path in directory.iterdir() if path.is_file())
    for number in range(flips):
        path = files[number % len(files)]
        original = path.read_bytes()
        changed = bytearray(original)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            outcomes["accepted, values right" if load() else "accepted, values wrong"] += 1
        except DamagedCheckpointError as error:
            is_named = path.name in str(error) or path.name == "metadata.json"
            outcomes["refused, file named" if is_named else "refused, file not named"] += 1
        except (Exception, CheckpointException):  # torch's is no Exception
            outcomes["refused, file not named"] += 1
        path.write_bytes(original)
    return outcomes


def main() -> int:
    """Flip bits in both formats and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=10_000)
    parser.add_argument("--torch-flips", type=int, default=300)
    arguments = parser.parse_args()
    state = tensors()
    warnings.simplefilter("ignore")
    logging.disable()
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = Path(name) / "iter_0000001", Path(name) / "torch"
        declared = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in state.items()}
        dist_checkpointing.save(declared | {"step": 10, "lr": 0.1}, ours)
        dcp.save(state | {"step": 10}, checkpoint_id=theirs, no_dist=True)

        def load_ours() -> bool:
            into = {k: torch.zeros_like(t) for k, t in state.items()}
            template = {k: ShardedTensor.from_rank_offsets(k, t) for k, t in into.items()}
            found = dist_checkpointing.load(template, ours)
            return found["step"] == 10 and all(torch.equal(into[k], state[k]) for k in state)

        def load_theirs() -> bool:
            into: dict = {k: torch.zeros_like(t) for k, t in state.items()} | {"step": 0}
            dcp.load(into, checkpoint_id=theirs, no_dist=True)
            return into["step"] == 10 and all(torch.equal(into[k], state[k]) for k in state)

        results = {
            "ours": flip_and_load(ours, load_ours, arguments.flips, 1),
            "torch DCP": flip_and_load(theirs, load_theirs, arguments.torch_flips, 1),
        }
    for format_name, outcomes in results.items():
        shown = ", ".join(f"{count} {what}" for what, count in sorted(outcomes.items()))
        print(f"{format_name}: {sum(outcomes.values())} flips: {shown}")
    return int(results["ours"].keys() != {"refused, file named"})


if __name__ == "__main__":
    sys.exit(main())
