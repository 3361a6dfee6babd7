"""What an optimizer is: one record that says its state, its constants and its update.

Each file of `definitions/` holds one as `OPTIMIZER`. The flags, the checks of a run, the estimate
of memory and the builders read it; nothing asks for a name. An optimizer whose elements do not
depend on each other is one function on pieces of tensors: full ones, shards of any ZeRO stage, and
chunks of state that is kept in few bytes, in host memory or in files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer.chunk_updates import OTHER_UPDATE

if TYPE_CHECKING:
    from megatron.core.distributed.communication import Mesh
    from megatron.core.optimizer.main_param_shard import MainParamShard
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

States = Mapping[str, Sequence[Tensor]]
"""name -> one fp32 tensor per piece."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of parameters of one group, and all that one update of them needs."""

    weights: list[Tensor]
    gradients: list[Tensor]
    """Both fp32 and of one shape; gradients may be changed."""
    states: States
    settings: Mapping[str, Any]
    """ "lr" and "weight_decay" of the group, and the constants of the optimizer."""
    step: int
    """Updates before this one."""
    factor: float = 1.0
    """On the gradients."""

    def scaling(self) -> dict[str, Any]:
        """Return the arguments by which a fused kernel divides gradients as it reads them."""
        if self.factor == 1.0:
            return {}
        device = self.weights[0].device
        return {
            "grad_scale": torch.tensor(1.0 / self.factor, device=device),
            "found_inf": torch.tensor(0.0, device=device),
        }

    def scaled_gradients(self) -> list[Tensor]:
        """Return the gradients times the factor, for an optimizer without a fused kernel."""
        if self.factor == 1.0:
            return self.gradients
        return [gradient.mul_(self.factor) for gradient in self.gradients]


Update = Callable[[Pieces], None]
"""Updates weights and states in place; no element depends on another."""


@dataclass(frozen=True)
class ElementwiseUpdate:
    """An update with the constants of a run."""

    state_names: tuple[str, ...]
    update: Update
    constants: Mapping[str, Any] = field(default_factory=dict)
    kind: str = OTHER_UPDATE
    """What a kernel that updates state as it is stored must support."""


@dataclass(frozen=True)
class ModelTensors:
    """What optimizers may need to know of this rank's model besides the tensors they update."""

    shards: Sequence[MainParamShard]
    matrices: Sequence[nn.Parameter]
    """Parameters of Muon, also those of which this rank owns no piece."""
    groups: ProcessGroupCollection
    meshes: tuple[Mesh, Mesh]
    """Replicas of dense and of expert parameters."""


def _no_constants(_config: OptimizerConfig) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class OptimizerDefinition:
    """An optimizer, as `--optimizer` names it."""

    name: str
    """Value of `--optimizer`, `OptimizerConfig.optimizer` and "optimizer" of a parameter group."""
    state_names: tuple[str, ...]
    """Names of the state tensors, as in checkpoints; each has the shape of its parameter. The one
    called "exp_avg_sq" is kept as `--exp-avg-sq-dtype` says, others as `--exp-avg-dtype`."""
    constants: Callable[[OptimizerConfig], dict[str, Any]] = _no_constants
    """Settings that parameter groups have beside "lr" and "weight_decay": a schedule may change
    them, and checkpoints keep them."""
    update: Callable[[OptimizerConfig], Update] | None = None
    """Returns the update of pieces; None for one whose elements depend on each other, so that
    its state stays in fp32 on the device."""
    kind: Callable[[OptimizerConfig], str] | None = None
    """Returns `ElementwiseUpdate.kind`, where kernels know the update."""
    build: Callable[[OptimizerConfig, list[dict[str, Any]], ModelTensors], Any] | None = None
    """Returns a `torch.optim.Optimizer` over parameter groups of main tensors, where another than
    `ElementwiseOptimizer` is faster or needed."""

    def elementwise(self, config: OptimizerConfig) -> ElementwiseUpdate:
        """Return the update with the constants of a run.

        Raises:
            ConfigError: its elements depend on each other.
        """
        if self.update is None:
            raise ConfigError(
                f"{self.name} with optimizer state in few bytes or off the device.",
                rule="only optimizers that update each element by itself work on chunks of state",
                flags=["--optimizer", "--param-rules", "--use-precision-aware-optimizer",
                       "--optimizer-cpu-offload", "--optimizer-offload-path"],
                fix="use --use-distributed-optimizer to shard its state, or --optimizer lion",
            )  # fmt: skip
        found = ElementwiseUpdate(self.state_names, self.update(config), self.constants(config))
        return found if self.kind is None else replace(found, kind=self.kind(config))


_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)


class EagerOptimizer(torch.optim.Optimizer):
    """Base of optimizers that are not compiled.

    Several methods of `torch.optim` import `torch._dynamo` at their first call, to mark the end of
    a graph: 1.6 s of CPU time and 70 MB of each process (torch 2.13, x86). These are the functions
    before torch wrapped them.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


def eager(kind: type[_Kind]) -> type[_Kind]:
    """Return a class of `torch.optim` whose step does not differentiate and is not compiled."""
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (EagerOptimizer, kind), {"step": step, "__doc__": kind.__doc__})


class ElementwiseOptimizer(EagerOptimizer):
    """Runs an elementwise update on full tensors, or on any shards of them."""

    def __init__(
        self, params: ParamsT, update: ElementwiseUpdate, *, lr: float, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **update.constants})
        self.update = update

    def initialize_state(self) -> None:
        """Allocate the state that the first update would allocate."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._state_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        if closure is not None:
            raise TypeError(f"{type(self).__name__}.step() takes no closure: gradients are ready")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                states = {name: [state[name]] for name in self.update.state_names}
                step = int(state["step"])
                self.update.update(Pieces([parameter], [parameter.grad], states, group, step))
                state["step"] += 1

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        for name in self.update.state_names:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        state.setdefault("step", torch.zeros((), dtype=torch.float32))
        return state


def has_fused_kernel(param_groups: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether torch's fused update of Adam and SGD takes all tensors of the groups.

    Fused, one pass reads and writes everything. On CPU (one thread, 20 million weights) AdamW
    takes 12 ms fused, 35 ms as a loop over tensors and 74 ms with foreach.
    """
    supported = {"cpu", "cuda", "xpu", "mps"}
    tensors = [tensor for group in param_groups for tensor in group["params"]]
    return all(t.device.type in supported and t.is_floating_point() for t in tensors)
