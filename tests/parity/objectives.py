"""Losses after pretraining, as `tests.parity.training_case` trains with them.

Everything a loss needs besides the model is drawn for the global batch, so that it is the same in
every layout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.post_training.heads import replace_head
from megatron.post_training.log_probs import logits_of
from megatron.post_training.loss_functions import (
    contrastive_loss_func,
    distillation_loss_func,
    dpo_loss_func,
    grpo_loss_func,
    reward_loss_func,
)

HEADS = {"reward": 1, "embedding": None}
"""Objectives that want another head -> its outputs."""


def with_head(objective: str, chunk: Any) -> Any:
    """Return a chunk with the head that an objective wants."""
    return replace_head(chunk, HEADS[objective]) if objective in HEADS else chunk


def entries(
    objective: str, step: int, batch: dict[str, Tensor], vocabulary: int
) -> dict[str, Tensor]:
    """Return what an objective needs of the global batch [samples, s] besides its tokens."""
    if not objective:
        return {}
    draw = torch.Generator().manual_seed(3000 + step)
    shape = batch["tokens"].shape
    labels = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    near = -4.5 + 0.3 * torch.randn(2, *shape, generator=draw)
    last = torch.randint(shape[1], (shape[0], 1), generator=draw)
    return {
        "labels": labels,
        "old_log_probs": near[0],
        "reference_log_probs": near[1].masked_fill(labels == -100, 0.0),
        "advantages": torch.randn(shape[0], 1, generator=draw).expand(shape).contiguous(),
        "loss_mask": torch.zeros(shape).scatter_(1, last, 1.0),
        "margins": torch.full(shape, 0.3),
        "teacher_logits": torch.randn(*shape, vocabulary, generator=draw),
    }


def forward_step_of(
    objective: str, groups: ProcessGroupCollection, num_valid: int
) -> Callable[..., Any]:
    """Return the forward step that trains with an objective."""
    of_vocabulary = {"num_valid": num_valid, "pg_collection": groups}
    cp_size = groups.cp.size()

    def loss_func(batch: dict[str, Tensor], output: Tensor) -> Any:
        if objective == "distillation":
            return _distillation(batch, output, groups, num_valid)
        found = {
            "grpo": partial(grpo_loss_func, kl_coef=0.2, entropy_coef=0.1, temperature=0.8,
                            clip_ratio=0.1, clip_ratio_high=0.3, **of_vocabulary),
            "dpo": partial(dpo_loss_func, beta=0.3, label_smoothing=0.1, **of_vocabulary),
            "reward": partial(reward_loss_func, pg_collection=groups),
            "embedding": partial(contrastive_loss_func, temperature=0.2, pg_collection=groups),
        }[objective]  # fmt: skip
        loss, _report = found(batch, output)
        # The reports of the ranks of cp are added up.
        return loss, {"lm loss": torch.stack((loss.detach(), torch.ones(()))) / cp_size}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        return logits_of(chunk, batch), partial(loss_func, batch)

    return forward_step


def _distillation(
    batch: dict[str, Tensor], logits: Tensor, groups: ProcessGroupCollection, num_valid: int
) -> Any:
    width = logits.shape[-1]
    padded = F.pad(batch["teacher_logits"], (0, width * groups.tp.size() - num_valid))
    teacher = padded[..., groups.tp.rank() * width :][..., :width]
    loss, count, report = distillation_loss_func(
        batch, teacher, logits, temperature=1.5, num_valid=num_valid, pg_collection=groups
    )
    return loss, count, {"lm loss": report["distillation loss"]}
