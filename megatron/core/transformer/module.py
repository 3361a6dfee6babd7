"""The base class of the framework's modules, and the wrapper for half-precision models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.sharded_state import sharded_state_dict_default
from megatron.core.transformer.transformer_config import TransformerConfig


def in_compute_dtype(x: Tensor, config: TransformerConfig) -> Tensor:
    """Return a norm's output [s, b, h] in the dtype of the layer that reads it.

    With an fp32 residual stream norms read and return fp32; weights keep `params_dtype`.
    """
    return x.to(config.params_dtype) if config.fp32_residual_connection else x


class MegatronModule(nn.Module):
    """A torch module with a config, that can declare its state for a sharded checkpoint.

    Subclasses with explicit process groups set `pg_collection`.
    """

    pg_collection: ProcessGroupCollection | None = None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the state of this module and its children.

        Args:
            prefix: prefix of the keys, in the returned dict and in the checkpoint.
            sharded_offsets: (axis, rank, fragments) of leading axes that the tensors lack.
            metadata: choices of the checkpoint format, passed to children.
        """
        return sharded_state_dict_default(self, prefix, sharded_offsets, metadata)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the plain local state dict."""
        return self.state_dict(prefix=prefix, keep_vars=keep_vars)


class GraphableMegatronModule(MegatronModule):
    """Megatron's base of modules that are captured as graphs; equal to its parent here."""


def _map_floats(value: Any, change: Any) -> Any:
    """Apply `change` to every floating-point tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return change(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        mapped = [_map_floats(item, change) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*mapped)
        return type(value)(mapped)
    if isinstance(value, dict):
        return {key: _map_floats(item, change) for key, item in value.items()}
    return value


class Float16Module(MegatronModule):
    """Run a model in fp16 or bf16: weights converted once, inputs at the first stage.

    Outputs of the last stage are converted to fp32, so that losses are summed in fp32.
    """

    module: Any

    def __init__(self, config: TransformerConfig, module: nn.Module) -> None:
        super().__init__(config)
        if not (config.fp16 or config.bf16):
            raise ConfigError(
                "Float16Module with a config without fp16 and bf16.",
                rule="it casts a model to the half precision of its config",
                flags=["--bf16", "--fp16"],
                fix="set one of them, or leave the model unwrapped",
            )
        self.float16_dtype = torch.bfloat16 if config.bf16 else torch.float16
        self.add_module("module", module.to(self.float16_dtype))
        self.pre_process = getattr(module, "pre_process", True)
        self.post_process = getattr(module, "post_process", True)
        self.vp_stage = getattr(module, "vp_stage", None)

    def set_input_tensor(self, input_tensor: Tensor | Sequence[Tensor] | None) -> None:
        """Pass the previous stage's output to the wrapped model."""
        self.module.set_input_tensor(input_tensor)

    def forward(self, *inputs: object, fp32_output: bool = True, **kwargs: object) -> Any:
        """Call the model.

        Args:
            fp32_output: convert the last stage's outputs in fewer bits to fp32.
        """
        if self.pre_process:
            inputs = _map_floats(inputs, lambda t: t.to(self.float16_dtype))
        outputs = self.module(*inputs, **kwargs)
        if self.post_process and fp32_output:
            outputs = _map_floats(
                outputs, lambda t: t.to(torch.promote_types(t.dtype, torch.float32))
            )
        return outputs

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        """Return the wrapped model's state dict: the wrapper adds no prefix to names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load into the wrapped model."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return the wrapped model's plain local state dict."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the wrapped model's state."""
        return self.module.sharded_state_dict(prefix, sharded_offsets, metadata)
