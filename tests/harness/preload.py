"""Imported once, by the fork server: what every rank would otherwise import or set up itself."""

import torch._dynamo  # every torch optimizer imports the compiler when it is made: 1.5 s
import torch.distributed.fsdp
from _pytest.config import _prepareconfig

import megatron.training.training
import pretrain_gpt
import tests.harness.worker

__all__ = ["megatron", "pretrain_gpt", "tests", "torch"]

# pytest rewrites the `assert` statements of test modules so that a failure shows the values;
# making a configuration installs its import hook, here also for the ranks.
_prepareconfig(["--noconftest", "-c", "/dev/null"])
