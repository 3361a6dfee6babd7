"""Draw a pipeline schedule: the plan, a measured trace, or both.

    python tools/plot_schedule.py --schedule 1f1b -p 4 -v 2 -m 8                 # text
    python tools/plot_schedule.py --schedule 1f1b -p 4 -v 2 -m 8 --out plan.svg  # or .png
    python tools/plot_schedule.py --measured trace.json --out both.png

With --measured, the plan of the same p, v and m is drawn above the run. In the plan, forward and
backward take the run's mean times, so that the two pictures can be compared box by box.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.pipeline_parallel.instructions import FORWARD, WEIGHT_GRAD
from megatron.core.pipeline_parallel.lower import lower
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedule_definitions import SCHEDULES
from megatron.core.pipeline_parallel.simulate import Costs
from megatron.core.pipeline_parallel.step_plan import compute_orders
from megatron.core.pipeline_parallel.timeline import (
    Trace,
    load_trace,
    planned_trace,
    save,
    timeline_text,
)
from megatron.core.pipeline_parallel.validate import validate
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

COMBINED = " and ".join(name for name, known in SCHEDULES.items() if known.overlaps_f_b)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Schedule to draw."""

    schedule: str = flag("1f1b", choices=SCHEDULES)
    """1f1b with -v > 1 is interleaved."""
    pipeline_size: int = flag(4, "-p", "--pipeline-size")
    """Pipeline ranks."""
    num_chunks: int = flag(1, "-v", "--num-chunks")
    """Model chunks per rank."""
    num_microbatches: int = flag(8, "-m", "--num-microbatches")
    group_size: int | None = None
    """Micro batches per turn of a chunk (interleaved; default p)."""
    combined: bool = flag(
        False, help=f"forwards and backwards of the steady state overlap ({COMBINED})"
    )
    forward_only: bool = False
    """Evaluation: no backward."""
    forward_cost: float | None = None
    """Time of one chunk's forward, in any unit (default 1)."""
    backward_cost: float | None = None
    """Time of one chunk's backward (default 2)."""
    pair_cost: float | None = None
    """Time of an overlapped pair (default the sum of both)."""
    transfer_cost: float = 0.0
    """Time of one message."""
    measured: Path | None = flag(None, metavar="JSON")
    """Trace of a run to draw as well."""
    out: Path | None = None
    """.svg, .png, .txt, .json or .chrome.json; text to stdout if absent."""


def plan_of(options: Flags, measured: Trace | None) -> Trace:
    """Return the verified and simulated plan of the options, or of the measured run's shape."""
    forward, backward, unit = options.forward_cost or 1.0, options.backward_cost or 2.0, ""
    plan = StepPlan(
        schedule=options.schedule,
        pipeline_size=options.pipeline_size,
        num_chunks=max(SCHEDULES[options.schedule].num_chunks or 1, options.num_chunks),
        num_microbatches=options.num_microbatches,
        group_size=options.group_size,
        forward_only=options.forward_only,
        overlap_f_b=options.combined,
    )
    if measured is not None:
        plan = plan._replace(
            pipeline_size=measured.placement.num_ranks,
            num_chunks=measured.placement.num_chunks,
            num_microbatches=measured.num_microbatches,
            forward_only=all(span.step.op is FORWARD for span in measured.spans),
        )
        forward = options.forward_cost or _mean_duration(measured, backward=False)
        backward = options.backward_cost or _mean_duration(measured, backward=True)
        unit = measured.unit
    program = lower(compute_orders(plan))
    validate(program)
    costs = Costs(
        forward=forward,
        backward=backward,
        pair=options.pair_cost,
        transfer=options.transfer_cost,
    )
    return planned_trace(program, costs, unit=unit)


def _mean_duration(trace: Trace, *, backward: bool) -> float:
    """Return the mean time of a whole forward or backward, both halves of a split one."""
    spans = [span for span in trace.spans if (span.step.op is not FORWARD) is backward]
    number = sum(span.step.op is not WEIGHT_GRAD for span in spans)
    return sum(span.end - span.start for span in spans) / number if number else 1.0


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; return the exit status."""
    options = read_command_line(Flags, arguments, description=__doc__)
    measured = None if options.measured is None else load_trace(options.measured)
    traces = [plan_of(options, measured)] + ([] if measured is None else [measured])
    if options.out is None:
        print("\n\n".join(timeline_text(trace) for trace in traces))
    else:
        save(traces, options.out)
        print(f"wrote {options.out}")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
