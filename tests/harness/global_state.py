"""What a process remembers between tests, and how it forgets."""

import random
import sys

import numpy
import torch

from megatron.core.parameters import rng
from megatron.core.step_context.context import StepContext, switch_to


def reset_global_state() -> None:
    """Give a test the state of a fresh process, as far as tests can see it."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    # Asked first, because the call imports the compiler: a second for every new worker.
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    rng.rng_state().__init__()  # type: ignore[misc]
    switch_to(StepContext())
    for module, function in (
        ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
        ("megatron.training.global_vars", "destroy_global_vars"),
    ):
        destroy = getattr(sys.modules.get(module), function, None)
        if destroy is not None:
            destroy()
