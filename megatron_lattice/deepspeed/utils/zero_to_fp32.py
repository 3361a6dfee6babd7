"""`deepspeed.utils.zero_to_fp32`: unsharded fp32 weights of a checkpoint of any stage and size.

The weights are the checkpoint's main weights; without main weights, the model's weights in fp32.
One process reads them, from checkpoints of this package's engine. To convert a checkpoint of
DeepSpeed, load it with the engine and save it again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.interop.opening import LATEST_NAME
from megatron.core.foundation.errors import CheckpointError
from megatron_lattice.deepspeed.checkpoints import write_safetensors

_OPTIMIZER = "optimizer."
_MAIN = "optimizer.state.fp32_param."


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return name -> fp32 tensor; all names of a tied weight refer to the same tensor.

    Args:
        tag: directory of the checkpoint; None means the newest checkpoint.
        exclude_frozen_parameters: leave out buffers and parameters that are not trained.
        lazy_mode: accepted and ignored: the values are tensors.
    Raises:
        CheckpointError: there is no such checkpoint, or the checkpoint is damaged.
    """
    latest = Path(checkpoint_dir) / LATEST_NAME
    if tag is None and not latest.is_file():
        raise CheckpointError(
            f"{checkpoint_dir} has no file {LATEST_NAME}.",
            rule="that file names the newest checkpoint",
            fix="give the tag: the name of a directory in it",
        )
    path = Path(checkpoint_dir) / (latest.read_text().strip() if tag is None else tag)
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        raise CheckpointError(
            f"{path} is not a checkpoint of this library's engine.",
            rule="the names of a module's weights are read from such a checkpoint",
            fix="load DeepSpeed's checkpoint with engine.load_checkpoint(), then save it",
        )
    tensors = dist_checkpointing.load_plain_tensors(path)
    mains = {k.removeprefix(_MAIN): v for k, v in tensors.items() if k.startswith(_MAIN)}
    trained = mains or {
        k.partition(".exp_avg.")[2] for k in tensors if k.startswith("optimizer.state.exp_avg.")
    }
    shared = dist_checkpointing.load_common_state_dict(path).get("shared", {})
    found = {
        name: mains[name] if name in mains else value.float()
        for name, value in tensors.items()
        if not name.startswith(_OPTIMIZER)
        and name not in shared
        and not (exclude_frozen_parameters and name not in trained)
    }
    return found | {name: found[first] for name, first in shared.items() if first in found}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a model, on the CPU and in fp32."""
    model = model.cpu().to(torch.float32)
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str,
    output_dir: str,
    max_shard_size: str = "5GB",
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights to `output_dir`/model.safetensors.

    Args:
        max_shard_size: accepted and ignored: there is one file.
        safe_serialization: must be True; pickles are not written.
    """
    if not safe_serialization:
        raise CheckpointError(
            "convert_zero_checkpoint_to_fp32_state_dict(safe_serialization=False).",
            rule="weights are written as safetensors, which no reader executes",
            fix="pass safe_serialization=True",
        )
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    write_safetensors(Path(output_dir) / "model.safetensors", state)
