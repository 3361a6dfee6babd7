"""The report of a run as one page."""

from __future__ import annotations

import html
import math
from datetime import datetime

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.plot import svg
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.simulate import Costs
from megatron.core.pipeline_parallel.step_plan import num_compute_steps, validated_orders
from megatron.core.pipeline_parallel.trace import planned_trace
from megatron.training.metrics.log_line import duration
from megatron.training.metrics.prediction import gibibytes
from megatron.training.reports.attempts_section import operation_html, steps_taken_again
from megatron.training.reports.experts_section import experts_html
from megatron.training.reports.line_chart import quantity
from megatron.training.reports.page import (
    card_html,
    details_html,
    figure_list_html,
    page_html,
    section_html,
    table_html,
)
from megatron.training.reports.run_charts import (
    MEMORY,
    THROUGHPUT,
    TOKEN_RATE,
    charts_html,
    curve_charts,
    evaluations_of,
    running_mean,
    speed_charts,
)
from megatron.training.reports.run_record import RunRecord
from megatron.training.reports.scalar_files import STEP_TIME
from megatron.training.reports.settings_table import changed_from_default, differences

_MAX_DRAWN_STEPS = 1500
"""Compute steps of a schedule beyond which it is described and not drawn."""


def run_page(run: RunRecord, against: RunRecord | None = None) -> str:
    """Return the report of a run as HTML.

    Args:
        against: another run, with whose settings those of `run` are compared.
    """
    text, kind = status_of(run)
    header = (
        f'<h1>{html.escape(run.name)}</h1><span class="status {kind}">{html.escape(text)}</span>'
        f"<p>{html.escape(description_of(run))}</p>"
    )
    return page_html(
        title=f"{run.name}: report of a training run",
        header=header,
        sections=[
            figure_list_html(key_figures(run)),
            section_html("Curves", charts_html(curve_charts([run]))),
            section_html("Speed and memory", charts_html(speed_charts([run]))),
            section_html("Pipeline schedule", _schedule(run)),
            section_html("Experts", experts_html(run)),
            section_html("Attempts, failures, checkpoints", *operation_html(run)),
            section_html("Settings", *_settings(run, against)),
        ],
        footer=f"Made by tools/report.py on {datetime.now():%Y-%m-%d %H:%M}. Dashed lines in the"
        " charts: an attempt begins. A running mean weighs the last ten steps or so.",
    )


def status_of(run: RunRecord) -> tuple[str, str]:
    """Return how the run stands, and how good that is: good, warn or bad."""
    goal = run.number("train_iters")
    if run.has_failed and run.failures:
        return f"failed: {run.failures[-1].get('class', 'unknown')}", "bad"
    if goal is not None and run.last_step >= goal:
        return "finished", "good"
    if goal is not None:
        return f"at step {run.last_step:,} of {goal:,}", "warn"
    return f"step {run.last_step:,}", "warn"


def description_of(run: RunRecord) -> str:
    """Return model and layout in a line, as far as the settings are known."""
    model = [
        f"{run.number(name):,} {what}"
        for name, what in (
            ("num_layers", "layers"),
            ("hidden_size", "hidden"),
            ("num_attention_heads", "heads"),
            ("num_experts", "experts"),
            ("seq_length", "tokens a sequence"),
        )
        if run.number(name)
    ]
    layout = [
        f"{what} {run.number(name)}"
        for name, what in (
            ("tensor_model_parallel_size", "tensor"),
            ("pipeline_model_parallel_size", "pipeline"),
            ("context_parallel_size", "context"),
            ("expert_model_parallel_size", "expert"),
            ("data_parallel_size", "data"),
        )
        if (run.number(name) or 1) > 1
    ]
    ranks = f"{run.num_ranks} ranks" if run.num_ranks else ""
    return " · ".join(part for part in (", ".join(model), " x ".join(layout), ranks) if part)


def key_figures(run: RunRecord) -> list[tuple[str, str, str]]:
    """Return what one asks first: (what, value, remark)."""
    figures = []
    goal = run.number("train_iters")
    figures.append(("steps", f"{run.last_step:,}", f"of {goal:,}" if goal else ""))
    for name in run.losses:
        mean = running_mean(run.series[name].values)[-1]
        evaluations = evaluations_of(name, run)
        if evaluations or name == "lm loss":
            figures.append((name, f"{mean:.4g}", "running mean at the end"))
        for kind, series in evaluations.items():
            best = min(series.finite(), default=math.nan)
            remark = f"best {best:.4g}, perplexity {math.exp(min(series.values[-1], 50)):.4g}"
            figures.append((f"{name}, {kind}", f"{series.values[-1]:.4g}", remark))
    samples, length = run.series.get("consumed-samples"), run.number("seq_length")
    if samples is not None and length:
        tokens = samples.values[-1] * length
        figures.append(("tokens", quantity(tokens), f"{samples.values[-1]:,.0f} samples"))
    if TOKEN_RATE in run.series:
        rate, ranks = run.series[TOKEN_RATE].median(), run.num_ranks
        remark = f"; {quantity(rate * ranks)} on {ranks} ranks" if ranks else ""
        figures.append(("tokens/s per device", quantity(rate), f"median{remark}"))
    if THROUGHPUT in run.series:
        rate = run.series[THROUGHPUT].median()
        figures.append(("TFLOP/s per device", f"{rate:.3g}", "median, causal"))
    if STEP_TIME in run.series:
        step_s = run.series[STEP_TIME].median()
        figures.append(("time of a step", _seconds(step_s), "median"))
    if MEMORY in run.series:
        peak = max(run.series[MEMORY].finite(), default=math.nan)
        figures.append(("peak memory", gibibytes(peak), "last rank"))
    if run.wall_s > 0:
        remark = f"{100 * run.goodput:.1f}% of it in steps that count (goodput)"
        figures.append(("wall time", duration(run.wall_s), remark))
    if run.attempts:
        lost = sum(steps_taken_again(run.attempts))
        remark = f"recorded failures: {len(run.failures)}; steps taken again: {lost:,}"
        figures.append(("attempts", str(len(run.attempts)), remark))
    return figures


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.4g} ms" if seconds < 10 else f"{seconds:.3g} s"


def _schedule(run: RunRecord) -> str:
    """Draw the plan of a step, backwards twice as long as forwards, if there is a pipeline."""
    ranks, batch = run.number("pipeline_model_parallel_size"), run.number("global_batch_size")
    micro, replicas = run.number("micro_batch_size"), run.number("data_parallel_size")
    if not (ranks and ranks > 1 and batch and micro and replicas):
        return ""
    chunks = run.number("virtual_pipeline_model_parallel_size") or 1
    plan = StepPlan(
        schedule=run.settings.get("pipeline_schedule", "1f1b"),
        pipeline_size=ranks,
        num_chunks=chunks,
        num_microbatches=batch // (micro * replicas),
        group_size=run.number("microbatch_group_size_per_vp_stage") if chunks > 1 else None,
        overlap_f_b=run.settings.get("overlap_moe_expert_parallel_comm") == "True",
    )
    try:
        if num_compute_steps(plan) > 16 * _MAX_DRAWN_STEPS:
            return ""
        trace = planned_trace(lower(validated_orders(plan)), Costs(forward=1.0, backward=2.0))
    except ScheduleError:  # of a newer version, or of a script's own
        return ""
    found = trace.report()
    note = (
        f"{plan.schedule} with {plan.num_microbatches} micro batches on {ranks} ranks of"
        f" {chunks} chunk(s): the bubble is {100 * found.bubble:.1f}% where all stages are equal"
        " and a backward takes as long as two forwards. At most"
        f" {max(found.peak_live_activations)} activations of micro batches are live on a rank."
    )
    drawing = ""
    if len(trace.spans) <= _MAX_DRAWN_STEPS:
        drawing = f'<div class="drawing">{svg([trace])}</div>'
    return card_html(drawing, f'<p class="note">{html.escape(note)}</p>')


def _settings(run: RunRecord, against: RunRecord | None) -> list[str]:
    if not run.settings:
        note = (
            "Unknown: a checkpoint (--save) and TensorBoard's files (--tensorboard-dir) hold them."
        )
        return [card_html(f'<p class="note">{note}</p>')]
    rows = [(row.flag, row.value, row.other) for row in changed_from_default(run.settings)]
    table = table_html(("setting", "value", "default"), rows)
    parts = []
    if against is not None:
        differing = [
            (r.flag, r.value, r.other) for r in differences(run.settings, against.settings)
        ]
        found = table_html(("setting", run.name, against.name), differing)
        parts.append(card_html(found or '<p class="note">No setting differs.</p>'))
    summary = f"{len(rows)} settings that are not the defaults, set or derived"
    parts.append(card_html(details_html(summary, table)))
    return parts
