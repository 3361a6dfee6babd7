"""Which parts of a step are captured as graphs of the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag

_ON_CPUS = "there are no graphs on CPUs, and steps run eagerly"


@dataclass
class GraphConfig:
    """Graphs of layers. Names and defaults are Megatron's."""

    cuda_graph_impl: str = flag(
        "none",
        choices=("none", "local", "transformer_engine", "full_iteration"),
        only_on_gpu=_ON_CPUS,
        note_values={"full_iteration": "micro batches are not in static buffers; no graph is made"},
    )
    """Start the kernels of each dense layer by graphs, one for each micro batch in flight: local,
    and transformer_engine does the same. A run says so where it cannot."""
    enable_cuda_graph: bool = flag(False, only_on_gpu=_ON_CPUS)
    """Megatron's earlier name of cuda-graph-impl local."""
    cuda_graph_warmup_steps: int = flag(3, part_of="cuda_graph_impl")
    """Passes of a layer before each capture; 0 makes one, in which libraries start."""

    @property
    def captures_layers(self) -> bool:
        """Whether layers are to be called by graphs."""
        return self.enable_cuda_graph or self.cuda_graph_impl in ("local", "transformer_engine")

    def graph_problems(self) -> list[MegatronError]:
        """Return what is wrong with these settings."""
        problems: list[MegatronError] = []
        if self.cuda_graph_warmup_steps < 0:
            problems.append(
                ConfigError(
                    f"cuda_graph_warmup_steps={self.cuda_graph_warmup_steps}.",
                    rule="a number of passes is not negative",
                    flags=["--cuda-graph-warmup-steps"],
                    fix="use --cuda-graph-warmup-steps 3",
                )
            )
        here = device.device_type()
        if self.captures_layers and here != "cpu" and not device.records_graphs():
            problems.append(
                ConfigError(
                    f"torch {torch.__version__} records no graphs on {here}.",
                    rule="layers are captured by torch.accelerator.Graph, or on CUDA by CUDAGraph",
                    flags=["--cuda-graph-impl", "--enable-cuda-graph"],
                    fix="leave out --cuda-graph-impl, or install a torch that has"
                    " torch.accelerator.Graph",
                )
            )
        return problems
