"""A schedule of one file, as another project would write it.

Eager 1F1B ("On Optimizing the Communication of Model Parallelism", section 4, arXiv:2211.05322):
1F1B with as many more forwards ahead as a message has ranks to go, which hide its transfer.
"""

from megatron.core.pipeline_parallel.instructions import BACKWARD, FORWARD, Orders, Placement, Step
from megatron.core.pipeline_parallel.schedule import Schedule, StepPlan


def _orders(plan: StepPlan) -> Orders:
    p, m = plan.pipeline_size, plan.num_microbatches

    def order(rank: int) -> list[Step]:
        warm_up = min(2 * (p - rank - 1), m)
        steps = [Step(FORWARD, microbatch, 0) for microbatch in range(warm_up)]
        for microbatch in range(m):
            if microbatch + warm_up < m:
                steps.append(Step(FORWARD, microbatch + warm_up, 0))
            steps.append(Step(BACKWARD, microbatch, 0))
        return steps

    return Orders(plan.schedule, Placement(p), m, False, order)


EAGER = Schedule(
    name="eager-1f1b",
    title="Eager 1F1B",
    orders=_orders,
    min_microbatches=lambda plan: plan.pipeline_size,
    min_microbatches_rule="the forwards ahead hide a transfer on every rank",
)
