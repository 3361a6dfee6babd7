"""Tests of a rank's place in the pipeline: names that third parties import."""

from __future__ import annotations

from megatron.core.topology.group import Group
from megatron.core.utils import get_pg_rank, get_pg_size


def is_pp_first_stage(pp_group: Group) -> bool:
    """Return whether this rank is the first of the pipeline group (None is a pipeline of one)."""
    return get_pg_rank(pp_group) == 0


def is_pp_last_stage(pp_group: Group) -> bool:
    """Return whether this rank is the last of the pipeline group."""
    return get_pg_rank(pp_group) == get_pg_size(pp_group) - 1


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a chunk is the first of its rank; without virtual stages it is."""
    return not vp_size or vp_size == 1 or vp_stage == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether a chunk is the last of its rank; without virtual stages it is."""
    return not vp_size or vp_size == 1 or vp_stage == vp_size - 1
