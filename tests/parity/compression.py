"""Train on a real text with each form of gradients: `python -m tests.parity.compression`.

A small GPT learns macbeth.txt byte by byte on two ranks. For each form the table shows the bytes
that a rank sends for gradients, of those that it sends without compression, and the loss: its mean
over the last 50 steps, and its difference from the run without compression. Exits with status 1 if
that is above 0.5 %.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.distributed import run_distributed

TEXT = Path(__file__).parents[1] / "fixtures/text/macbeth.txt"
SEQUENCE, SAMPLES, WIDTH = 64, 8, 64
LIMIT = 0.005
FORMS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"grad_compression": "bf16"},
    "int8": {"grad_compression": "int8"},
    "powersgd rank 16": {
        "grad_compression": "powersgd",
        "powersgd_rank": 16,
        "grad_compression_warmup": 20,
    },
}


def train(
    groups: ProcessGroupCollection, form: dict[str, Any], num_steps: int
) -> tuple[list[float], int, int]:
    """Return the loss of each step, and bytes sent for gradients with and without compression."""
    rng_state().set_seed(11)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        ffn_hidden_size=4 * WIDTH,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model: nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=256,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        pg_collection=groups,
    )
    ddp = DistributedDataParallel(
        config, DistributedDataParallelConfig(**form), model, pg_collection=groups
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=2e-3, weight_decay=0.0), [ddp], pg_collection=groups
    )
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    positions = torch.arange(SEQUENCE).unsqueeze(0).expand(SAMPLES // groups.dp.size(), -1)
    losses = []
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - SEQUENCE - 1, (SAMPLES,), generator=generator)
        rows = torch.stack([text[i : i + SEQUENCE + 1] for i in starts.tolist()])
        mine = rows[groups.dp.rank() :: groups.dp.size()]
        ddp.zero_grad_buffer()
        logits = ddp(mine[:, :-1], positions, None)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), mine[:, 1:].flatten())
        loss.backward()
        finalize_model_grads([ddp], pg_collection=groups)
        optimizer.step()
        losses.append(float(loss.detach()))
    traffic = [buffer.traffic for buffer in ddp.gradient_buffers]
    return losses, sum(t.sent for t in traffic), sum(t.plain for t in traffic)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    steps: int = 300


def main() -> None:
    """Print the table."""
    num_steps = read_command_line(Flags, description=__doc__).steps
    last = min(50, num_steps)
    print(f"{'form':<18}{'bytes sent':>12}{'loss':>9}{'difference':>12}{'seconds':>9}")
    plain, worst = 0.0, 0.0
    for name, form in FORMS.items():
        began = time.perf_counter()
        ranks = run_distributed(train, 2, form, num_steps, timeout_s=600.0)
        seconds = time.perf_counter() - began
        tail = [sum(pair) / 2 for pair in zip(*(r[0][-last:] for r in ranks), strict=True)]
        loss = sum(tail) / last
        plain = plain or loss
        difference = loss / plain - 1
        worst = max(worst, abs(difference))
        _, sent, uncompressed = ranks[0]
        share = sent / uncompressed if uncompressed else 1.0
        print(
            f"{name:<18}{share:>12.3f}{loss:>9.4f}{difference:>+12.3%}{seconds:>9.1f}", flush=True
        )
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
