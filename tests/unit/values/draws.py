"""Batches of one step, drawn: uneven masks, padding, documents, several micro batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK
from megatron.training.run.loss_reduction import DeferredLosses

SAMPLES, LENGTH, VOCABULARY = 4, 8, 19
SEEDS = range(6)


@dataclass(frozen=True)
class Draw:
    """One step. Lists have one entry per micro batch.

    Attributes:
        per_token: gradients are divided by the tokens of the step, not per micro batch.
        text: int64 [b, s + 1]; masks: fp32 [b, s], 1 where the target at a position counts.
        padding: bool [b, s], True at the ends of sequences; masks are 0 there.
        documents: int32 [b, s], where the document of each position begins; None if a sequence is
            one document.
    """

    seed: int
    per_token: bool
    text: list[Tensor]
    masks: list[Tensor]
    padding: list[Tensor]
    documents: list[Tensor] | None

    @property
    def num_microbatches(self) -> int:
        return len(self.masks)

    def generator(self, name: str) -> torch.Generator:
        """Return a generator for further numbers of this draw."""
        return torch.Generator().manual_seed(1000 * self.seed + sum(map(ord, name)))

    def normal(self, name: str, *shape: int) -> Tensor:
        """Return normal numbers of this draw."""
        return torch.randn(*shape, generator=self.generator(name))


def draw(seed: int) -> Draw:
    """Draw a step; neighbouring seeds differ in normalisation, packing and micro batches."""
    generator = torch.Generator().manual_seed(seed)
    shape, count = (SAMPLES, LENGTH), 1 + seed % 3
    text, masks, padding, documents = [], [], [], []
    for _ in range(count):
        text.append(torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator))
        # No two samples have the same share of tokens that count.
        shares = torch.rand(SAMPLES, 1, generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SAMPLES, 1), generator=generator)
        is_padding = torch.arange(LENGTH) >= lengths
        padding.append(is_padding)
        counts = (torch.rand(shape, generator=generator) < shares) & ~is_padding
        masks.append(counts.float())
        begins = torch.rand(shape, generator=generator) < 0.3
        positions = torch.arange(LENGTH).expand(shape)
        documents.append(torch.where(begins, positions, 0).cummax(1).values.int())
    is_packed = seed // 2 % 2 == 1
    return Draw(seed, seed % 2 == 1, text, masks, padding, documents if is_packed else None)


FEATURES: dict[str, Callable[[Draw], bool]] = {
    "uneven masks": lambda x: len({int(row.sum()) for mask in x.masks for row in mask}) > 2,
    "padding": lambda x: any(bool(p.any()) for p in x.padding),
    "several documents": lambda x: x.documents is not None,
    "several micro batches": lambda x: x.num_microbatches > 1,
    "mean": lambda x: not x.per_token,
    "per token": lambda x: x.per_token,
}
"""What a draw may have -> whether it has it."""


def objective(drawn: Draw, sums: list[Tensor], counts: list[Tensor]) -> Tensor:
    """Return the loss of a step, of the sums and numbers of tokens of its micro batches."""
    if drawn.per_token:
        return sum(sums) / sum(counts).clamp(min=1)  # type: ignore[union-attr,return-value]
    means = [total / count.clamp(min=1) for total, count in zip(sums, counts, strict=True)]
    return sum(means) / len(means)  # type: ignore[return-value]


def train_step(
    drawn: Draw, model: nn.Module, forward_step: Callable[[int, Any], Any]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradients of a step, and the means of what its loss function reported.

    Args:
        forward_step: (number of the micro batch, model) -> (output, loss function).
    """
    groups = ProcessGroupCollection.single()
    ProcessGroupCollection.set_current(groups)
    config = model.config
    config.calculate_per_token_loss = drawn.per_token
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    model.zero_grad()
    reports = get_forward_backward_func()(
        forward_step_func=lambda numbers, chunk: forward_step(next(numbers), chunk),
        data_iterator=iter(range(drawn.num_microbatches)),
        model=model,
        num_microbatches=drawn.num_microbatches,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        tokens_per_microbatch=torch.stack(drawn.masks).sum() / drawn.num_microbatches,
        pg_collection=groups,
    )
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return gradients, DeferredLosses.of(reports).read().means(SINGLE_RANK)
