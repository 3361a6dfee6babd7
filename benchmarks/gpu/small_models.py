"""Small models that train a few steps, and their expected losses.

The expected losses are in `benchmarks/results/gpu/expected_losses.json`: the CPU computed them in
fp32, in one process. `python -m benchmarks.gpu.paths --record` writes that file again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.forks import Case, Outcome, first_errors, run_cases

EXPECTED = Path(__file__).resolve().parents[1] / "results" / "gpu" / "expected_losses.json"
STEPS = 3
TOLERANCES = {"fp32": 5e-5, "bf16": 1e-3, "fp8": 3e-3}
"""Relative error of the loss after three steps. It is a mean over 512 tokens, so rounding averages
out: the CPU's own bf16 and emulated fp8 are within 2.5e-4 of fp32. fp32 differs by the order of
sums, and by the device's exp2 and rsqrt. An error in the feature itself changes the loss by 2e-4 to
6e-2."""


def words_of(text: str, num_steps: int = STEPS) -> tuple[str, ...]:
    """Return the flags of a small Llama, then `text`; the last of equal flags counts."""
    model = (
        "--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 2"
        " --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2"
        " --global-batch-size 4 --vocab-size 500 --mock-data --tokenizer-type NullTokenizer"
        f" --train-iters {num_steps} --lr-decay-iters {STEPS} --lr 1e-3 --eval-iters 0"
        " --log-interval 1 --hidden-dropout 0 --attention-dropout 0 --use-cpu-initialization"
        " --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear"
        " --untie-embeddings-and-output-weights"
    )
    return tuple(f"{model} {text}".split())


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A case and the expected value of its last loss.

    Attributes:
        expected: name of the value in the file.
        dtype: key of `TOLERANCES`.
        about: further entries of its row.
    """

    case: Case
    expected: str
    dtype: str = "fp32"
    about: Mapping[str, object] = field(default_factory=dict)


def expected_losses() -> dict[str, float]:
    """Return the stored losses by name."""
    found: dict[str, float] = json.loads(EXPECTED.read_text(encoding="utf-8"))
    return found


def print_outcome(claim: Claim, outcome: Outcome, losses: Mapping[str, float]) -> bool:
    """Print the row of a claim, and its log if the claim fails; return whether it holds."""
    row: dict[str, object] = {"case": outcome.case.name, **claim.about, "s": outcome.seconds}
    problem = outcome.problem
    if not problem and not claim.case.loses_rank:
        problem = _difference(claim, outcome, losses, row)
    row["ok"] = not problem
    if problem:
        row |= {"problem": problem, "errors": list(first_errors(outcome.log))}
        print(f"---- log of {outcome.case.name}\n{outcome.log[-20_000:]}", flush=True)
    print(f"ROW: {json.dumps(row)}", flush=True)
    return not problem


def _difference(
    claim: Claim, outcome: Outcome, losses: Mapping[str, float], row: dict[str, object]
) -> str:
    """Store loss and expected loss in `row`; return the problem, or an empty string."""
    if STEPS not in outcome.losses:
        return f"no loss of step {STEPS}: its log has steps {sorted(outcome.losses)}"
    loss, expected = outcome.losses[STEPS], losses[claim.expected]
    error = abs(loss / expected - 1)
    row |= {"loss": loss, "expected": expected, "error": float(f"{error:.1e}")}
    allowed = TOLERANCES[claim.dtype]
    return "" if error <= allowed else f"loss differs by {error:.1e}, more than {allowed}"


def run_claims(claims: Sequence[Claim], **how: Any) -> bool:
    """Run the cases of claims by `run_cases` and print their rows; return whether all hold."""
    losses = expected_losses()
    by_name = {claim.case.name: claim for claim in claims}
    held: list[bool] = []
    with tempfile.TemporaryDirectory(prefix="lattice-gpu-") as folder:
        run_cases(
            [claim.case for claim in claims], Path(folder), **how,
            on_end=lambda outcome: held.append(
                print_outcome(by_name[outcome.case.name], outcome, losses)
            ),
        )  # fmt: skip
    return all(held)


def choose_cpu() -> None:
    """Make this process and its forks compute on the CPU."""
    os.environ["LATTICE_DEVICE"] = "cpu"
