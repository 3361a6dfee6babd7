"""Data parallelism: replicas of a model chunk train on different samples and sum gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.communication import Mesh, broadcast_from_first
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
)
from megatron.core.distributed.model_parameters import (
    copied_parameters,
    tied_parameters,
    units_of,
)
from megatron.core.distributed.parameter_shard import ParameterShard, ShardSpan
from megatron.core.distributed.plain_optimizers import watch_plain_optimizers
from megatron.core.distributed.sharded_state import (
    declare_replicated,
    declare_shards,
    load_full_state,
    write_shard,
)
from megatron.core.distributed.zero.build_stages import build_stages
from megatron.core.distributed.zero.parameter_units import parameter_units
from megatron.core.distributed.zero.stage import ReductionPolicy, ZeroStage
from megatron.core.foundation.errors import NumericsError, refuse_given
from megatron.core.kernels.cpu.malloc import return_freed_blocks
from megatron.core.parameters.exact_sum import round_sums
from megatron.core.parameters.initialization import fill_deferred_weights
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.deferred_wgrad import defer_wgrad
from megatron.core.topology.group import SINGLE_RANK, Group


class DistributedDataParallel(nn.Module):
    """Wraps a model chunk: gradients accumulate in flat buffers and are reduced by buckets.

    Every parameter gets `main_grad`, a view into a buffer (see
    `megatron.core.parameters.param_meta`), also with one replica, so that weight-gradient
    products write directly into it. A step is:

        ddp.zero_grad_buffer()                   # discards the last step; writes no memory
        with ddp.no_sync(): backward of all micro batches but the last
        backward of the last one                 # with overlap_grad_reduce: reduces buckets
        ddp.finish_grad_sync()                   # gradients are reduced in `main_grad`

    With sharded state only this rank's shard of a gradient is reduced, and `main_grad` outside
    of it is undefined; `spans()` shows the shards.

    Communication: per step one all-reduce of all gradients over `dp_cp` (`expt_dp` for experts),
    or with sharded state a reduce-scatter of gradients and an all-gather of parameters.
    """

    def __init__(
        self,
        config: object,
        ddp_config: DistributedDataParallelConfig,
        module: nn.Module,
        disable_bucketing: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        full_param_layout: object = None,
    ) -> None:
        """
        Args:
            config: the model's TransformerConfig; `calculate_per_token_loss` decides whether
                gradients are averaged over ranks here or divided by tokens later.
            module: parameters on their device and in their dtype already.
            disable_bucketing: one bucket per buffer.
            pg_collection: uses dp_cp and expt_dp; with sharded state intra_dp_cp, intra_expt_dp
                and inter_dist_opt.
        """
        super().__init__()
        rule = "the layout of the buffers is computed here"
        refuse_given("DDP", {"full_param_layout": full_param_layout}, rule=rule, fix="leave it out")
        self.config = config
        self.ddp_config = ddp_config
        self.module = module
        self.pg_collection = resolve_groups(pg_collection)
        watch_plain_optimizers()
        self._is_exact: bool = getattr(config, "layout_invariant_mode", False)
        self._syncs_in_backward = ddp_config.overlap_grad_reduce
        self._awaits_end = False
        if ddp_config.use_distributed_optimizer:
            return_freed_blocks()
        units = units_of(module) if ddp_config.shards_parameters else []
        self.gradient_buffers = build_stages(
            module,
            ddp_config,
            units,
            mesh_of=self.mesh,
            policy_of=self._policy,
            separate=set(self._tied_parameters()),
            disable_bucketing=disable_bucketing,
            is_exact=self._is_exact,
        )
        self._param_index: dict[nn.Parameter, tuple[ZeroStage, int]] = {
            p: (b, i) for b in self.gradient_buffers for i, p in enumerate(b.flat.parameters)
        }
        self._sharded_stages = [s for s in self.gradient_buffers if s.shards_parameters]
        sharded = {p for stage in self._sharded_stages for p in stage.flat.parameters}
        fill_deferred_weights(module, [p for p in module.parameters() if p not in sharded])
        self._units = parameter_units(units, self.gradient_buffers)
        self._spans = [span for buffer in self.gradient_buffers for span in buffer.spans()]
        self._shards_of: dict[nn.Parameter, list[ParameterShard]] = {}
        for span in self._spans:
            for shard in span.shards:
                self._shards_of.setdefault(shard.parameter, []).append(shard)
        # The hooks fire only as long as the nodes are alive.
        self._accumulation_nodes = [self._install_hook(p) for p in self._param_index]
        self._gathers_in_forward = ddp_config.overlap_param_gather and self._units is None
        if self._gathers_in_forward:
            self._install_gather_hooks()

    # Construction ---------------------------------------------------------------------------

    def sharded_values(self) -> dict[nn.Parameter, list[Tensor]]:
        """Return this rank's values of all parameters that are not whole on it (ZeRO-3)."""
        return {p: [s.values.detach() for s in shards] for p, shards in self._sharded().items()}

    def _sharded(self) -> dict[nn.Parameter, list[ParameterShard]]:
        """Return the shards of sharded parameters, for the caller to change."""
        for stage in self._sharded_stages:
            stage.own_shards()
        return {p: self.shards_of(p) for s in self._sharded_stages for p in s.flat.parameters}

    def mesh(self, is_expert: bool = False) -> Mesh:
        """Return the ranks that hold copies of the dense or of the expert parameters."""
        groups = self.pg_collection
        everyone = groups.expt_dp if is_expert else groups.dp_cp
        if not self.ddp_config.use_distributed_optimizer:
            return Mesh(shard=SINGLE_RANK, replicate=everyone)
        if self.ddp_config.num_distributed_optimizer_instances == 1:
            return Mesh(shard=everyone, replicate=SINGLE_RANK)
        shard = groups.intra_expt_dp if is_expert else groups.intra_dp_cp
        return Mesh(shard=shard, replicate=groups.inter_dist_opt)

    def _policy(self, mesh: Mesh) -> ReductionPolicy:
        """Average over the dense replicas, also for experts: an expert's gradient is already a
        sum over the tokens of several replicas."""
        num_replicas = self.pg_collection.dp_cp.size()
        config = self.ddp_config
        compression = None if config.grad_compression == "none" else config
        scale, average = 1.0 / num_replicas, False
        if self._is_exact or getattr(self.config, "calculate_per_token_loss", False):
            scale = 1.0  # exact sums are scaled once, in `round_gradients`
        elif config.average_in_collective:
            scale, average = mesh.size / num_replicas, True
        return ReductionPolicy(scale, average, config.check_for_nan_in_grad, compression)

    def _tied_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that exist on another pipeline stage as well."""
        found = copied_parameters(self.module) if self.pg_collection.pp.size() > 1 else []
        if self.pg_collection.embd.size() > 1:
            found += tied_parameters(self.module)
        return found

    def _install_hook(self, parameter: nn.Parameter) -> Any:
        """Call `_register_grad_ready` when backward has accumulated a parameter's gradient.

        The hook is on the accumulating node: it runs once per backward pass, also if the weight is
        used twice, or if a fused backward wrote `main_grad` and passed None.
        """
        with torch.enable_grad():
            view: Any = parameter.view_as(parameter)
            node = view.grad_fn.next_functions[0][0]
        buffer, index = self._param_index[parameter]

        def register_grad_ready(*_: Any) -> None:
            arrived = partial(buffer.register_grad_ready, index, self._syncs_in_backward)
            if buffer.defers_gradients and defer_wgrad(arrived):
                # After the deferred weight gradients of this backward pass.
                buffer.register_grad_deferred(index)
            else:
                arrived()

        node.register_hook(register_grad_ready)
        return node

    def _install_gather_hooks(self) -> None:
        # A tied weight is also read by code that does not pass through its module.
        self._read_elsewhere = [
            p for p in self._param_index if get_param_meta(p).is_embedding_or_output
        ]
        for module in self.module.modules():
            own = [p for p in module.parameters(recurse=False) if p in self._param_index]
            if own:
                module.register_forward_pre_hook(lambda *_, own=own: self._finish_gathers_of(own))

    # Module ---------------------------------------------------------------------------------

    def forward(self, *inputs: object, **kwargs: object) -> Any:
        """Call the wrapped module."""
        if self._gathers_in_forward:
            self._finish_gathers_of(self._read_elsewhere)
        outputs = self.module(*inputs, **kwargs)
        if self.ddp_config.shards_gradients and torch.is_grad_enabled():
            self._watch_backward_from(outputs)
        return outputs

    def _watch_backward_from(self, outputs: Any) -> None:
        """Reduce the remaining buckets when the backward pass that begins at `outputs` has ended.

        The callback belongs to the pass that is running when the hook runs. Hooks of parameters do
        not work: under recomputation they run in an inner pass of one layer.
        """

        def backward_begins(_: Tensor) -> None:
            if not self._awaits_end:
                self._awaits_end = True
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(backward_ended)

        def backward_ended() -> None:
            self._awaits_end = False
            for buffer in self.gradient_buffers:
                if not defer_wgrad(buffer.end_backward):
                    buffer.end_backward()
            if self._units is not None:
                self._units.end_backward()

        for output in tree_leaves(outputs):
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(backward_begins)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the wrapped module's state, without a prefix.

        Communication: as `summon_full_params`; sharded parameters are copied.
        """
        with self.summon_full_params():
            state = self.module.state_dict(*args, **kwargs)
            if self._units is None:
                return state
            return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def summon_full_params(self) -> AbstractContextManager[None]:
        """Inside the returned context all parameters are whole; changes to them are lost.

        Communication: if parameters are sharded, an all-gather of each unit."""
        self.finish_param_sync()
        return nullcontext() if self._units is None else self._units.summon()

    def state_dict_for_save_checkpoint(self, *args: object, **kwargs: object) -> dict[str, Any]:
        """Return `state_dict(...)`."""
        return self.state_dict(*args, **kwargs)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the wrapped module's declarations; of sharded parameters the owned ranges.

        A module without declarations of its own is the same on all replicas.
        """
        self.finish_param_sync()
        module: Any = self.module
        if hasattr(module, "sharded_state_dict"):
            declared = module.sharded_state_dict(*args, **kwargs)
        else:
            declared = declare_replicated(module, self.pg_collection.dp_cp.rank(), *args[:1])
        return declare_shards(module, declared, self._sharded(), *args[:1])

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the wrapped module; in place, because buffers hold the storage."""
        rule = "parameters are views into buffers and cannot be replaced"
        refuse_given("load_state_dict()", {"assign": assign}, rule=rule, fix="copy in place")
        for buffer in self.gradient_buffers:
            buffer.params.prepare_update()
        if sharded := self._sharded():
            return load_full_state(self.module, state_dict, sharded, strict=strict)
        return self.module.load_state_dict(state_dict, strict=strict)

    def set_input_tensor(self, input_tensor: Tensor | Sequence[Tensor] | None) -> None:
        """Pass the previous stage's output to the wrapped module."""
        module: Any = self.module
        module.set_input_tensor(input_tensor)

    # Gradients ------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, backward only accumulates.

        Legal with every sharding strategy. Sharded gradients are reduced nevertheless, because
        accumulating them would take the memory that sharding saves.
        """
        return self._syncing(False)

    def sync_in_backward(self) -> AbstractContextManager[None]:
        """Inside, backward is the last one of its step and reduces as with overlap_grad_reduce."""
        return self._syncing(True)

    @contextmanager
    def _syncing(self, in_backward: bool) -> Iterator[None]:
        before, self._syncs_in_backward = self._syncs_in_backward, in_backward
        if self._units is not None:
            self._units.expect_forward(not in_backward)
        try:
            yield
        finally:
            self._syncs_in_backward = before
            if self._units is not None:
                self._units.expect_forward(False)

    def zero_grad_buffer(self) -> None:
        """Begin a step: discard the gradients of the last step. No memory is written."""
        self._awaits_end = False
        for buffer in self.gradient_buffers:
            buffer.begin_step()
        for parameter in self._param_index:
            parameter.grad = None

    def start_grad_sync(self, *unused: object) -> None:
        """Start the reduction of all gradients whose reduction has not started; return at once.

        Schedules call it after the last backward of a chunk.
        """
        if self.ddp_config.shards_gradients:
            return
        for buffer in self.gradient_buffers:
            buffer.launch_remaining()

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Complete the reduction over replicas; `finalize_model_grads` does the other sums."""
        if self.ddp_config.use_distributed_optimizer:
            rule = "gradients of a sharded optimizer are reduced to shards only"
            given = {"force_all_reduce": force_all_reduce}
            refuse_given("finish_grad_sync()", given, rule=rule, fix="leave it out")
        self.start_grad_sync()
        for buffer in self.gradient_buffers:
            buffer.finish_reductions()

    def nonfinite_problem(self) -> NumericsError | None:
        """Describe the first local gradient of this step that was not finite before reduction.

        Valid after `finish_grad_sync` with `check_for_nan_in_grad`. Ranks differ: agree before
        raising.
        """
        for buffer in self.gradient_buffers:
            if buffer.nonfinite is not None:
                return NumericsError(
                    f"gradient of {buffer.nonfinite} is not finite in data replica"
                    f" {self.pg_collection.dp_cp.rank()}.",
                    rule="NaN or infinity in one replica would reach the weights of all",
                    flags=["--no-check-for-nan-in-loss-and-grad"],
                    fix="look at the samples of this step on that rank, or lower --lr; backward"
                    " reaches this parameter before the others that are not finite",
                )
        return None

    def scale_gradients(self, scaling_factor: float | Tensor) -> None:
        """Multiply all reduced gradients."""
        for buffer in self.gradient_buffers:
            for owned in buffer.owned_gradients():
                if isinstance(scaling_factor, Tensor):
                    scaling_factor = scaling_factor.to(owned.device)
                owned.mul_(scaling_factor)

    def round_gradients(self, factor: float) -> None:
        """Multiply the exact sums of `layout_invariant_mode`, and round them to fp32 values."""
        for buffer in self.gradient_buffers:
            for owned in buffer.owned_gradients():
                round_sums(owned, factor)

    def spans(self) -> list[ShardSpan]:
        """Return the spans that this rank updates, with reduced gradients, buffer by buffer."""
        return self._spans

    def unbucketed_shards(self) -> list[ParameterShard]:
        """Return the shards that this rank updates outside of buffers: an empty list."""
        return []

    def shards_of(self, parameter: nn.Parameter) -> list[ParameterShard]:
        """Return the pieces of a parameter that this rank owns; none if it is frozen."""
        return self._shards_of.get(parameter, [])

    # Parameters -----------------------------------------------------------------------------

    def start_param_sync(self, *unused: object, force_sync: bool = False) -> None:
        """Gather updated shards, if state is sharded; return at once with overlap_param_gather."""
        for buffer in self.gradient_buffers:
            buffer.params.start_gathers()
        if self._units is not None:
            self._units.prefetch_first()
        if force_sync or not self._gathers_in_forward:
            self.finish_param_sync()

    def enable_forward_pre_hook(self) -> None:
        """With `overlap_param_gather`, wait for gathers in the next forward pass again."""
        self._gathers_in_forward = self.ddp_config.overlap_param_gather and self._units is None

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Until `enable_forward_pre_hook`, wait for gathers where they start.

        Args:
            param_sync: also wait for the current gathers now.
        """
        self._gathers_in_forward = False
        self.finish_param_sync()
        if param_sync:
            self.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are whole."""
        for buffer in self.gradient_buffers:
            buffer.params.finish_gathers()

    def _finish_gathers_of(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            buffer, index = self._param_index[parameter]
            buffer.params.finish_gathers([index])

    def write_parameter(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Set a whole or sharded parameter to `value`, which has its full shape."""
        if parameter in (sharded := self._sharded()):
            for shard in sharded[parameter]:
                write_shard(shard, value)
        else:
            parameter.data.copy_(value)

    def broadcast_params(self) -> None:
        """Copy the parameters of the first replica to all others; sharded ones shard by shard."""
        copies: list[tuple[Tensor, Group]] = []
        sharded: set[nn.Parameter] = set()
        for stage in self._sharded_stages:
            sharded.update(stage.flat.parameters)
            copies += [(shard, stage.flat.mesh.replicate) for shard in stage.own_shards()]
        for parameter in self.module.parameters():
            if parameter not in sharded:
                is_expert = get_param_meta(parameter).is_expert
                group = self.pg_collection.expt_dp if is_expert else self.pg_collection.dp_cp
                copies.append((parameter.data, group))
        broadcast_from_first(copies)
