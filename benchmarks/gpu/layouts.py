"""Stage D: every parallel layout, with ranks on NCCL.

    python -m benchmarks.gpu.layouts                       # on the GPUs of this machine
    python -m benchmarks.gpu.layouts --rehearse            # some layouts on the CPU, with gloo
    LATTICE_DEVICE=cpu python -m benchmarks.gpu.layouts    # all layouts on the CPU

Each layout trains a small model for three steps. Its last loss is compared with the loss that one
process computed on the CPU. If there are enough GPUs, each rank has one; else ranks share GPUs,
which NCCL 2.30 and later permit (NCCL_MULTI_RANK_GPU_ENABLE=1). If the first layout fails because
of NCCL, the other layouts run on gloo, and their rows name the backend.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.forks import FOLDER, Case, Run
from benchmarks.gpu.small_models import Claim, choose_cpu, run_claims, words_of
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

_SIZES = "--num-layers 4 --num-attention-heads 4 --micro-batch-size 1"
MODELS = {
    "dense": _SIZES,
    "mixture": f"{_SIZES} --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm",
}
"""Kind of model -> its flags in addition to the small model's flags."""
_TP2, _PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
_CP2, _EP2 = "--context-parallel-size 2", "--expert-model-parallel-size 2"
_SHARDS = "--use-distributed-optimizer --overlap-grad-reduce"
_GATHERS = f"{_SHARDS} --overlap-param-gather --data-parallel-sharding-strategy"
LAYOUTS: dict[str, tuple[int, str]] = {
    "TP 2": (2, _TP2),
    "TP 2, SP": (2, f"{_TP2} --sequence-parallel"),
    "TP 2, SP, nothing overlapped": (
        2, f"{_TP2} --sequence-parallel --no-async-tensor-model-parallel-allreduce"
    ),
    "TP 4, SP": (4, "--tensor-model-parallel-size 4 --sequence-parallel"),
    "PP 2": (2, _PP2),
    "PP 2, p2p not overlapped": (2, f"{_PP2} --no-overlap-p2p-communication"),
    "PP 2, interleaved": (2, f"{_PP2} --num-layers-per-virtual-pipeline-stage 1"),
    "PP 2, zb-v": (2, f"{_PP2} --pipeline-schedule zb-v"),
    "DP 2": (2, ""),
    "DP 2, overlapped": (2, "--overlap-grad-reduce"),
    "ZeRO-1": (2, f"{_SHARDS} --overlap-param-gather"),
    "ZeRO-2": (2, f"{_GATHERS} optim_grads"),
    "ZeRO-3": (2, f"{_GATHERS} optim_grads_params"),
    "FSDP2": (2, "--use-torch-fsdp2"),
    "CP 2, ring": (2, f"{_CP2} --cp-comm-type p2p"),
    "CP 2, Ulysses": (2, f"{_CP2} --cp-comm-type a2a"),
    "CP 2, all-gather": (2, f"{_CP2} --cp-comm-type all_gather"),
    "EP 2, all-to-all": (2, f"{_EP2} --moe-token-dispatcher-type alltoall"),
    "EP 2, all-gather": (2, f"{_EP2} --moe-token-dispatcher-type allgather"),
    "ETP 2": (2, f"{_TP2} --expert-tensor-parallel-size 2 --sequence-parallel"
              " --moe-token-dispatcher-type alltoall"),
    "TP 2 x PP 2, bf16": (4, f"{_TP2} {_PP2} --sequence-parallel --bf16"),
    "saved by TP 2, loaded by PP 2": (2, ""),
    "async save by DP 2": (2, f"{_SHARDS} --async-save --save {FOLDER}/saved --save-interval 2"),
    "a rank killed": (2, "--train-iters 2000000"),
}  # fmt: skip
"""Name -> ranks, and flags."""
SHORT = ("TP 2, SP", "ZeRO-1", "saved by TP 2, loaded by PP 2", "a rank killed")
"""Layouts of a rehearsal."""
_ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
"""All ranks run on this machine, and its host name may have no address."""
_LIMIT_S, _FIRST_LIMIT_S = 30, 45
"""Limit of a layout in seconds; the first layout compiles the kernels for all."""
_WHOLE_S = 130
_RANKS_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run a few layouts on the CPU, with gloo."""
    only: tuple[str, ...] = flag((), choices=LAYOUTS)
    """Names of layouts. Default: all."""


def claims(backend: str) -> list[Claim]:
    """Return each layout with its expected loss."""
    return [_claim(name, *layout, backend) for name, layout in LAYOUTS.items()]


def _claim(name: str, num_ranks: int, text: str, backend: str) -> Claim:
    model = "mixture" if name.startswith(("EP", "ETP")) else "dense"
    given = f"{MODELS[model]} --distributed-backend {backend} --distributed-timeout-minutes 1"
    runs = [(text, 3)]
    if name.startswith("saved by"):
        runs = [(f"{_TP2} --save {FOLDER}/saved --save-interval 2", 2),
                (f"{_PP2} --load {FOLDER}/saved", 3)]  # fmt: skip
    case = Case(
        name=name,
        runs=tuple(Run(words=words_of(f"{given} {more}", steps), num_ranks=num_ranks)
                   for more, steps in runs),
        environment=_ENVIRONMENT,
        loses_rank=name == "a rank killed",
    )  # fmt: skip
    dtype = "bf16" if "--bf16" in text else "fp32"
    return Claim(case=case, expected=model, dtype=dtype, about={"backend": backend})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the layouts."""
    options = read_command_line(
        Flags, argv, prog="python -m benchmarks.gpu.layouts", description=__doc__
    )
    if options.rehearse:
        choose_cpu()
    chosen = options.only or (SHORT if options.rehearse else tuple(LAYOUTS))
    end = time.monotonic() + _WHOLE_S

    def run(some: Sequence[str], backend: str, limit_s: float = _LIMIT_S) -> bool:
        found = [claim for claim in claims(backend) if claim.case.name in some]
        return run_claims(found, ranks_at_once=_RANKS_AT_ONCE, limit_s=limit_s,
                          whole_limit_s=end - time.monotonic())  # fmt: skip

    if os.environ.get("LATTICE_DEVICE") == "cpu":
        return 0 if run(chosen, "gloo") else 1
    # If NCCL refuses ranks that share a GPU, only one layout is spent to find out.
    held = run(chosen[:1], "nccl", _FIRST_LIMIT_S)
    others, backend = (chosen[1:], "nccl") if held else (chosen, "gloo")
    return 0 if run(others, backend) and held else 1


if __name__ == "__main__":
    sys.exit(main())
