"""Linear layers whose weight is split over tensor-parallel ranks, by columns or by rows.

A block is a column-parallel layer, something elementwise (or per head), and a row-parallel
layer: one sum forward and one backward for the whole block (Megatron-LM, section 3,
arXiv 1909.08053). With sequence parallelism (arXiv 2205.05198, section 4.2.2) the sum becomes a
reduce-scatter and the entry an all-gather.

Shapes: `s` sequence, `b` micro batch, `i`/`o` full input/output features; a slash divides by the
size of the layer's group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.param_meta import in_rows
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_group
from megatron.core.tensor_parallel.linear_with_overlap import (
    InputMode,
    LinearCommSpec,
    OutputMode,
    deferral_is_not_supported,
    linear_with_grad_accumulation_and_async_allreduce,
    parallel_linear,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.parallel_parameters import (
    ParallelLinear,
    copy_tensor_model_parallel_attributes,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.vocab_embedding import VocabParallelEmbedding
from megatron.core.topology.group import Group
from megatron.core.utils import divide


class ColumnParallelLinear(ParallelLinear):
    """y = x A^T + b with the output features split: rank r holds rows of A for its o/tp outputs.

    Args:
        input_size, output_size: full sizes i and o.
        init_method: fills the full weight [o, i].
        bias: own a bias [o/tp], which starts at zero.
        gather_output: return [s, b, o] on all ranks instead of this rank's part.
        stride: blocks of the output that are each split over the ranks (2 for a gated MLP).
        keep_master_weight_for_test: accepted for compatibility; the full weight is not kept.
        skip_bias_add: return the bias with the output, for a fused kernel to add.
        skip_weight_param_allocation: own no weight; it is passed to `forward` (a tied head).
        embedding_activation_buffer, grad_output_buffer: must be None (deferred embedding
            gradients are not supported).
        is_expert: belongs to a routed expert: split over the expert grid, and the token dispatcher
            does the communication.
        tp_comm_buffer_name, name: labels, kept for other backends.
        disable_grad_reduce: leave the sum of the input gradient to the caller.
        output_dtype: cast the output; None keeps the computing dtype.
        tp_group, pg_collection: None falls back to the current collection.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], object],
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: Group | None = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        tp = resolve_group(tp_group, "expt_tp" if is_expert else "tp", pg_collection)
        super().__init__(config, tp_group=tp, is_expert=is_expert)
        if embedding_activation_buffer is not None or grad_output_buffer is not None:
            raise deferral_is_not_supported()
        self.input_size = input_size
        self.output_size = output_size
        self.gather_output = gather_output
        self.skip_bias_add = skip_bias_add
        self.stride = stride
        self.name = name
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.output_dtype = output_dtype
        self.disable_grad_reduce = disable_grad_reduce
        self.output_size_per_partition = divide(output_size, self.tp_size)
        self.explicit_expert_comm = is_expert and _experts_communicate(config, self.tp_size)
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1 and not is_expert
        self.allreduce_dgrad = (
            self.tp_size > 1
            and not self.sequence_parallel
            and not disable_grad_reduce
            and not self.explicit_expert_comm
        )
        if gather_output and self.sequence_parallel:
            raise ConfigError(
                f"a column-parallel layer {name or ''} gathers its output under sequence"
                " parallelism.",
                rule="its output already covers the whole sequence; gathering it would undo the"
                " saving",
                flags=["--sequence-parallel"],
                fix="use gather_output=False, or drop --sequence-parallel",
            )
        self.spec = LinearCommSpec(
            self.tp_group,
            input_mode=_column_input_mode(self.sequence_parallel, self.allreduce_dgrad),
            fuses_main_grad=config.gradient_accumulation_fusion,
            overlaps=config.async_tensor_model_parallel_allreduce,
            units=self.units(0, stride),
        )

        self.weight: nn.Parameter | None = None
        if not skip_weight_param_allocation:
            self.weight = self.new_parameter(
                self.output_size_per_partition,
                input_size,
                init_method=init_method,
                split_dim=0,
                stride=stride,
            )
        if bias:
            self.bias: nn.Parameter | None = self.new_parameter(
                self.output_size_per_partition, init_method=None, split_dim=0, stride=stride
            )
        else:
            self.register_parameter("bias", None)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: [s, b, i], equal on all ranks; [s/tp, b, i] with sequence parallelism.
            weight: [o/tp, i] instead of the layer's own (a tied head).
            runtime_gather_output: overrides `gather_output`.
        Returns:
            ([s, b, o/tp], or [s, b, o] if gathered; the bias with `skip_bias_add`, else None).
        Communication:
            backward all-reduce of the input gradient; with sequence parallelism forward
            all-gather, and backward all-gather and reduce-scatter.
        """
        if weight is None:
            weight = self.weight
            if weight is None:
                raise ConfigError(
                    "a layer without a weight was called without one.",
                    rule="skip_weight_param_allocation leaves the weight to the caller",
                    fix="pass the tied weight to forward(weight=...)",
                )
        else:
            expected = (self.output_size_per_partition, self.input_size)
            if tuple(weight.shape) != expected:
                raise ConfigError(
                    f"a weight of shape {tuple(weight.shape)} was passed to a layer.",
                    rule=f"[o/tp, i] of this layer is {expected}",
                    fix="pass the shard of this rank",
                )
        added_bias = None if self.skip_bias_add else self.bias
        out = parallel_linear(input_, weight, added_bias, self.spec)
        gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
        if gathers:
            out = gather_from_tensor_model_parallel_region(out, self.tp_group)
        if self.output_dtype is not None:
            out = out.to(self.output_dtype)
        return out, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.input_size} -> {self.output_size} over {self.tp_size} ranks"


class RowParallelLinear(ParallelLinear):
    """y = x A^T + b with the input features split: rank r holds columns of A for its i/tp inputs.

    The bias is replicated and added once, after the sum over the ranks. Under sequence
    parallelism each rank adds it to its own rows, so its gradient is partial over the group; inside
    experts the caller adds it on the first rank alone, so its gradient is zero on the others.

    Args:
        input_size, output_size: full sizes i and o.
        init_method: fills the full weight [o, i].
        bias: own a bias [o], which starts at zero.
        input_is_parallel: the input is already this rank's part, [s, b, i/tp]; otherwise the
            layer cuts it out.
        skip_bias_add: return the bias with the output, for a fused kernel to add.
        stride: blocks of the input that are each split over the ranks.
        keep_master_weight_for_test, is_expert, tp_comm_buffer_name, name, tp_group,
        pg_collection: as in `ColumnParallelLinear`.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: ModelParallelConfig,
        init_method: Callable[[Tensor], object],
        bias: bool,
        input_is_parallel: bool,
        skip_bias_add: bool,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: Group | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        tp = resolve_group(tp_group, "expt_tp" if is_expert else "tp", pg_collection)
        super().__init__(config, tp_group=tp, is_expert=is_expert)
        self.input_size = input_size
        self.output_size = output_size
        self.input_is_parallel = input_is_parallel
        self.skip_bias_add = skip_bias_add
        self.stride = stride
        self.name = name
        self.tp_comm_buffer_name = tp_comm_buffer_name
        self.input_size_per_partition = divide(input_size, self.tp_size)
        self.explicit_expert_comm = is_expert and _experts_communicate(config, self.tp_size)
        self.sequence_parallel = config.sequence_parallel and self.tp_size > 1 and not is_expert
        if self.sequence_parallel and not input_is_parallel:
            raise ConfigError(
                f"a row-parallel layer {name or ''} would cut its input under sequence"
                " parallelism.",
                rule="its input must already be split by features, since it covers the sequence",
                flags=["--sequence-parallel"],
                fix="use input_is_parallel=True, or drop --sequence-parallel",
            )
        output_mode = OutputMode.REDUCE_SCATTER if self.sequence_parallel else OutputMode.ALL_REDUCE
        self.spec = LinearCommSpec(
            self.tp_group,
            output_mode=OutputMode.LOCAL if self.explicit_expert_comm else output_mode,
            fuses_main_grad=config.gradient_accumulation_fusion,
            overlaps=config.async_tensor_model_parallel_allreduce,
            units=self.units(1, stride),
        )
        self.weight = self.new_parameter(
            output_size,
            self.input_size_per_partition,
            init_method=init_method,
            split_dim=1,
            stride=stride,
        )
        if bias:
            self.bias: nn.Parameter | None = self.new_parameter(
                output_size,
                init_method=None,
                split_dim=None,
                partial_grad_axes=(self.split_axis,)
                if self.tp_size > 1 and (self.sequence_parallel or self.explicit_expert_comm)
                else (),
            )
        else:
            self.register_parameter("bias", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Apply the layer.

        Args:
            input_: [s, b, i/tp] with `input_is_parallel`, else [s, b, i].
        Returns:
            ([s, b, o], or [s/tp, b, o] with sequence parallelism; the bias with
            `skip_bias_add`, else None).
        Communication:
            forward all-reduce; with sequence parallelism forward reduce-scatter and backward
            all-gather.
        """
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        added_bias = None if self.skip_bias_add else self.bias
        out = parallel_linear(input_, self.weight, added_bias, self.spec)
        if not self.skip_bias_add:
            return out, None
        if self.spec.units is None or self.bias is None:
            return out, self.bias
        return out, in_rows(self.bias, out.shape)

    def extra_repr(self) -> str:
        """Show the sizes."""
        return f"{self.input_size} -> {self.output_size} over {self.tp_size} ranks"


def _column_input_mode(sequence_parallel: bool, allreduce_dgrad: bool) -> InputMode:
    if sequence_parallel:
        return InputMode.SEQUENCE_SHARD
    return InputMode.REPLICATED if allreduce_dgrad else InputMode.LOCAL


def _experts_communicate(config: ModelParallelConfig, expert_tp_size: int) -> bool:
    """Whether the token dispatcher of the experts does the layer's communication."""
    is_split = expert_tp_size > 1 or config.expert_model_parallel_size > 1
    return is_split and not config.layout_invariant_mode


__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]
