"""Print the peak memory of attention: `python -m tests.distributed.context_parallel.memory`.

One layer's attention, forward and backward, causal, two query heads and one key head of width 16
in fp32, for sequences up to 65,536 on ranks that share a machine. The figure is the growth of a
rank's resident memory between before and its peak, read from the kernel (VmHWM). Exits with status
1 if doubling the sequence more than doubles it (with a tenth for the allocator).

Takes about three minutes on two cores; --longest 16384 takes ten seconds.
"""

import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.context_parallel.attention import (
    ContextParallelGroups,
    context_parallel_attention,
)
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.cpu.malloc import return_free_pages
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.distributed import run_distributed
from tests.harness.machine import memory_bytes

HEADS, KEY_HEADS, WIDTH = 2, 1, 16
ALLOWED_GROWTH = 2.2
KINDS = (("p2p", 2), ("all_gather", 2), ("a2a", 2), ("a2a+p2p", 4))


def peak_of_attention(groups, cp_comm_type: str, length: int) -> int:
    """Return by how many bytes forward and backward of one attention raise this rank's peak."""
    local = length // groups.cp.size()
    shapes = ((HEADS, WIDTH), (KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH))
    inputs = [torch.randn(local, 1, *shape, requires_grad=True) for shape in shapes]
    gc.collect()
    return_free_pages()  # what an earlier measurement has left would serve this one unseen
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = memory_bytes("VmRSS")
    out = context_parallel_attention(
        *inputs,
        AttentionOptions(0.25, MaskSpec((-1, 0))),
        cp_comm_type=cp_comm_type,
        groups=ContextParallelGroups(groups.cp, groups.hcp),
    )
    out.backward(torch.ones_like(out))
    return memory_bytes("VmHWM") - before


NAMES = tuple(cp_comm_type for cp_comm_type, _ in KINDS)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    longest: int = 65536
    """Longest sequence."""
    shortest: int = 8192
    """Shortest sequence."""
    kinds: tuple[str, ...] = flag(NAMES, choices=NAMES, metavar="KIND")


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    lengths = []
    length = options.shortest
    while length <= options.longest:
        lengths.append(length)
        length *= 2
    print("peak MiB per rank" + "".join(f"{length:>10}" for length in lengths) + "   seconds")
    matrix = "".join(f"{4 * length**2 / 2**20:>10.0f}" for length in lengths)
    print(f"{'one [s, s] matrix':<17}{matrix}")
    failed = False
    for cp_comm_type, cp in KINDS:
        if cp_comm_type not in options.kinds:
            continue
        started = time.time()
        layout = {"cp": cp} | ({"hierarchical_cp": [2, 2]} if cp_comm_type == "a2a+p2p" else {})
        peaks = [
            max(run_distributed(peak_of_attention, cp, cp_comm_type, n, timeout_s=600, **layout))
            for n in lengths
        ]
        shown = "".join(f"{peak / 2**20:>10.0f}" for peak in peaks)
        grows = [b / a for a, b in zip(peaks, peaks[1:], strict=False)]
        verdict = "" if all(ratio <= ALLOWED_GROWTH for ratio in grows) else "  NOT LINEAR"
        failed |= bool(verdict)
        name = f"{cp_comm_type} cp {cp}"
        print(f"{name:<17}{shown}{time.time() - started:>10.0f}{verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
