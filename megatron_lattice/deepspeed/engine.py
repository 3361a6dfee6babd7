"""The engine: forward, backward, step of a plain module on the ZeRO stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.core.distributed import finalize_model_grads
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, ScheduleError
from megatron.core.parameters.rng import rng_state
from megatron_lattice.deepspeed import checkpoints
from megatron_lattice.deepspeed.advice import advises_callers_of_an_engine
from megatron_lattice.deepspeed.engine_state import EngineState
from megatron_lattice.deepspeed.flops import count_flops, print_profile


class ReplicaLoader:
    """Batches of this replica's samples; each iteration is an epoch with its own order."""

    def __init__(self, loader: DataLoader[object], sampler: DistributedSampler[object]) -> None:
        self.loader, self.sampler = loader, sampler
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


class DeepSpeedEngine(EngineState):
    """A module, its replicas, and its optimizer: call, `backward(loss)`, `step()`.

    Call `step()` after every micro batch; it updates the weights after the last one of
    `gradient_accumulation_steps`. Gradients are the mean over replicas and micro batches.
    Accumulation, `no_sync()` and evaluation work at every stage. The engine forwards attributes
    that it lacks to the module.
    """

    # A micro batch --------------------------------------------------------------------------

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Run the module, in the precision of the configuration."""
        state = rng_state()
        state.begin_step(
            self.global_samples,
            micro_batch_size=self.settings.batch.micro,
            dp_rank=self.pg_collection.dp_cp.rank(),
            dp_size=self.settings.batch.replicas,
        )
        state.set_microbatch(self.micro_steps % self._accumulation)
        if self.settings["fp16.auto_cast"]:
            inputs, kwargs = tree_map(self._cast, (inputs, kwargs))
        with ExitStack() as stack:
            stack.enter_context(self._times.of("forward"))
            if self.settings["torch_autocast.enabled"]:
                dtype = getattr(torch, self.settings["torch_autocast.dtype"])
                stack.enter_context(torch.autocast(device.device_type(), dtype=dtype))
            if self._is_profiled_now():
                outputs, flops = count_flops(self.module, lambda: self.replica(*inputs, **kwargs))
                if self._is_first:
                    key = "flops_profiler.{}".format
                    print_profile(
                        self.module,
                        flops,
                        depth=self.settings[key("module_depth")],
                        top=self.settings[key("top_modules")],
                        detailed=self.settings[key("detailed")],
                        path=self.settings[key("output_file")],
                    )
            else:
                outputs = self.replica(*inputs, **kwargs)
        if torch.is_grad_enabled():
            for output in tree_leaves(outputs):
                if isinstance(output, Tensor) and output.requires_grad:
                    output.register_hook(self._backward_begins)
        return outputs

    def _is_profiled_now(self) -> bool:
        settings = self.settings
        is_now = self.global_steps + 1 == settings["flops_profiler.profile_step"]
        is_first = self.micro_steps % self._accumulation == 0 and self.module.training
        return bool(settings["flops_profiler.enabled"] and is_now and is_first)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.settings.dtype) if is_float else value

    def _backward_begins(self, _: Tensor) -> None:
        """Record the start of a backward pass, for callers of `loss.backward()`."""
        if self._is_in_backward or self._num_plain > self.micro_steps % self._accumulation:
            return
        if self._optimizer().grad_scaler is not None and not self._is_scaled:
            raise RuntimeError(
                "loss.backward() with loss scaling: call engine.backward(loss), or"
                " engine.scale(loss).backward()"
            )
        self._num_plain += 1

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the loss scale, for `engine.scale(loss).backward()`."""
        self._is_scaled = True
        return self._optimizer().scale_loss(loss)

    @advises_callers_of_an_engine
    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> Tensor:
        """Compute gradients of a scalar loss; start their reduction at the last micro batch.

        Returns:
            the loss, divided by the number of micro batches.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(
                f"engine.backward() of {shown}.",
                rule="a loss is one number",
                fix="take the mean of the losses",
            )
        if self.monitor.enabled:
            self._loss.add(loss)
        share = loss / self._accumulation if scale_wrt_gas else loss
        overlaps = self.is_gradient_accumulation_boundary() and not self._is_in_no_sync
        overlaps = overlaps and self.settings.overlaps_reduction
        self._is_in_backward = True
        try:
            with (
                self._times.of("backward"),
                self.replica.sync_in_backward() if overlaps else nullcontext(),
            ):
                scaled: Any = self._optimizer().scale_loss(share)
                scaled.backward(retain_graph=retain_graph)
        finally:
            self._is_in_backward = False
        self._num_managed += 1
        return share

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro batch is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Override `is_gradient_accumulation_boundary` from now on."""
        self._boundary = is_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Start no reduction of unsharded gradients inside the block; works at every stage."""
        self._is_in_no_sync = True
        try:
            yield
        finally:
            self._is_in_no_sync = False

    coalesce_grad_reduction = no_sync

    # A step ---------------------------------------------------------------------------------

    @advises_callers_of_an_engine
    def step(self, lr_kwargs: Mapping[str, object] | None = None) -> None:
        """Count a micro batch; after the last micro batch, update the weights.

        Communication: at the boundary, reduction of gradients, their norm, gather of weights.
        """
        if self._is_in_no_sync:
            raise ScheduleError(
                "engine.step() inside no_sync().",
                rule="a step follows the reduction of gradients",
                fix="call it after the context",
            )
        is_managed = self.settings["managed_gradient_accumulation"]
        if is_managed and not self.is_gradient_accumulation_boundary():
            self.micro_steps += 1
            return
        self._take_step(lr_kwargs or {})
        self.micro_steps += 1

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        optimizer = self._optimizer()
        self._check_passes()
        with self._times.of("reduce"):
            finalize_model_grads([self.replica], pg_collection=self.pg_collection)
            if self._num_plain and self._accumulation > 1:
                self.replica.scale_gradients(1.0 / self._accumulation)
        with self._times.of("step"):
            self._was_applied, self._grad_norm, _ = optimizer.step()
        if not self._was_applied:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.zero_grad()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._report()

    def _report(self) -> None:
        """Print progress and write scalars if they are due after this step."""
        period = self.settings["steps_per_print"]
        is_due = self.global_steps % (period or 1) == 0
        if period and is_due and self._is_first:
            print(
                f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()},"
                f" mom={self.get_mom()}",
                flush=True,
            )
        times = self._times.take() if self._times.is_on and is_due else {}
        if times and self._is_first:
            print(self._times.describe(times), flush=True)
        if not self.monitor.enabled:
            return
        values: dict[str, Any] = {"lr": self.get_lr()[0]}
        loss = self._loss.take()
        if loss is not None:
            values["train_loss"] = loss
        if self._optimizer().grad_scaler is not None:
            values["loss_scale"] = self.loss_scale()
        values |= {f"elapsed_time_ms_{part}": time for part, time in times.items()}
        self.monitor.write_events(
            [
                (f"Train/Samples/{name}", value, self.global_samples)
                for name, value in values.items()
            ]
        )

    def _check_passes(self) -> None:
        if self._accumulation > 1 and not self._num_plain and not self._num_managed:
            raise ScheduleError(
                "engine.step() without a backward pass that the engine has recorded.",
                rule="the engine records loss.backward() by hooks on the tensors that the module"
                " returns: a tensor, or tensors in tuples, lists and dicts",
                fix="call engine.backward(loss)",
            )
        if self._num_plain and self._num_managed:
            raise ScheduleError(
                f"{self._num_managed} engine.backward() and {self._num_plain} loss.backward() in"
                " one step.",
                rule="the former divides by the number of micro batches, the latter does not",
                fix="use one of the two",
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients."""
        self._num_plain = self._num_managed = 0
        self._is_scaled = False
        self.replica.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    # Checkpoints -----------------------------------------------------------------------------

    @advises_callers_of_an_engine
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, object] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the state for resuming on any number of ranks in `save_dir`/`tag`: collective."""
        checkpoints.save(
            self, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters
        )
        return True

    @advises_callers_of_an_engine
    def load_checkpoint(
        self,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Resume from a checkpoint of any stage and any number of ranks: collective.

        Returns:
            (path of the checkpoint, the caller's state); (None, None) if `load_dir` has none.
        """
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...).",
                rule="weights are read slice by slice, directly into their shards",
                fix="load part of the weights with engine.load_state_dict()",
            )
        return checkpoints.load(
            self,
            load_dir,
            tag,
            is_strict=load_module_strict,
            optimizer_states=load_optimizer_states and not load_module_only,
            scheduler_states=load_lr_scheduler_states and not load_module_only,
        )

    @advises_callers_of_an_engine
    def save_16bit_model(
        self, save_dir: str, save_filename: str = "model.safetensors", **_: object
    ) -> bool:
        """Write the module's weights to one file, in the dtype of the computation: collective."""
        checkpoints.save_weights(self, save_dir, save_filename)
        return True

    save_fp16_model = save_16bit_model

    def deepspeed_io(
        self,
        dataset: Dataset[object],
        batch_size: int | None = None,
        collate_fn: Callable[..., object] | None = None,
        **_: object,
    ) -> Any:
        """Return a loader of this replica's samples, by default in micro batches."""
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset,
            num_replicas=self.settings.batch.replicas,
            rank=self.pg_collection.dp_cp.rank(),
            seed=self.settings["seed"] or 0,
        )
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size or self.settings.batch.micro,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=self.settings["dataloader_drop_last"],
        )
        return ReplicaLoader(loader, sampler)

    def allreduce_gradients(self, bucket_size: int = 500_000_000) -> None:
        """Reduce the gradients now, before `step`: collective."""
        self.replica.finish_grad_sync()

    def empty_partition_cache(self) -> None:
        """Do nothing: unsharded parameters are freed after each use."""

    def destroy(self) -> None:
        """Close the files of the monitors."""
        self.monitor.close()
