"""Compare a run in some layout with the serial run."""

from dataclasses import dataclass

from tests.parity.training_case import Run


@dataclass(frozen=True)
class Errors:
    """Largest differences from the serial run, each relative to the scale of the quantity."""

    loss: float
    """max over steps of |loss - serial| / |serial|."""
    gradient: float
    """max over parameters and steps of max|g - serial| / max|serial|."""
    worst_gradient: str
    grad_norm: float
    """max over steps, relative."""
    weight: float
    """max over parameters of max|w - serial| after the steps, absolute."""
    worst_weight: str
    routers: float = 0.0
    """max over figures of the routers and steps, relative: tokens of experts, balance losses."""


def compare(run: Run, serial: Run) -> Errors:
    """Return the errors of `run`; every parameter of `serial` must be there.

    A tied head on another stage is an extra copy: it must equal the embedding bit for bit.
    """
    extra = set(run.weights) - set(serial.weights)
    assert extra <= {"output_layer.weight"}, f"unexpected parameters {sorted(extra)}"
    assert set(serial.weights) <= set(run.weights), set(serial.weights) - set(run.weights)
    for name in extra:
        tied = run.weights["embedding.word_embeddings.weight"]
        assert run.weights[name].equal(tied), "the tied head differs from the embedding"
    gradient, worst_gradient = 0.0, ""
    for step, grads in run.gradients.items():
        for name, expected in serial.gradients[step].items():
            scale = expected.abs().max().item()
            error = (grads[name] - expected).abs().max().item() / max(scale, 1e-12)
            if error > gradient:
                gradient, worst_gradient = error, name
    weight, worst_weight = 0.0, ""
    for name, expected in serial.weights.items():
        error = (run.weights[name] - expected).abs().max().item()
        if error > weight:
            weight, worst_weight = error, name
    return Errors(
        loss=_largest_relative(run.losses, serial.losses),
        gradient=gradient,
        worst_gradient=worst_gradient,
        grad_norm=_largest_relative(run.grad_norms, serial.grad_norms),
        weight=weight,
        worst_weight=worst_weight,
        routers=max(
            (_largest_relative(run.routers[n], v) for n, v in serial.routers.items()), default=0.0
        ),
    )


def _largest_relative(values: list[float], expected: list[float]) -> float:
    return max(abs(v - e) / max(abs(e), 1e-12) for v, e in zip(values, expected, strict=True))
