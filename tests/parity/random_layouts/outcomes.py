"""What became of a command line, and how two outcomes differ."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from torch import Tensor

from tests.harness.tolerances import (
    BF16_WHOLE_MODEL,
    FP32_AFTER_16_BIT_MOMENTS,
    FP32_AFTER_MUON,
    FP32_AFTER_OPTIMIZER,
    FP32_REORDERED_SUM,
    FP64_AFTER_OPTIMIZER,
    FP64_REORDERED_SUM,
    Tolerance,
    assert_close,
    largest_error,
)
from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.figures import Figure
from tests.parity.random_layouts.settings import Settings, number


class Kind(Enum):
    """How a run, or its comparison, ended."""

    EQUAL = "equal"
    REFUSED = "refused"
    UNHELPFUL = "refused without a fix"
    BROKEN = "crashed, hung or died"
    DIFFERENT = "differs from one process"


FAILURES = (Kind.UNHELPFUL, Kind.BROKEN, Kind.DIFFERENT)


@dataclass
class Result:
    """What one command line left."""

    kind: Kind
    """EQUAL if it ran to its end."""
    text: str = ""
    """The refusal, or what happened."""
    figures: list[Figure] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What is said of a case."""

    case: Case
    kind: Kind
    text: str = ""
    largest: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Of losses, norms of gradients and weights, the largest difference from one process, relative
    to the number, or to the largest element of a tensor."""

    @property
    def is_failure(self) -> bool:
        """Whether a person must look at it."""
        return self.kind in FAILURES

    @property
    def signature(self) -> str:
        """What is equal for failures with one cause, as far as a text can tell."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        shown = lines[0] if self.kind is Kind.DIFFERENT else lines[-1] if lines else ""
        if self.kind in (Kind.REFUSED, Kind.UNHELPFUL):
            shown = " ".join(found_of(self.text))
        return f"{self.kind.value}: {without_numbers(shown)}"


def without_numbers(text: str) -> str:
    """Return a text in which every number is #."""
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def found_of(refusal: str) -> list[str]:
    """Return what each problem of a refusal has found."""
    numbered = re.findall(r"^\[\d+\] (.*)$", refusal, re.MULTILINE)
    return numbered or refusal.splitlines()[:1]


def compare(case: Case, result: Result, serial: Result) -> Verdict:
    """Return the verdict on a run in a layout, beside that of one process."""
    if result.kind is not Kind.EQUAL:
        return Verdict(case, result.kind, result.text)
    if "load" in case.settings:
        result, serial = (_after_first_step(each) for each in (result, serial))
    differences = [
        *_different_figures(case, result.figures, serial.figures),
        *_different_weights(case, result.weights, serial.weights),
    ]
    largest = _largest_differences(case, result, serial)
    if not differences:
        return Verdict(case, Kind.EQUAL, largest=largest)
    return Verdict(case, Kind.DIFFERENT, "\n".join(differences), largest)


def _after_first_step(result: Result) -> Result:
    """Leave the figures which say that they are of a later step."""
    figures = [f for f in result.figures if re.match(r"step (?!1 )", f.name)]
    return replace(result, figures=figures)


def _largest_differences(case: Case, result: Result, serial: Result) -> dict[str, float]:
    """Return the largest relative difference of each kind of number that is compared."""
    found = {"losses": 0.0, "norms of gradients": 0.0, "weights": 0.0}
    for figure, other in zip(result.figures, serial.figures, strict=False):
        kind = {"lm loss": "losses", "grad-norm": "norms of gradients"}.get(
            figure.name.split(" ", 2)[-1]
        )
        if kind is not None and figure.name == other.name and other.value:
            error = abs(figure.value - other.value) / abs(other.value)
            found[kind] = max(found[kind], error)
    for name, expected in serial.weights.items() if _of_weights(case) else ():
        if name in result.weights and expected.any():
            error = largest_error(result.weights[name], expected)
            found["weights"] = max(found["weights"], error)
    return found


def _is_half(s: Settings) -> bool:
    return "bf16" in s or "fp16" in s


def _in_fp32(case: Case) -> bool:
    """Return whether it computes in fp32, which stands for half precision in wide cases."""
    return _is_half(case.settings) == case.is_wide


def _of_figure(case: Case, figure: Figure) -> Tolerance:
    if not _in_fp32(case):
        return FP64_REORDERED_SUM if case.is_wide else BF16_WHOLE_MODEL
    is_of_first_step = figure.name.startswith("step 1 ")
    if case.settings.get("optimizer") == "muon" and not is_of_first_step:
        return FP32_AFTER_MUON
    if {"exp-avg-dtype", "exp-avg-sq-dtype"} & set(case.settings) and not is_of_first_step:
        return FP32_AFTER_16_BIT_MOMENTS
    return FP32_REORDERED_SUM


def _of_weights(case: Case) -> Tolerance | None:
    """Return None where rounding of fp32 or less is made large by the update."""
    s = case.settings
    # Each Newton-Schulz step makes small singular values 3.4 times as large; state is rounded up
    # or down at random by its last bits.
    is_coarse = s.get("optimizer") == "muon" and _in_fp32(case)
    if is_coarse or ("use-precision-aware-optimizer" in s and not case.is_wide):
        return None
    if not _in_fp32(case):
        return FP64_AFTER_OPTIMIZER if case.is_wide else None
    return FP32_AFTER_OPTIMIZER


def _different_figures(case: Case, ours: Sequence[Figure], theirs: Sequence[Figure]) -> list[str]:
    names, expected = [f.name for f in ours], [f.name for f in theirs]
    if names != expected:
        more, fewer = Counter(names) - Counter(expected), Counter(expected) - Counter(names)
        return [f"the log has other figures: more {[*more][:4]}, fewer {[*fewer][:4]}"]
    # With real half precisions only losses are compared: norms of gradients, and the choice of
    # experts, differ by more than a tolerance can say.
    only_losses = _is_half(case.settings) and not case.is_wide
    wrong = []
    for figure, other in zip(ours, theirs, strict=True):
        if only_losses and not ("loss" in figure.name and "scale" not in figure.name):
            continue
        tolerance = _of_figure(case, figure)
        if not math.isclose(
            figure.value, other.value, rel_tol=tolerance.rtol,
            abs_tol=tolerance.atol + 1.01 * figure.unit + _slack(case, figure),
        ):  # fmt: skip
            wrong.append(f"{figure.name}: {figure.value!r} instead of {other.value!r}")
    return wrong


def _slack(case: Case, figure: Figure) -> float:
    """Return by how much a count may differ: gradients that are zero but for rounding."""
    if "zeros" not in figure.name:
        return 0.0
    s = case.settings
    hidden = number(s, "hidden-size")
    width = number(s, "kv-channels", hidden // number(s, "num-attention-heads"))
    # Nothing learns from the last position of a conversation: its rows in the tables of words and
    # positions have gradients of 1e-18 at most.
    ends = 2 * hidden * number(s, "global-batch-size") if "sft" in s else 0
    # The first branch, also of a depth of multi-token prediction, mixes streams that are equal.
    streams = number(s, "mhc-num-residual-streams", 4) if "enable-mhc-connections" in s else 0
    mixed = streams**2 * (streams * hidden + 1) + 1 if streams else 0
    mixed *= 1 + number(s, "mtp-num-layers", 0)
    heads = number(s, "num-layers") * number(s, "num-attention-heads")
    return float(heads * width + ends + mixed)


def _different_weights(case: Case, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    wrong = [] if "output_layer.weight" in theirs else _untied(ours)
    if set(theirs) != set(ours):
        return [*wrong, f"other weights than one process: {sorted(set(theirs) ^ set(ours))[:5]}"]
    tolerance = _of_weights(case)
    for name, expected in theirs.items():
        try:
            if tolerance is not None:
                assert_close(ours[name], expected, tolerance, name)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong[:3]


def _untied(ours: dict[str, Tensor]) -> list[str]:
    """Take the copy of a tied head out of the weights; it must equal the embedding to the bit."""
    head = ours.pop("output_layer.weight", None)
    if head is None or head.equal(ours["embedding.word_embeddings.weight"]):
        return []
    return ["the tied head differs from the embedding"]
