"""Optimizers of a training step: main weights, loss scale, finite check, clipping, update.

A torch optimizer computes the update (one fused pass over weights, gradients and moments, which
also applies the loss scale and the clipping factor; our Adam's writes half-precision weights, too).
It works on shards of parameters: whole parameters without sharding, the rank's ranges with ZeRO.
The code is the same for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.optimizer.chunked_state_optimizer import ChunkedStateOptimizer, streamed_params
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.optimizer.gradient_norm import GradientReader
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.qk_clip import AttentionLogits, RowFactors, factors_of_range
from megatron.core.optimizer.state_declarations import (
    declare_state,
    load_declared_state,
    settings_of_groups,
    step_count,
)
from megatron.core.optimizer.update import NormCheck, StepOutcome, StepResult, start_step


class MegatronOptimizer:
    """A torch optimizer over the shards that this rank owns.

    `step()` divides the gradient by the loss scale, checks it on all ranks, clips it by its global
    norm and applies it; then it writes half-precision weights from the main weights and gathers
    sharded weights.
    """

    is_stub_optimizer = False
    """Whether it has no state and no loss scale, as Megatron's class for frozen ranks."""

    def __init__(
        self,
        optimizer: Any,
        config: OptimizerConfig,
        shards: Sequence[MainParamShard],
        reader: GradientReader,
        model_chunks: Sequence[nn.Module],
        grad_scaler: ConstantGradScaler | None = None,
    ) -> None:
        """
        Args:
            optimizer: a torch optimizer, or `MultiOptimizer`, over the `main` tensors of `shards`.
            reader: reads the gradients of the same shards.
            model_chunks: chunks that are `DistributedDataParallel` gather their parameters.
            grad_scaler: None without loss scaling.
        """
        self.optimizer, self.config, self.grad_scaler = optimizer, config, grad_scaler
        self.shards, self.reader = list(shards), reader
        self.model_chunks = list(model_chunks)
        self._replicated = [c for c in model_chunks if isinstance(c, DistributedDataParallel)]
        self.attention_logits = AttentionLogits(self.model_chunks, reader.groups)
        self.nonfinite: str | None = None
        """Why the last step was refused, if the gradient was not finite or a check refused it."""
        self.norm_checks: list[NormCheck] = []
        """Every step calls these before its update, also if the norm is not finite."""
        self.num_updates = step_count(optimizer)
        """Updates of the weights so far; equal on all ranks, also on ranks without shards."""
        self._optimizers = getattr(optimizer, "optimizers", [optimizer])
        self._streamed = streamed_params(self._optimizers)
        copies = [item for item in self.shards if item.is_copy]
        self._copies = [(item.shard.values.detach(), item.main_param) for item in copies]
        published = {main for each in self._optimizers for main in getattr(each, "published", ())}
        self._unpublished = [pair for pair in self._copies if id(pair[1]) not in published]

    # Contents -------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the torch optimizer: tensors, learning rate, weight decay."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        return groups

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Moments and step count of each tensor."""
        state: Mapping[Tensor, dict[str, Any]] = self.optimizer.state
        return state

    def get_parameters(self) -> list[nn.Parameter]:
        """Return the tensors that the torch optimizer updates."""
        return [p for group in self.param_groups for p in group["params"]]

    # Loss scale -----------------------------------------------------------------------------

    def get_loss_scale(self) -> Tensor:
        """Return the factor on the loss, [1]."""
        return torch.tensor([1.0 if self.grad_scaler is None else self.grad_scaler.scale])

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss [] times the loss scale, for backward."""
        return loss if self.grad_scaler is None else loss * self.grad_scaler.scale

    # A step ---------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters outside of buffers
        (`DistributedDataParallel.zero_grad_buffer` resets buffers)."""
        for item in self.shards:
            item.main_param.grad = None
            item.shard.parameter.grad = None

    def step(self) -> StepResult:
        """Update the weights from finite gradients; otherwise leave every weight untouched.

        Raises:
            NumericsError: on all ranks, if gradients are not finite without loss scaling, under
                `on_nonfinite_grad="raise"`.
        Communication: see `GradientReader.read` and `DistributedDataParallel.start_param_sync`.
        """
        return self.start_step().read()

    def start_step(self, is_refused: Tensor | None = None) -> StepOutcome:
        """Update the weights like `step`, without waiting for the device if it decides there.

        Args: as in `update.start_step`.
        """
        return start_step([self], self.config, self.grad_scaler, is_refused)

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides if an update is taken or refused. Equal on all ranks.

        The host decides if it reads the gradients without waiting, or if it needs their norm or
        another figure before the update: for checks of the norm (`norm_checks`), the count of
        zeros, QK-Clip, and optimizers other than fused Adam and SGD over resident state.
        """
        return not (
            self.reader.is_on_host
            or self.norm_checks
            or self.config.log_num_zeros_in_grad
            or self.attention_logits.is_used
        ) and all(getattr(each, "_step_supports_amp_scaling", False) for each in self._optimizers)

    @torch.no_grad()
    def apply(
        self,
        factor: float | Tensor,
        row_factors: RowFactors | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update the weights from `factor` times the gradients, and start to gather them.

        Args:
            factor: a number, or fp64 [] on the device together with `found_inf`.
            found_inf: fp32 [], 1 if the update is refused.
            row_factors: factors on rows of updated weights, by the id of their parameter.
        """
        for chunk in self._replicated:
            # A gather may still run for parameters that no forward pass has read.
            chunk.finish_param_sync()
        self._attach_gradients()
        for optimizer in self._optimizers:
            _update(optimizer, factor, found_inf)
        self.num_updates += 1
        # Drop gradients that the next backward pass would otherwise add to.
        for item in self.shards:
            if item.shard.gradient is not None or item.is_copy:
                item.main_param.grad = None
        if row_factors:
            self._scale_rows(row_factors)
        copies = self._copies if row_factors else self._unpublished
        if copies:
            values, main_params = zip(*copies, strict=True)
            torch._foreach_copy_(values, main_params)
        for chunk in self._replicated:
            chunk.start_param_sync()

    def _attach_gradients(self) -> None:
        for item in self.shards:
            gradient = item.shard.reduced_gradient()
            streamed = self._streamed.get(id(item.main_param))
            if streamed is not None:
                if gradient is not None:
                    streamed.set_gradient(item.main_param, gradient)
            elif gradient is not None and item.main_param.grad is not gradient:
                item.main_param.grad = gradient.to(item.main_param.dtype)

    def _scale_rows(self, row_factors: RowFactors) -> None:
        """Scale the rows of main weights in the ranges that this rank owns."""
        for item in self.shards:
            shard, main = item.shard, item.main_param
            rows = row_factors.get(id(shard.parameter))
            if rows is None:
                continue
            total = shard.parameter.numel()
            factors = factors_of_range(rows, shard.begin, shard.end, total).view(main.shape)
            streamed = self._streamed.get(id(main))
            if streamed is None:
                main.mul_(factors)
            else:
                streamed.scale_main(item, factors)

    def nonfinite_parameters(self, bad_shards: Sequence[int]) -> list[tuple[int, int, int, str]]:
        """Return (chunk, stage, number, name) of the parameters of local shards of the reader."""
        param_index = {id(item.shard): item.param_index for item in self.shards}
        stage = self.reader.groups.pp.rank()
        found = set()
        for shard in (self.reader.shards[i] for i in bad_shards):
            chunk, number = param_index[id(shard)]
            found.add((chunk, stage, number, shard.name))
        return sorted(found)

    def reload_model_params(self) -> None:
        """Copy the main weights from the model, after a load without optimizer state."""
        for values, main in self._copies:
            main.data.copy_(values)
        for optimizer in self._optimizers:
            if isinstance(optimizer, ChunkedStateOptimizer):
                optimizer.reload_main()

    def prepare_model_params_for_param_sync(self) -> None:
        """Do nothing: `step` has written the parameters that a gather reads."""

    # State ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state: torch optimizer, loss scale, main weights.

        For the same layout only; checkpoints use `sharded_state_dict`.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "num_updates": self.num_updates,
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler else {},
            "main_params": [main.detach() for _, main in self._copies],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, or from a loaded `sharded_state_dict()`."""
        if self.grad_scaler is not None and state_dict.get("grad_scaler"):
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "state" in state_dict:
            load_declared_state(self.optimizer, self.shards, state_dict)
            self.num_updates = int(state_dict["state"]["step"])
            self._requantize()
            return
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.num_updates = state_dict["num_updates"]
        for (_, main), stored in zip(self._copies, state_dict["main_params"], strict=True):
            main.data.copy_(stored)
        self._requantize()

    @torch.no_grad()
    def _requantize(self) -> None:
        """Round the weights that are gathered in FP8 again, from the main weights.

        The rounded weights do not change, but their layers get the amaxes of the unrounded weights.
        """
        chunks = [c for c in self._replicated if c.ddp_config.gathers_params_in_fp8]
        if chunks:
            for values, main in self._copies:
                values.copy_(main)
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Mapping[str, Any],
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Declare moments and main weights by parameter, so that any layout can load them.

        Args:
            model_sharded_state_dict: the declarations of all model chunks, with the parameters
                as data.
            sharding_type: accepted for compatibility; there is one form, by parameter.
        Returns:
            "state": declarations with keys `optimizer.state.{exp_avg,...}.{parameter's key}`,
            "param_groups": settings, "step", "grad_scaler": plain values.
        """
        return {
            "state": declare_state(
                self.optimizer,
                self.shards,
                model_sharded_state_dict,
                num_updates=self.num_updates,
            ),
            "param_groups": settings_of_groups(self.param_groups),
            "grad_scaler": self.grad_scaler.state_dict() if self.grad_scaler else {},
        }


def _update(optimizer: Any, factor: float | Tensor, found_inf: Tensor | None) -> None:
    """Step one optimizer with `factor` times the gradients, see `MegatronOptimizer.apply`."""
    if isinstance(factor, Tensor):
        _update_fused(optimizer, factor.reciprocal().float(), found_inf)
        return
    if isinstance(optimizer, ChunkedStateOptimizer):
        optimizer.step(factor)
        return
    if factor == 1.0:
        optimizer.step()
        return
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        gradients = [p.grad for p in tensors if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)
        optimizer.step()
        return
    device = next((p.device for p in tensors), None)
    scale, accepted = (torch.tensor(value, device=device) for value in (1.0 / factor, 0.0))
    _update_fused(optimizer, scale, accepted)


def _update_fused(optimizer: Any, grad_scale: Tensor, found_inf: Tensor | None) -> None:
    """Update by the protocol of torch.amp.GradScaler: the kernel divides as it reads.

    Args:
        grad_scale, found_inf: fp32 []; found_inf 1 keeps weights, moments and step counts.
    """
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf
