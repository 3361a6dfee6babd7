"""One optimizer step: forward and backward of all micro batches, then check, clip and update.

Other modules wrap a step: `megatron.resilience.spike_guard` skips iterations and rolls back, and
`megatron.resilience.rerun` reruns a step.
"""

from __future__ import annotations

from megatron.core.parameters.rng import rng_state
from megatron.training.run.context import TrainingContext
from megatron.training.run.loss_reduction import Report, with_loss_tokens
from megatron.training.run.state import BatchPlan, TakenStep, TrainState
from megatron.training.run.update import decision_of


def train_step(context: TrainingContext, state: TrainState, plan: BatchPlan) -> TakenStep:
    """Train on one global batch.

    The update is made only if loss and gradients are finite on all ranks; otherwise weights and
    optimizer are unchanged.

    Raises:
        NumericsError: on all ranks, naming iteration, rank and micro batch.
    """
    first_sample = state.consumed_train_samples
    reports = compute_gradients(context, context.data.train, first_sample, plan)
    return decision_of(context).finish(context, state, plan, reports)


def compute_gradients(
    context: TrainingContext,
    data: object,
    first_sample: int,
    plan: BatchPlan,
    *,
    dp_rank: int | None = None,
) -> list[Report]:
    """Compute the reduced gradients of one global batch; see `forward_backward`."""
    for chunk in context.model:
        chunk.zero_grad_buffer()  # type: ignore[operator]  # a DistributedDataParallel
    context.optimizer.zero_grad()
    return forward_backward(context, data, first_sample, plan, dp_rank=dp_rank)


def forward_backward(
    context: TrainingContext,
    data: object,
    first_sample: int,
    plan: BatchPlan,
    *,
    forward_only: bool = False,
    dp_rank: int | None = None,
    **options: object,
) -> list[Report]:
    """Run all micro batches of one global batch through the pipeline.

    Args:
        first_sample: absolute index of the batch's first sample, a key of random numbers.
        dp_rank: the replica of the samples. Default: this rank's replica.
    Returns:
        the reports of the loss function, one per micro batch on the last stage, [] on others.
    """
    rng_state().begin_step(
        first_sample,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=context.groups.dp.rank() if dp_rank is None else dp_rank,
        dp_size=context.groups.dp.size(),
    )
    if not forward_only and needs_tokens_per_microbatch(context):
        data, tokens = with_loss_tokens(data, plan.num_microbatches, context.groups)
        num_rows = plan.global_batch_size // plan.micro_batch_size
        options["tokens_per_microbatch"] = None if tokens is None else tokens / num_rows
    return context.forward_backward(
        forward_step_func=context.forward_step,
        data_iterator=data,
        model=context.model if len(context.model) > 1 else context.model[0],
        num_microbatches=plan.num_microbatches,
        seq_length=context.run.model.seq_length,
        micro_batch_size=plan.micro_batch_size,
        decoder_seq_length=context.run.encoders.decoder_seq_length,
        forward_only=forward_only,
        pg_collection=context.groups,
        **options,
    )


def needs_tokens_per_microbatch(context: TrainingContext) -> bool:
    """Return whether losses inside the model must be scaled by the tokens of a step.

    This is the case if the main loss is a sum over tokens, and routers or indexers add losses.
    """
    config = context.config
    of_routers = config.num_moe_experts and (config.balance_losses() or config.moe_z_loss_coeff)
    return config.calculate_per_token_loss and bool(of_routers or config.trains_indexer)
