"""The Grafana dashboard fits its published schema and asks for metrics that a run has."""

import json
import re

import pytest

from megatron.training.hooks.monitoring import PREFIX, metric_name
from megatron.training.hooks.times import PARTS
from tests.harness.json_schema import problems
from tests.harness.pool import REPOSITORY

DASHBOARD = json.loads((REPOSITORY / "examples/monitoring/dashboard.json").read_text())
SCHEMA = json.loads((REPOSITORY / "tests/fixtures/grafana/dashboard_schema.json").read_text())
SCALARS = (
    "iteration", "lm loss", "lm loss validation", "lm loss test", "grad-norm", "learning-rate",
    "loss-scale", "batch-size", "consumed-samples", "iteration-time",
    "tokens-per-second-per-device", "throughput", "mem-max-allocated-bytes",
    "experts/layer 3 highest load", "experts/layer 12 dropped",
    *(f"{part.replace(' ', '-')}-share" for part in PARTS),
)  # fmt: skip
"""What runs of a model with experts write, with --log-throughput and its like."""
METRICS = {f"{PREFIX}_{metric_name(name)}" for name in SCALARS}


def problems_of(document):
    return problems(document, {"$ref": SCHEMA["$ref"]}, SCHEMA["$defs"])


def expressions():
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_fits_the_schema():
    assert problems_of(DASHBOARD) == []


@pytest.mark.parametrize("expression", expressions())
def test_every_query_finds_a_metric_of_a_run(expression):
    named = set(re.findall(r"\blattice_\w+", re.sub(r"\{[^}]*\}", "", expression)))
    patterns = re.findall(r'__name__=~"([^"]+)"', expression)
    assert named or patterns
    assert named <= METRICS
    assert all(any(re.fullmatch(pattern, each) for each in METRICS) for pattern in patterns)


def test_every_part_of_the_time_is_stacked():
    (pattern,) = (p for e in expressions() for p in re.findall(r'__name__=~"(.+_share)"', e))
    assert sum(bool(re.fullmatch(pattern, each)) for each in METRICS) == len(PARTS)
