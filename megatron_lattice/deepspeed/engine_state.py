"""State of an engine and its accessors: module, replica, optimizer, counters."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import DynamicGradScaler, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_lattice.deepspeed import comm
from megatron_lattice.deepspeed.monitors import LossMean, MonitorMaster, StepTimes
from megatron_lattice.deepspeed.settings import EngineSettings


class EngineState(nn.Module):
    """The parts of an engine under DeepSpeed's names, without its passes and steps.

    It forwards attributes that it lacks to the module.
    """

    def __init__(
        self,
        module: nn.Module,
        replica: DistributedDataParallel,
        settings: EngineSettings,
        groups: ProcessGroupCollection,
    ) -> None:
        """
        Args:
            module: the caller's module, on its device and in its dtype.
            replica: the wrapped module.
            settings: configuration that was checked for this number of replicas.
        """
        super().__init__()
        self.module = module
        # Not a submodule, so that parameters and state keep the module's own names.
        self.__dict__["replica"] = replica
        self.settings, self.pg_collection = settings, groups
        self.optimizer: MegatronOptimizer | None = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._accumulation = settings.batch.accumulation
        self.monitor = MonitorMaster(settings, self._is_first)
        self._times = StepTimes(bool(settings["wall_clock_breakdown"]))
        self._loss = LossMean()
        self._was_applied = False
        self._grad_norm: float | None = None
        self._boundary: bool | None = None
        self._is_in_no_sync = self._is_in_backward = self._is_scaled = False
        self._num_plain = self._num_managed = 0
        """Backward passes of this step: calls of `loss.backward()`, and of `engine.backward()`."""
        for parameter in module.parameters():
            parameter.deepspeed_engine = weakref.ref(self)  # type: ignore[attr-defined]
        replica.zero_grad_buffer()

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def _optimizer(self) -> MegatronOptimizer:
        if self.optimizer is None:
            raise ConfigError(
                "the engine has no optimizer.",
                rule="backward and step need an optimizer; forward does not",
                flags=["optimizer"],
                fix="name an optimizer in the configuration, or pass one to initialize()",
            )
        return self.optimizer

    @property
    def _is_first(self) -> bool:
        return self.pg_collection.dp_cp.rank() == 0

    @property
    def device(self) -> torch.device:
        return device.current_device()

    @property
    def local_rank(self) -> int:
        """Number of the accelerator of this process on its machine."""
        return self.device.index or 0

    @property
    def config(self) -> dict[str, Any]:
        """Keys and values of the configuration, by dotted path."""
        return dict(self.settings.read.given)

    def train_batch_size(self) -> int:
        """Return the samples of a step over all replicas."""
        batch = self.settings.batch
        return batch.micro * self._accumulation * batch.replicas

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a forward pass."""
        return self.settings.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro batches of a step."""
        return self._accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro batches of a step; the micro batch size is unchanged.

        Raises:
            ConfigError: no whole number of micro batches gives that size.
        """
        unit = self.settings.batch.micro * self.settings.batch.replicas
        if train_batch_size < unit or train_batch_size % unit:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}).",
                rule=f"it must be a multiple of micro batch x replicas = {unit}",
                flags=["train_batch_size"],
                fix=f"use {max(1, round(train_batch_size / unit)) * unit}",
            )
        self._accumulation = train_batch_size // unit

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return comm.get_rank()

    @property
    def world_size(self) -> int:
        return comm.get_world_size()

    dp_world_size = world_size
    """Number of replicas: every process has one."""
    mp_world_size = 1
    """Processes that share one replica."""

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale changes by itself."""
        return isinstance(self._optimizer().grad_scaler, DynamicGradScaler)

    def steps_per_print(self) -> int | None:
        """Return the steps between progress lines; None disables them."""
        period: int | None = self.settings["steps_per_print"]
        return period

    def wall_clock_breakdown(self) -> bool:
        """Return whether the parts of steps are timed."""
        return self._times.is_on

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return samples of a step, of a forward pass, and micro batches of a step."""
        return (
            self.train_batch_size(),
            self.train_micro_batch_size_per_gpu(),
            self.gradient_accumulation_steps(),
        )

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all groups, until a schedule sets it again."""
        for group in self._optimizer().param_groups:
            group["lr"] = lr

    def zero_optimization(self) -> bool:
        """Return whether any state is sharded."""
        return self.settings.stage > 0

    def zero_optimization_stage(self) -> int:
        return self.settings.stage

    def fp16_enabled(self) -> bool:
        return self.settings.dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self.settings.dtype == torch.bfloat16

    def gradient_clipping(self) -> float:
        """Return the maximum gradient norm; 0 disables clipping."""
        return float(self._optimizer().config.clip_grad)

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self._optimizer().param_groups]

    def get_mom(self) -> list[Any]:
        """Return momentum or betas of each group."""
        groups = self._optimizer().param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping; None before the first."""
        return self._grad_norm

    def was_step_applied(self) -> bool:
        """Return whether the last step at a boundary changed the weights."""
        return self._was_applied

    def loss_scale(self) -> float:
        """Return the factor on the loss."""
        return float(self._optimizer().get_loss_scale())

    @property
    def cur_scale(self) -> float:
        """Return `loss_scale`; DeepSpeed has both names."""
        return self.loss_scale()

    # Weights ------------------------------------------------------------------------------------

    def state_dict(self, *args: object, **kwargs: object) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's whole state on every rank; collective at stage 3."""
        return self.replica.state_dict(*args, **kwargs)

    module_state_dict = state_dict

    def load_state_dict(self, state_dict: object, strict: bool = True, assign: bool = False) -> Any:
        """Load unsharded weights, into shards and main weights as well."""
        result = self.replica.load_state_dict(state_dict, strict=strict, assign=assign)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()
        return result

    load_module_state_dict = load_state_dict

    def counters(self) -> dict[str, int]:
        """Return the counters of steps and samples."""
        names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}
