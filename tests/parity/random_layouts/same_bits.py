"""Compare the bits of drawn layouts with one process, in `--layout-invariant-mode`.

    python -m tests.parity.random_layouts.same_bits --seed 1 --num 200 --seconds 3600

The command draws models and layouts as `python -m tests.parity.random_layouts` does, with sizes
that are multiples of the units. Losses, norms, scalars and all weights have to be equal to the bit;
settings that the
mode does not cover have to be refused.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron.core.settings.command_line import read_command_line
from tests.parity.random_layouts.cases import Case, draw_cases
from tests.parity.random_layouts.execution import Execution
from tests.parity.random_layouts.outcomes import Kind, Result

UNITS = 4
SIZES = {
    "hidden-size": 64, "num-attention-heads": 4, "ffn-hidden-size": 256, "kv-channels": 32,
    "layout-invariant-tensor-units": UNITS, "layout-invariant-mode": True,
}  # fmt: skip
WIDTHS = {
    "moe-ffn-hidden-size": 128, "moe-shared-expert-intermediate-size": 128,
    "per-layer-embed-dim": 32,
}  # fmt: skip
SEQUENCE_UNITS = {1: 1, 2: 8, 3: 12, 4: 8, 6: 12, 8: 16}
"""Context-parallel size -> units of the sequence, in the layout and in one process."""
NOT_COVERED = (
    "fp16", "lora-rank", "fp8-format", "fp4-format", "use-torch-fsdp2", "hybrid-context-parallel",
    "qk-clip", "enable-mhc-connections", "attention-gate-by-head", "scalable-softmax",
    "altup-num-inputs", "laurel-rank", "activation-sparsity",
    "moe-branch-norms", "moe-router-scales", "moe-n-hash-layers",
    "dsa-indexer-n-heads", "csa-compress-ratios",
    "heterogeneous-layers-config-path", "heterogeneous-layers-config-encoded-json",
)  # fmt: skip
"""Settings that the mode refuses; a case with one of them is not run."""
LEFT_OUT = (
    "log-max-attention-logit", "mlp-chunks-for-training", "cross-entropy-loss-fusion",
    "cross-entropy-fusion-impl", "exp-avg-dtype", "exp-avg-sq-dtype", "attention-backend", "load",
    "kv-channels", "v-channels", "num-query-groups", "group-query-attention", "rotary-percent",
    "no-bias-gelu-fusion", "no-bias-swiglu-fusion", "moe-expert-rank-capacity-factor",
    "moe-pad-expert-input-to-capacity", "v-channels",
)  # fmt: skip
"""Settings that are dropped: the mode refuses them, they do not fit these sizes, they start from
another run, or they choose a kernel of other bits."""


def case_of(drawn: Case) -> Case:
    """Return a drawn case with the mode, in sizes that are multiples of the units."""
    has_groups = "num-query-groups" in drawn.settings
    case = drawn.without(*LEFT_OUT)
    for name, value in SIZES.items():
        case = case.with_value(name, value)
    if has_groups:
        groups = 4 if drawn.settings.get("tensor-model-parallel-size", 1) == 4 else 2
        case = case.with_value("group-query-attention", True)
        case = case.with_value("num-query-groups", groups)
    cp = drawn.settings.get("context-parallel-size", 1)
    units = SEQUENCE_UNITS[cp]
    case = case.with_value("layout-invariant-sequence-units", units)
    case = case.with_value("seq-length", -(-drawn.settings["seq-length"] // units) * units)
    for name, value in WIDTHS.items():
        if name in case.settings:
            case = case.with_value(name, value)
    return replace(case, is_wide=False)


def _is_covered(case: Case) -> bool:
    """Return whether the mode computes such a model: mixers have no units of the sequence."""
    settings = case.settings
    mixer = settings.get("experimental-attention-variant")
    has_mixers = mixer is not None or set("MGKS") & set(settings.get("hybrid-layer-pattern", ""))
    if any(name in settings for name in NOT_COVERED) or mixer == "attention_and_mamba2":
        return False
    return not (has_mixers and settings.get("context-parallel-size", 1) > 1)


def cases(seed: int, num: int, having: str | None = None) -> Iterator[Case]:
    """Yield cases that the mode covers; with the setting `having`, if it is given."""
    found = (
        case
        for drawn in draw_cases(seed, 100 * num)
        for case in drawn
        if case.settings.get("tensor-model-parallel-size", 1) <= UNITS
        and _is_covered(case)
        and (having is None or having in case.settings)
    )
    for _, case in zip(range(num), found, strict=False):
        yield case_of(case)


def differences(one: Result, other: Result) -> list[str]:
    """Return the names of figures and weights that differ in a bit."""
    figures = [{}, {}]
    for held, result in zip(figures, (one, other), strict=True):
        for figure in result.figures:
            held.setdefault(figure.name, []).append(figure.value)
    names = [name for name in figures[0].keys() & figures[1].keys()
             if figures[0][name] != figures[1][name]]  # fmt: skip
    return names + [
        name for name, weight in one.weights.items() if not torch.equal(weight, other.weights[name])
    ]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    seed: int = 1
    num: int = 100
    """Number of cases."""
    having: str | None = None
    """Draw cases with this setting only."""
    seconds: float = 1e9
    """Start no case after this time."""


def main() -> int:
    """Run the cases; return 1 if a bit differs or a run breaks."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.random_layouts.same_bits", description=__doc__
    )
    begin, counts, refusals = time.monotonic(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        execution, of_one = Execution(Path(folder)), {}
        for case in cases(flags.seed, flags.num, flags.having):
            if time.monotonic() - begin > flags.seconds:
                break
            if counts and counts.total() % 50 == 0:
                print(f"so far {dict(counts)}", flush=True)
            if str(case.serial) not in of_one:
                of_one[str(case.serial)] = execution.run(case.serial)
            one = of_one[str(case.serial)]
            other = execution.run(case) if one.kind is Kind.EQUAL else one
            if other.kind is Kind.EQUAL:
                found = differences(one, other)
                counts["differ" if found else "equal to the bit"] += 1
                if found:
                    print(f"differ: {found[:4]} {len(found)}\n    {case}", flush=True)
                continue
            counts[other.kind.value] += 1
            if other.kind is Kind.REFUSED:
                refusals[other.text.partition("\n")[2].partition("\n")[0].strip()] += 1
            else:
                print(f"{other.kind.value}: {other.text[-400:]}\n    {case}", flush=True)
    print(*(f"{count:5d}  {what}" for what, count in counts.most_common()), sep="\n")
    print(*(f"{count:5d}  {what}" for what, count in refusals.most_common()), sep="\n")
    return int(any(kind not in ("equal to the bit", Kind.REFUSED.value) for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
