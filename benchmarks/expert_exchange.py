"""Exposed time of the exchange of tokens: `python -m benchmarks.expert_exchange`.

Two expert-parallel ranks train a small model with artificially slow all-to-alls: each result is
delayed until a fixed number of milliseconds after its start. The delay takes no processor time, so
the measurement is valid on a busy machine. The table has the time of a step and the ranks' waiting
time, for layers that compute in sequence, with the shared expert during the exchange, with forwards
during backwards, and with both. Median of five steps of six micro batches. Takes about half a
minute.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import collectives
from megatron.core.transport.work import Work
from tests.harness.distributed import run_distributed

WAYS: dict[str, dict[str, Any]] = {
    "in turn": {},
    "shared expert beside": {"moe_shared_expert_overlap": True},
    "forward beside backward": {"overlap_moe_expert_parallel_comm": True},
    "both": {"moe_shared_expert_overlap": True, "overlap_moe_expert_parallel_comm": True},
}
HIDDEN, LENGTH, VOCABULARY, STEPS, MICRO_BATCHES = 256, 256, 64, 5, 6


class _HeldBack:
    """A collective whose result is delayed; records the waiting time."""

    def __init__(self, pending: Work[torch.Tensor], ready_at: float, waited: list[float]):
        self._pending, self._ready_at, self._waited = pending, ready_at, waited
        self.destination = pending.destination

    def wait(self) -> torch.Tensor:
        before = time.perf_counter()
        result = self._pending.wait()
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        self._waited.append(time.perf_counter() - before)
        return result


def seconds_of_a_step(groups: Any, way: dict[str, Any], held_s: float) -> tuple[float, float]:
    """Return the median times of a step and of waiting in it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=HIDDEN,
        moe_shared_expert_intermediate_size=2 * HIDDEN,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        add_bias_linear=False,
        expert_model_parallel_size=2,
        **way,
    )
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, False),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    waited: list[float] = []
    start = collectives.start_all_to_all

    def start_slowly(*args: Any) -> _HeldBack:
        return _HeldBack(start(*args), time.perf_counter() + held_s, waited)

    ids = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(1, -1)

    def forward_step(_: Any, chunk: GPTModel) -> Any:
        return chunk(ids, positions, None, labels=ids), lambda loss: (loss.mean(), {})

    step = partial(
        get_forward_backward_func(),
        forward_step_func=forward_step,
        data_iterator=None,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=LENGTH,
        micro_batch_size=1,
        pg_collection=groups,
    )
    steps, waits = [], []
    with mock.patch.object(collectives, "start_all_to_all", start_slowly):
        for _ in range(STEPS + 1):
            waited.clear()
            torch.distributed.barrier(groups.ep)
            before = time.perf_counter()
            step()
            steps.append(time.perf_counter() - before)
            waits.append(sum(waited))
    return statistics.median(steps[1:]), statistics.median(waits[1:])


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    held_ms: float = 10.0
    """Minimum duration of an exchange."""


def main() -> None:
    """Measure and print."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    print(f"{'':<26}{'step s':>9}{'waiting s':>11}")
    for name, way in WAYS.items():
        found = run_distributed(seconds_of_a_step, 2, way, options.held_ms / 1e3, ep=2)
        print(
            f"{name:<26}" + "".join(f"{max(x):>10.3f}" for x in zip(*found, strict=True)),
            flush=True,
        )


if __name__ == "__main__":
    main()
