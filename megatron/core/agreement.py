"""Make all ranks of a group agree on success or failure: a lone raise is a hang."""

from __future__ import annotations

import torch.distributed as dist

from megatron.core.errors import MegatronError


def agree(problem: MegatronError | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise on every rank of `group` if any rank brings a problem; return otherwise.

    The ranks that had none raise the problem of the lowest rank that had one, with its rank named.

    Args:
        problem: what this rank found, or None.
        group: who must agree; None means all processes. A process without torch.distributed
            just raises its own problem.
    Communication:
        one all-gather of a small Python object on `group`.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        if problem is not None:
            raise problem
        return
    gathered: list[MegatronError | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, problem, group=group)
    if problem is not None:
        raise problem
    for group_rank, other in enumerate(gathered):
        if other is not None:
            global_rank = group_rank if group is None else dist.get_global_rank(group, group_rank)
            raise type(other)(
                f"rank {global_rank}: {other.found}",
                rule=other.rule,
                flags=other.flags,
                fix=other.fix,
            )
