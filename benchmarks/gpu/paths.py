"""Stage A: train small models with features that a plain dense step does not use.

    python -m benchmarks.gpu.paths                # on the GPU of this machine
    python -m benchmarks.gpu.paths --rehearse     # on the CPU
    python -m benchmarks.gpu.paths --record       # write the expected losses again

Each case trains three steps, four cases at a time. Its last loss is compared with the loss that the
CPU computed in fp32. Cases whose Triton or flex kernels support only bf16 use a bf16 model.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.forks import FOLDER, Case, Outcome, Run, run_cases
from benchmarks.gpu.layouts import MODELS
from benchmarks.gpu.small_models import EXPECTED, STEPS, Claim, choose_cpu, run_claims, words_of
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

_DTYPES = {"fp32": "", "bf16": "--bf16", "fp8": "--bf16 --fp8-format hybrid"}
PATHS = {
    "documents": ("bf16", "--reset-position-ids --reset-attention-mask"),
    "attention dropout": ("bf16", "--attention-dropout 0.1"),
    "experts": ("bf16", "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"
                " --moe-aux-loss-coeff 0.01"),
    "latent attention": ("bf16", "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32"
                         " --qk-head-dim 64 --qk-pos-emb-head-dim 32 --v-head-dim 64"),
    "precision-aware Adam": ("bf16", "--use-distributed-optimizer --use-precision-aware-optimizer"
                             " --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"),
    "optimizer in host memory": ("bf16", "--use-distributed-optimizer --optimizer-cpu-offload"),
    "activations in host memory": ("fp32", "--fine-grained-activation-offloading --offload-modules"
                                   " core_attn attn_proj mlp_norm --min-offloaded-tensor-size 1"),
    "recomputation": ("fp32", "--recompute-granularity full --recompute-method uniform"
                      " --recompute-num-layers 1"),
    "graphs": ("fp32", "--cuda-graph-impl local --cuda-graph-warmup-steps 1"),
    "hybrid mixers": ("bf16", "--num-layers 4 --hybrid-layer-pattern MG*- --mamba-num-heads 4"
                      " --mamba-num-groups 1 --mamba-state-dim 32 --linear-num-key-heads 2"
                      " --linear-num-value-heads 2 --linear-key-head-dim 32"
                      " --linear-value-head-dim 32"),
    "fp8": ("fp8", "--fp8-recipe tensorwise"),
    "save and load": ("fp32", ""),
}  # fmt: skip
"""Name -> precision on the device, and flags in addition to the small model's flags."""
ON_DEVICE_ONLY = ("graphs",)
"""Cases that the CPU refuses: there the model runs without the additional flags."""
_AT_ONCE = 4
_LIMIT_S = 60
_WHOLE_S = 85


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run on the CPU."""
    only: tuple[str, ...] = flag((), choices=PATHS)
    """Names of cases. Default: all."""
    record: bool = False
    """Run the cases and layouts in fp32 on the CPU, and write their losses."""


def claims(names: Sequence[str], *, on_cpu: bool) -> list[Claim]:
    """Return cases with their expected losses."""
    return [
        Claim(case=_case(name, f"{text} {_DTYPES[dtype]}", on_cpu=on_cpu),
              expected=name, dtype=dtype, about={"dtype": dtype})
        for name, (dtype, text) in PATHS.items() if name in names
    ]  # fmt: skip


def _case(name: str, text: str, *, on_cpu: bool) -> Case:
    text = "" if on_cpu and name in ON_DEVICE_ONLY else text
    runs = [words_of(text)]
    if name == "save and load":
        runs = [words_of(f"--save {FOLDER}/saved --save-interval 2", 2),
                words_of(f"--load {FOLDER}/saved")]  # fmt: skip
    return Case(name=name, runs=tuple(Run(words=words) for words in runs))


def recorded_cases() -> list[Case]:
    """Return the cases that compute the expected losses: one process, fp32."""
    plain = [name for name, (dtype, _) in PATHS.items() if dtype != "fp8"]
    found = [_case(name, PATHS[name][1], on_cpu=True) for name in plain]
    found += [_case("fp8", "", on_cpu=True)]
    return found + [Case(name=name, runs=(Run(words=words_of(text)),))
                    for name, text in MODELS.items()]  # fmt: skip


def losses_now() -> dict[str, float]:
    """Compute the expected losses.

    Raises:
        RuntimeError: a run failed.
    """
    found: dict[str, float] = {}

    def keep(outcome: Outcome) -> None:
        if outcome.problem:
            raise RuntimeError(f"{outcome.case.name}: {outcome.problem}\n{outcome.log}")
        found[outcome.case.name] = outcome.losses[STEPS]

    with tempfile.TemporaryDirectory() as folder:
        run_cases(recorded_cases(), Path(folder), ranks_at_once=2, limit_s=300,
                  whole_limit_s=1800, on_end=keep)  # fmt: skip
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, or write their expected losses."""
    options = read_command_line(Flags, argv, prog="python -m benchmarks.gpu.paths",
                                description=__doc__)  # fmt: skip
    if options.rehearse or options.record:
        choose_cpu()
    if options.record:
        EXPECTED.parent.mkdir(parents=True, exist_ok=True)
        EXPECTED.write_text(json.dumps(losses_now(), indent=1) + "\n", encoding="utf-8")
        return 0
    at_once = 2 if options.rehearse else _AT_ONCE
    chosen = claims(options.only or [*PATHS], on_cpu=options.rehearse)
    held = run_claims(chosen, ranks_at_once=at_once, limit_s=_LIMIT_S, whole_limit_s=_WHOLE_S)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
