"""Complete the gradients after the last backward pass, before the optimizer reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import sum_in_place
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import copied_parameters, tied_parameters
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.pipeline_parallel.layout import explicit_layout, loss_rank
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.topology.group import Group
from megatron.core.transformer.indexer import finish_indexer_step
from megatron.core.transformer.low_precision_layers import finish_low_precision_step
from megatron.core.transformer.moe.load_balancing import finish_router_step
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron.core.utils import get_model_config, unwrap_model


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: Tensor | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool = False,
    exact_factor: float | None = None,
) -> None:
    """Complete the gradients of all model chunks of this rank.

    Args:
        model: chunks, usually `DistributedDataParallel`. A bare module counts as the only replica,
            with gradients in `.grad`.
        num_tokens: tokens of this rank's share of the batch, on the last pipeline stage (other
            stages pass any tensor); gradients are then divided by their global number.
        exact_factor: gradients are exact sums (`layout_invariant_mode`), to be multiplied by it.
    Raises:
        NumericsError: on all ranks, if `check_for_nan_in_grad` found a bad gradient on any rank.
    Communication, in this order:
        reduction over data-parallel ranks; sums over the axes that `ParamMeta.partial_grad_axes`
        names ("tp": norms under sequence parallelism); the tied embedding over `embd`; parameters
        of all stages over `pp`; the number of tokens over `pp` and `dp_cp`; the load of experts
        over tp x cp x dp; the losses of indexers over dp x cp; amaxes of FP8 with delayed scaling
        over tp x cp x dp.
    """
    groups = resolve_groups(pg_collection)
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    raise_if_nonfinite(model)
    _sum_partial_gradients(model, groups)
    _sum_tied_gradients(model, groups)
    _sum_gradients_of_all_stages(model, groups)
    if num_tokens is not None or exact_factor is not None:
        _scale(model, num_tokens, exact_factor, groups)
    finish_router_step(model, groups)
    finish_indexer_step(model, groups)
    finish_low_precision_step(model, groups)


def raise_if_nonfinite(model: Sequence[nn.Module]) -> None:
    """Raise on all processes if any replica's own gradient was not finite.

    Communication: one all-reduce of one integer over all processes, where the check is on.
    """
    checking = [
        chunk
        for chunk in model
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.check_for_nan_in_grad
    ]
    if not checking:
        return
    problems = [problem for chunk in checking if (problem := chunk.nonfinite_problem())]
    if torch_collectives.has_peers(torch_collectives.world()):
        count = torch.tensor(
            [len(problems)], device=torch_collectives.tensor_device(torch_collectives.world())
        )
        if int(torch_collectives.all_reduce(count, torch_collectives.world())) == 0:
            return
    # The last chunk first: backward begins there.
    raise_on_all_ranks(problems[-1] if problems else None, torch_collectives.world())


def _sum_partial_gradients(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Sum gradients that are partial over an axis, in one message per axis and dtype."""
    partial: dict[tuple[str, torch.dtype], list[Tensor]] = {}
    for chunk in model:
        for parameter in chunk.parameters():
            for axis in get_param_meta(parameter).partial_grad_axes:
                if parameter.requires_grad and getattr(groups, axis).size() > 1:
                    for gradient in _reduced(chunk, parameter):
                        partial.setdefault((axis, gradient.dtype), []).append(gradient)
    for (axis, _), gradients in partial.items():
        group = getattr(groups, axis)
        # Reduced gradients may be in host memory.
        where = torch_collectives.tensor_device(group)
        joined = torch.cat([gradient.flatten() for gradient in gradients]).to(where)
        sum_in_place(joined, group)
        parts = joined.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, parts, strict=True):
            gradient.copy_(total.view_as(gradient))


def _sum_tied_gradients(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Add the gradients of the copies of the tied embedding (first and last stage, and one between
    them that predicts later tokens).

    Sharded gradients are added shard by shard: all stages cut the weight at the same places. In a V
    schedule this rank holds the first and the last stage.
    """
    if groups.embd.size() == 1:
        return
    by_stage: list[list[Tensor]] = []
    for chunk in model:
        inner = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk
        tied = tied_parameters(inner)
        if tied:
            by_stage.append([g for parameter in tied for g in _reduced(chunk, parameter)])
    num_copies, layout = 2, explicit_layout(get_model_config(model[0]))
    if layout is not None and layout.mtp_on_earlier_stage:
        is_tied = getattr(unwrap_model(model[0]), "share_embeddings_and_output_weights", False)
        num_copies = len(layout.embedding_holders(is_tied=is_tied))
    _sum_copies(by_stage, groups.embd if len(by_stage) < num_copies else None)


def _sum_gradients_of_all_stages(
    model: Sequence[nn.Module], groups: ProcessGroupCollection
) -> None:
    """Add the gradients of parameters that are copied in every chunk."""
    by_chunk = [
        [
            gradient
            for parameter in copied_parameters(chunk)
            for gradient in _reduced(chunk, parameter)
        ]
        for chunk in model
    ]
    _sum_copies(by_chunk, groups.pp if groups.pp.size() > 1 else None)


def _sum_copies(by_chunk: list[list[Tensor]], group: Group | None) -> None:
    """Replace all copies of a gradient by their sum: over this rank's chunks, then over `group`."""
    for total, *others in zip(*by_chunk, strict=True):
        for gradient in others:
            total.add_(gradient)
        if group is not None:
            on_device = total.view(-1).to(torch_collectives.tensor_device(group))
            sum_in_place(on_device, group)
            if on_device.device != total.device:
                total.view(-1).copy_(on_device)
        for gradient in others:
            gradient.copy_(total)


def _scale(
    model: Sequence[nn.Module],
    num_tokens: Tensor | None,
    exact_factor: float | None,
    groups: ProcessGroupCollection,
) -> None:
    factor = 1.0 if exact_factor is None else exact_factor
    if num_tokens is not None:
        total = num_tokens.clone()
        if groups.pp.size() > 1:
            # Only the last stage has counted tokens.
            last = loss_rank(get_model_config(model[0]))
            torch_collectives.broadcast(total, groups.pp, last)
        torch_collectives.all_reduce(total, groups.dp_cp)
        # A batch without learned tokens has zero gradients; keep them.
        factor /= max(float(total), 1.0)
    for chunk in model:
        if isinstance(chunk, DistributedDataParallel):
            if exact_factor is None:
                chunk.scale_gradients(factor)
            else:
                chunk.round_gradients(factor)
        else:
            for parameter in chunk.parameters():
                for gradient in _reduced(chunk, parameter):
                    gradient.mul_(factor)


def _reduced(chunk: nn.Module, parameter: nn.Parameter) -> list[Tensor]:
    """Return the pieces of a parameter's gradient that are final on this rank."""
    if isinstance(chunk, DistributedDataParallel):
        found = [shard.reduced_gradient() for shard in chunk.shards_of(parameter)]
        return [gradient for gradient in found if gradient is not None]
    return [] if parameter.grad is None else [parameter.grad]
