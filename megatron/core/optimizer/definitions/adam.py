"""Adam, and with decoupled weight decay AdamW.

D. P. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", arXiv 1412.6980; I. Loshchilov,
F. Hutter, "Decoupled Weight Decay Regularization", arXiv 1711.05101. The kernels are torch's; where
Triton runs, one pass over fp32 state also writes the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.optimizer.definition import (
    ADAM,
    ADAMW,
    EagerOptimizer,
    ModelTensors,
    OptimizerDefinition,
    Pieces,
    UpdateSettings,
    eager,
    has_fused_kernel,
)

SCATTERED = "tensors that are strided or on several devices"
update_fp32: Callable[..., None] = triton_kernels.deferred("adam", "update_fp32")


class PublishingAdam(EagerOptimizer):
    """Base of Adam and AdamW whose update also writes the model's weights.

    Attributes:
        published: id of a main tensor -> the model's weight in half precision, of its shape.
    """

    published: Mapping[int, Tensor]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every main tensor that has a gradient, and write the model's weights."""
        mains = [main for group in self.param_groups for main in group["params"]]
        if mains:
            tensors, device = (*mains, *self.published.values()), mains[0].device
            is_plain = all(x.is_contiguous() and x.device == device for x in tensors)
            request = Request.of(mains[0], () if is_plain else (SCATTERED,))
            FP32_UPDATES.choose(request).kernel.run(self)

    def step_apart(self) -> None:
        """Update by torch's kernel, then copy the main tensors to the model's weights."""
        super().step()
        mains = [x for group in self.param_groups for x in group["params"]]
        copied = [main for main in mains if id(main) in self.published]
        if copied:
            torch._foreach_copy_([self.published[id(main)] for main in copied], copied)

    def step_in_one_pass(self) -> None:
        """Update by one launch for each tensor, which reads and writes everything once."""
        adam: Any = self  # `_init_group`, `grad_scale` and `found_inf` of torch's classes
        is_scaled = hasattr(self, "found_inf")
        scaling = (adam.grad_scale, adam.found_inf) if is_scaled else None
        counted = [1.0 - adam.found_inf] if is_scaled else []
        for group in self.param_groups:
            lists: list[list[Tensor]] = [[] for _ in range(6)]
            adam._init_group(group, *lists)
            mains, gradients, firsts, seconds, _, steps = lists
            if not mains:
                continue
            torch._foreach_add_(steps, counted * len(steps) if is_scaled else 1.0)
            weights = [self.published.get(id(main)) for main in mains]
            for main, gradient, first, second, step, weight in zip(
                mains, gradients, firsts, seconds, steps, weights, strict=True
            ):
                update_fp32(
                    gradient.contiguous(), main, first, second, weight, step, scaling, group,
                    isinstance(self, torch.optim.AdamW),
                )  # fmt: skip
            # As a copy does: autograd and caches of weights compare versions.
            torch.autograd.graph.increment_version([x for x in weights if x is not None])


def _publishing(kind: type[torch.optim.Optimizer]) -> Any:
    return type(kind.__name__, (PublishingAdam, eager(kind)), {"__doc__": kind.__doc__})


_Adam, _AdamW = _publishing(torch.optim.Adam), _publishing(torch.optim.AdamW)

_APART = Kernel("torch", PublishingAdam.step_apart, frozenset({SCATTERED}))
_ONE_PASS = Kernel(
    "triton", PublishingAdam.step_in_one_pass, missing=triton_kernels.missing, library=True
)
FP32_UPDATES: KernelTable[Callable[[PublishingAdam], None]] = KernelTable(
    "Adam on fp32 state", {"cpu": (_APART,), OTHER_DEVICES: (_ONE_PASS, _APART)}
)
"""Methods that update all tensors of an optimizer."""


def update_adam(pieces: Pieces, *, decouples_decay: bool) -> None:
    """Update `pieces` in place."""
    device = pieces.weights[0].device
    beta1, beta2 = pieces.settings["betas"]
    (adamw if decouples_decay else adam)(
        pieces.weights,
        pieces.gradients,
        list(pieces.states["exp_avg"]),
        list(pieces.states["exp_avg_sq"]),
        [],
        [torch.full((), float(pieces.step), device=device) for _ in pieces.weights],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=pieces.settings["lr"],
        weight_decay=pieces.settings["weight_decay"],
        eps=pieces.settings["eps"],
        maximize=False,
        **pieces.scaling(),
    )


def _constants(config: UpdateSettings) -> dict[str, Any]:
    return {"betas": (config.adam_beta1, config.adam_beta2), "eps": config.adam_eps}


def _build(config: UpdateSettings, param_groups: list[dict[str, Any]], parts: ModelTensors) -> Any:
    optimizer = (_AdamW if config.decoupled_weight_decay else _Adam)(
        param_groups,
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
        fused=has_fused_kernel(param_groups),
        **_constants(config),
    )
    optimizer.in_whole_vectors = config.in_whole_vectors
    mine = {id(main) for group in param_groups for main in group["params"]}
    optimizer.published = {
        id(item.main_param): item.shard.values.detach()
        for item in parts.shards
        if item.is_copy and id(item.main_param) in mine
    }
    return optimizer


OPTIMIZER = OptimizerDefinition(
    name="adam",
    state_names=("exp_avg", "exp_avg_sq"),
    constants=_constants,
    update=lambda config: partial(update_adam, decouples_decay=config.decoupled_weight_decay),
    kind=lambda config: ADAMW if config.decoupled_weight_decay else ADAM,
    build=_build,
)
