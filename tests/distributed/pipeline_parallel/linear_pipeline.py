"""A stack of linear layers cut into stages, and its serial oracle."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.instructions import Placement
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.linear_with_overlap import LinearCommSpec, parallel_linear
from megatron.core.topology.group import SINGLE_RANK

SEQUENCE, BATCH, HIDDEN = 6, 2, 5
LAYERS_PER_STAGE = 2


@dataclass
class LinearConfig(ModelParallelConfig):
    """What a stage of linear layers needs to know."""

    hidden_size: int = HIDDEN


def layer(index: int) -> nn.Linear:
    """Return layer `index` of the whole model, the same wherever it is built."""
    generator = torch.Generator().manual_seed(100 + index)
    made = nn.Linear(HIDDEN, HIDDEN)
    with torch.no_grad():
        made.weight.copy_(torch.randn(HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5)
        made.bias.copy_(torch.randn(HIDDEN, generator=generator) / 10)
    return made


def sample(microbatch: int, sequence: int = SEQUENCE) -> Tensor:
    """Return the input [s, b, h] of a micro batch."""
    generator = torch.Generator().manual_seed(microbatch)
    return torch.randn(sequence, BATCH, HIDDEN, generator=generator)


class LinearStage(nn.Module):
    """Consecutive layers of the model, with the interface that stages have."""

    def __init__(self, config: Any, first_layer: int, num_layers: int) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layer(first_layer + i) for i in range(num_layers))
        self.input: Tensor | None = None

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input = tensor

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.input is None else self.input
        self.input = None
        for linear in self.layers:
            x = torch.tanh(
                parallel_linear(x, linear.weight, linear.bias, LinearCommSpec(SINGLE_RANK))
            )
        return x


def mean_square(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (loss, report)."""
    loss = output.square().mean()
    return loss, {"loss": loss.detach()}


def forward_step(iterator: Any, model: nn.Module) -> Any:
    """Run one micro batch through one chunk."""
    return model(next(iterator)), mean_square


def build_chunks(groups: ProcessGroupCollection, config: Any, num_chunks: int) -> list[LinearStage]:
    """Build this rank's chunks."""
    return [
        LinearStage(config, stage * LAYERS_PER_STAGE, LAYERS_PER_STAGE)
        for stage in stages(groups, config, num_chunks)
    ]


def stages(groups: ProcessGroupCollection, config: Any, num_chunks: int) -> list[int]:
    """Return the position in the model of each chunk of this rank."""
    shape = schedule_named(config.pipeline_schedule).shape
    placement = Placement(groups.pp.size(), num_chunks, shape)
    return [placement.stage(groups.pp.rank(), chunk) for chunk in range(num_chunks)]


def run_step(
    groups: ProcessGroupCollection,
    chunks: list[LinearStage],
    num_microbatches: int,
    *,
    sequences: list[int] | None = None,
    forward_step: Any = forward_step,
    recorder: PipelineRecorder | None = None,
    **options: Any,
) -> list[Any]:
    """Run one step through the public door."""
    lengths = sequences or [SEQUENCE] * num_microbatches
    batches = [[sample(i, s) for i, s in enumerate(lengths)] for _ in chunks]
    iterators = [iter(batch) for batch in batches]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        pg_collection=groups,
        recorder=recorder,
        **options,
    )


def gradients(chunks: list[LinearStage]) -> list[list[Tensor]]:
    """Return the gradients by chunk."""
    return [[p.grad for p in chunk.parameters()] for chunk in chunks]  # type: ignore[misc]


def serial_gradients(
    num_stages: int, num_microbatches: int, sequences: list[int] | None = None
) -> list[list[Tensor]]:
    """Return the gradients by stage of the plain loop that a pipeline must reproduce."""
    lengths = sequences or [SEQUENCE] * num_microbatches
    model = LinearStage(None, 0, num_stages * LAYERS_PER_STAGE)
    for microbatch, length in enumerate(lengths):
        loss, _ = mean_square(model(sample(microbatch, length)))
        (loss / num_microbatches).backward()
    grads = [p.grad for p in model.parameters()]
    per_stage = 2 * LAYERS_PER_STAGE
    return [grads[i : i + per_stage] for i in range(0, len(grads), per_stage)]  # type: ignore[misc]


def assert_equal_to_serial(
    groups: ProcessGroupCollection,
    chunks: list[LinearStage],
    num_microbatches: int,
    sequences: list[int] | None = None,
) -> None:
    """Fail unless every gradient of this rank equals the serial one bit for bit."""
    expected = serial_gradients(groups.pp.size() * len(chunks), num_microbatches, sequences)
    here = stages(groups, chunks[0].config, len(chunks))
    for stage, grads in zip(here, gradients(chunks), strict=True):
        for mine, theirs in zip(grads, expected[stage], strict=True):
            assert torch.equal(mine, theirs), f"stage {stage}: {mine - theirs}"
