"""Losses after pretraining in every layout of four ranks, against one process.

    python -m tests.parity.objectives_table

Trains two steps with each loss; prints the largest errors of a layout, and exits with status 1 if
one exceeds its named tolerance.
"""

import sys
from dataclasses import replace

from megatron.core.settings.command_line import NoFlags, read_command_line
from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.log_probs import layouts_of
from tests.parity.table import exceeds, figures, run_case, serial_run

OBJECTIVES = ("grpo", "dpo", "reward", "embedding", "distillation")
MODEL = ModelCase("llama", False, 0.0, packed=True, experts="deepseek", replayed=True)


def serial_case(layout: LayoutCase, objective: str) -> LayoutCase:
    """Return the layout of one process whose micro batches hold the same rows.

    The keys of a contrastive loss are those of all replicas.
    """
    size = layout.micro_batch_size * (layout.dp if objective == "embedding" else 1)
    return replace(layout.serial, micro_batch_size=size)


def main() -> int:
    """Compare and print; return the exit status."""
    read_command_line(NoFlags, description=__doc__)
    failures = 0
    for objective in OBJECTIVES:
        model = replace(MODEL, objective=objective)
        for found in layouts_of(4, MODEL):
            recomputes, samples = found.pp == 1, 8 * found.dp
            layout = replace(found, micro_batch_size=2, samples=samples, recomputes=recomputes)
            serial = serial_run(serial_case(layout, objective), model, 2)
            errors = compare(run_case(layout, model, 2), serial)
            wrong = exceeds(errors)
            failures += bool(wrong)
            print(f"{objective:13}{str(layout):58}{figures(errors)} {' '.join(wrong)}", flush=True)
    print(f"{failures} layouts exceed a tolerance")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
