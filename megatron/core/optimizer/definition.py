"""The record of an optimizer: its settings, its state, its constants and its update.

Each file of `definitions/` has one as `OPTIMIZER`. The flags, the checks of a run, the estimate of
memory and the builders read these records; no code compares names. An elementwise optimizer is one
function on pieces of tensors: full tensors, shards of any ZeRO stage, and chunks of state in low
precision, in host memory or in files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer.whole_vectors import whole_vectors
from megatron.core.settings.flags import flag

if TYPE_CHECKING:
    from megatron.core.distributed.communication import Mesh
    from megatron.core.distributed.parameter_shard import MainParamShard
    from megatron.core.process_groups_config import ProcessGroupCollection

SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
TP_MODES = ("duplicated", "distributed", "blockwise")


@dataclass
class UpdateFlags:
    """Learning rate, weight decay and constants of the updates."""

    lr: float | None = None
    """Highest learning rate; a scheduler sets the rate of each step."""
    weight_decay: float = 0.01
    """Weight decay of matrices; biases and other 1-d parameters have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-08
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    lion_beta1: float = flag(0.95, part_of="optimizer")
    """Weight of the moment in Lion's update."""
    lion_beta2: float = flag(0.98, part_of="optimizer")
    """Decay of Lion's moment."""
    muon_momentum: float = flag(0.9, part_of="optimizer")
    """Momentum of Muon."""
    muon_use_nesterov: bool = flag(
        False, "--muon-use-nesterov", "--muon-nesterov", part_of="optimizer"
    )
    """Use Nesterov momentum in Muon."""
    muon_num_ns_steps: int = flag(5, part_of="optimizer")
    """Newton-Schulz steps of Muon."""
    muon_scale_mode: str = flag("spectral", choices=SCALE_MODES, part_of="optimizer")
    """Factor on Muon's update by the shape of the matrix; see `muon.update_scale`."""
    muon_extra_scale_factor: float = flag(1.0, part_of="optimizer")
    """One more factor; 0.2 with spectral gives updates the size of Adam's (arXiv 2502.16982)."""
    muon_tp_mode: str = flag(
        "duplicated", choices=("blockwise", "duplicated", "distributed"), part_of="optimizer"
    )
    """Muon on matrices split over tensor-parallel ranks: gather the full matrix on each rank
    (duplicated), sum Gram matrices in each step (distributed), or treat each part as a separate
    matrix (blockwise)."""
    muon_split_qkv: bool = flag(
        True,
        "--muon-no-split-qkv",
        help="Orthogonalise stacked matrices (q, k, v; gate and up) as one.",
        part_of="optimizer",
    )
    """Treat stacked matrices (q, k, v; gate and up) as separate matrices."""


@dataclass
class UpdateSettings(UpdateFlags):
    """The flags, and settings without a flag."""

    decoupled_weight_decay: bool = True
    """Decay weights directly (AdamW); otherwise add weight_decay * weight to the gradient."""
    in_whole_vectors: bool = False
    """Give elements the same bits wherever a tensor is split; `layout_invariant_mode` sets it."""


ADAM, ADAMW = "Adam", "AdamW"
OTHER_UPDATE = "another update than Adam's"
"""Kinds of updates, which a kernel on stored state may support."""

States = Mapping[str, Sequence[Tensor]]
"""name -> one fp32 tensor per piece."""


@dataclass(frozen=True)
class Pieces:
    """Pieces of parameters of one group, and the other inputs of an update."""

    weights: list[Tensor]
    gradients: list[Tensor]
    """fp32, of the shapes of `weights`; the update may overwrite gradients."""
    states: States
    settings: Mapping[str, Any]
    """ "lr" and "weight_decay" of the group, and the constants of the optimizer."""
    step: int
    """Updates before this one."""
    factor: float = 1.0
    """Factor on the gradients."""

    def scaling(self) -> dict[str, Any]:
        """Return the arguments of fused kernels that divide gradients while they read them."""
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
"""Updates weights and states in place, element by element."""


def _update_in_whole_vectors(update: Update, pieces: Pieces) -> None:
    states = {name: list(tensors) for name, tensors in pieces.states.items()}
    with whole_vectors(pieces.weights, pieces.gradients, *states.values(), steps=[]):
        update(replace(pieces, states=states))


@dataclass(frozen=True)
class ElementwiseUpdate:
    """An update with the constants of a run."""

    state_names: tuple[str, ...]
    update: Update
    constants: Mapping[str, Any] = field(default_factory=dict)
    kind: str = OTHER_UPDATE


@dataclass(frozen=True)
class ModelTensors:
    """This rank's model, for optimizers that need more than the tensors that they update."""

    shards: Sequence[MainParamShard]
    matrices: Sequence[nn.Parameter]
    """Parameters of Muon, whether this rank owns a piece of them or not."""
    groups: ProcessGroupCollection
    meshes: tuple[Mesh, Mesh]
    """Replicas of dense and of expert parameters."""


@dataclass(frozen=True, kw_only=True)
class OptimizerDefinition:
    """An optimizer, as `--optimizer` names it."""

    name: str
    """Value of `--optimizer`, `UpdateSettings.optimizer` and "optimizer" of a parameter group."""
    state_names: tuple[str, ...]
    """Names of the state tensors, as in checkpoints; each has the shape of its parameter.
    `--exp-avg-sq-dtype` sets the dtype of "exp_avg_sq", `--exp-avg-dtype` the dtype of others."""
    has_state: Callable[[UpdateFlags], bool] = lambda _config: True
    """Whether the update of a run needs the state tensors."""
    constants: Callable[[UpdateSettings], dict[str, Any]] = lambda _config: {}
    """Settings of parameter groups in addition to "lr" and "weight_decay": a schedule may change
    them, and checkpoints store them."""
    update: Callable[[UpdateSettings], Update] | None = None
    """Returns the update of pieces. None if the update is not elementwise; its state is then always
    fp32 on the device."""
    kind: Callable[[UpdateSettings], str] | None = None
    """Returns `ElementwiseUpdate.kind`, if kernels support the update."""
    build: Callable[[UpdateSettings, list[dict[str, Any]], ModelTensors], Any] | None = None
    """Returns a `torch.optim.Optimizer` over parameter groups of main tensors, if
    `ElementwiseOptimizer` is slower or not possible."""

    def states_of(self, config: UpdateFlags) -> tuple[str, ...]:
        """Return the names of the state tensors that the update of a run needs."""
        return self.state_names if self.has_state(config) else ()

    def elementwise(self, config: UpdateSettings) -> ElementwiseUpdate:
        """Return the update with the constants of a run.

        Raises:
            ConfigError: the optimizer is not elementwise.
        """
        if self.update is None:
            raise ConfigError(
                f"{self.name} with optimizer state in low precision or off the device.",
                rule="only optimizers that update elements independently work on chunks of state",
                flags=["--optimizer", "--param-rules", "--use-precision-aware-optimizer",
                       "--optimizer-cpu-offload", "--optimizer-offload-path"],
                fix="use --use-distributed-optimizer to shard its state, or --optimizer lion",
            )  # fmt: skip
        names = self.states_of(config)
        update = self.update(config)
        if config.in_whole_vectors:
            update = partial(_update_in_whole_vectors, update)
        found = ElementwiseUpdate(names, update, self.constants(config))
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
    """Return a class of `torch.optim` whose step does not differentiate and is not compiled.

    If the attribute `in_whole_vectors` is set, its fused step updates tensors in whole vectors.
    """
    torch_step = inspect.unwrap(kind.step)

    def init_group(self: Any, group: dict[str, Any], *lists: list[Any]) -> bool:
        has_other_kinds: bool = kind._init_group(self, group, *lists)  # type: ignore[attr-defined]
        if group["fused"] and self.in_whole_vectors:
            # Adam's sixth list has the step counts.
            vectors = whole_vectors(*lists[:5], steps=lists[5] if lists[5:] else [])
            for padded in self._vectors.enter_context(vectors):
                self._vectors.callback(self.state.pop, padded, None)
        return has_other_kinds

    @torch.no_grad()
    def step(self: Any) -> None:
        with ExitStack() as self._vectors:
            torch_step(self)

    members = {"step": step, "_init_group": init_group, "__doc__": kind.__doc__}
    return type(kind.__name__, (EagerOptimizer, kind), {**members, "in_whole_vectors": False})


class ElementwiseOptimizer(EagerOptimizer):
    """Applies an elementwise update to full tensors, or to any shards."""

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
    """Return whether torch's fused update of Adam and SGD supports all tensors of the groups.

    Fused, one pass reads and writes everything. On CPU (one thread, 20 million weights) AdamW
    takes 12 ms fused, 35 ms as a loop over tensors and 74 ms with foreach.
    """
    supported = {"cpu", "cuda", "xpu", "mps"}
    tensors = [tensor for group in param_groups for tensor in group["params"]]
    return all(t.device.type in supported and t.is_floating_point() for t in tensors)
