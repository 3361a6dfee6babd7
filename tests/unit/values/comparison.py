"""Every loss twice: by the product, through a schedule, and as a formula in fp64.

A case returns the gradients of a step and what the step reports. `plant` shifts the mask by one
token at the place where the product reads it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit.values.draws import SAMPLES, Draw

Values = dict[str, Tensor]
"""Names of parameters -> gradients, and names of reports -> means []."""


@dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        product, formula: the values of a step.
        plant: shifts the mask in the product.
        without: feature of the draws that the loss is not tested with -> the reason.
    """

    product: Callable[[Draw], Values]
    formula: Callable[[Draw], Values]
    plant: Callable[[pytest.MonkeyPatch], None]
    without: Mapping[str, str] = field(default_factory=dict)

    def takes(self, drawn: Draw) -> bool:
        """Return whether a draw has none of the features that the loss is not tested with."""
        return not ("per token" in self.without and drawn.per_token)


def shifted(mask: Tensor) -> Tensor:
    """Return a mask [b, s] that belongs to the tokens before."""
    return mask.roll(-1, dims=1)


def values(gradients: Mapping[str, Tensor], reports: Mapping[str, float]) -> Values:
    """Join what a step gave."""
    return {**gradients, **{n: torch.tensor(v, dtype=torch.float64) for n, v in reports.items()}}


def by_autograd(model: nn.Module, loss: Tensor, reports: Mapping[str, Tensor]) -> Values:
    """Return the gradients of a formula's loss, and its reports."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}
    return {**grads, **{name: value.detach() for name, value in reports.items()}}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of labels [b, s] under logits [b, s, v], in fp64."""
    return -logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def mean_of(sums: Any, counts: Any) -> Tensor:
    return sum(sums) / sum(counts).clamp(min=1)


def plant_in_script(script: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch):
        right = script.loss_func
        patch.setattr(script, "loss_func", lambda mask, *rest: right(shifted(mask), *rest))

    return plant


def plant_in_batch(owner: Any, name: str, entry: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets a loss function read an entry of its batch that belongs to other tokens."""

    def plant(patch):
        right = getattr(owner, name)

        def wrong(batch, *rest, **options):
            changed = batch[entry]
            if entry != "labels":
                changed = shifted(changed)
            else:  # -100 takes a token out
                counts = shifted(changed != IGNORED_LABEL)
                changed = changed.clamp(min=0).where(counts, IGNORED_LABEL)
            return right({**batch, entry: changed}, *rest, **options)

        patch.setattr(owner, name, wrong)

    return plant


class Given(nn.Module):
    """A model whose outputs are its parameters, one per micro batch."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        self.outputs = nn.ParameterList(outputs)

    def set_input_tensor(self, _: object) -> None:
        """Take nothing: it is the first stage."""


def given(drawn: Draw, *shape: int) -> Given:
    outputs = (drawn.normal(f"output {m}", SAMPLES, *shape) for m in range(drawn.num_microbatches))
    return Given(*outputs)
