"""Programs built on `megatron`: the planner and DeepSpeed's interface.

`megatron` does not import this package. A script passes parts of this package to `pretrain`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def read_deepspeed_config(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Read the file of --deepspeed_config: the argument `deepspeed_reader` of `pretrain`.

    The function imports the reader when a command line names a file.
    """
    from megatron_lattice.deepspeed import flags

    return flags.read_deepspeed_config(path, given)
