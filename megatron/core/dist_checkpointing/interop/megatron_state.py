"""The plain state of Megatron-LM's checkpoints, in this program's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.dist_checkpointing.interop.contents import ContentsBuilder, plain_values

_KEPT = ("iteration", "num_floating_point_operations_so_far", "opt_param_scheduler")
_COUNTERS = ("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")
_SCALER = ("scale", "growth_tracker", "hysteresis_tracker")
_LAYOUT = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size", "dp": "data_parallel_size",
    "ep": "expert_model_parallel_size",
}  # fmt: skip


def common_values(common: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state to keep, settings of the run) from the common state.

    Counters of samples stand among Megatron's settings; loss scaler and scheduler have the same
    fields here and there. Random states belong to another generator and are left out.
    """
    args = common.get("args")
    run = plain_values(args) if isinstance(args, dict) else {}
    state = {name: common[name] for name in _KEPT if common.get(name) is not None}
    state |= {name: run[name] for name in _COUNTERS if isinstance(run.get(name), int)}
    scaler = next(_found(common.get("optimizer"), "grad_scaler"), None)
    if isinstance(scaler, dict) and all(name in scaler for name in _SCALER):
        state["grad_scaler"] = {name: scaler[name] for name in _SCALER}
    return state, run


def learn_from_optimizer(builder: ContentsBuilder, optimizer: object) -> None:
    """Take over how many updates the optimizer has made."""
    builder.optimizer_step = steps_in(optimizer)


def steps_in(optimizer: object) -> int:
    """Return how many updates an optimizer's plain state says that it has made; 0 if nothing."""
    found = [value for name in ("step", "common_step") for value in _found(optimizer, name)]
    numbers = plain_values({str(i): value for i, value in enumerate(found)}).values()
    steps = [value for value in numbers if isinstance(value, (int, float))]
    return int(max(steps, default=0))


def describe_layout(run: Mapping[str, object]) -> dict[str, Any]:
    """Return the sizes of the axes that the settings name."""
    return {axis: run[name] for axis, name in _LAYOUT.items() if isinstance(run.get(name), int)}


def _found(tree: Any, name: str) -> Iterator[Any]:
    """Yield every value that is under `name` in nested containers."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == name and value is not None:
                yield value
            else:
                yield from _found(value, name)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _found(value, name)
