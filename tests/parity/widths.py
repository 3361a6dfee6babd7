"""Which learning rate is best at which width, with muP and without it.

    python -m tests.parity.widths [--steps 400] [--widths 64 128 256]

Trains a small GPT for each width and rate on text of a random automaton (a third-order Markov chain
over 64 symbols, whose loss at best is known to be far below that of single symbols) and prints
the mean loss of the last steps. Takes some minutes; no test runs it.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, SEQUENCE, BATCH, HEAD, BASE = 64, 32, 8, 16, 64
CHOICES = 4
"""Symbols that may follow a context, with unequal shares."""
MEASURED_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    widths: tuple[int, ...] = (64, 128, 256)
    """Hidden sizes; muP's base is the first."""
    exponents: tuple[int, ...] = (-8, -7, -6, -5)
    """Learning rates, as powers of two."""
    steps: int = 400
    optimizer: str = "adam"


def text(steps: int) -> Tensor:
    """Return tokens [steps, batch, s + 1] of the automaton."""
    generator = torch.Generator().manual_seed(0)
    follows = torch.randint(VOCABULARY, (VOCABULARY, CHOICES), generator=generator)
    shares = torch.tensor([0.6, 0.2, 0.15, 0.05])
    tokens = torch.randint(VOCABULARY, (steps * BATCH, SEQUENCE + 1), generator=generator)
    picks = torch.multinomial(shares, tokens.numel(), True, generator=generator).view_as(tokens)
    for i in range(2, SEQUENCE + 1):
        # The symbol two places back picks among what may follow the last one.
        pick = (picks[:, i] + tokens[:, i - 2]) % CHOICES
        tokens[:, i] = follows[tokens[:, i - 1], pick]
    return tokens.view(steps, BATCH, SEQUENCE + 1)


def final_loss(width: int, rate: float, uses_mup: bool, data: Tensor, optimizer: str) -> float:
    """Train once; return the mean loss of the last steps."""
    rng_state().set_seed(1)
    config = TransformerConfig(
        num_layers=2, hidden_size=width, num_attention_heads=width // HEAD, hidden_dropout=0.0,
        attention_dropout=0.0, init_method_std=0.08, use_mup=uses_mup, normalization="RMSNorm",
        mup_base_hidden_size=BASE if uses_mup else None, mup_base_head_dim=HEAD,
    )  # fmt: skip
    groups = ProcessGroupCollection.single()
    model = GPTModel(
        config, get_gpt_decoder_block_spec(config, False), vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE, pg_collection=groups,
    )  # fmt: skip
    settings = OptimizerConfig(
        optimizer=optimizer, lr=rate, weight_decay=0.0, adam_beta2=0.95, on_nonfinite_grad="skip"
    )
    chosen = get_megatron_optimizer(settings, [model])
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    losses = []
    for step, tokens in enumerate(data):
        rate_now = min(1.0, (step + 1) / (0.1 * len(data))) * (1 - step / len(data))
        for group in chosen.param_groups:
            group["lr"] = rate * rate_now * group["lr_mult"]
        chosen.zero_grad()
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:].contiguous()).mean()
        loss.backward()
        chosen.step()
        losses.append(float(loss.detach()))
    last = losses[-max(1, int(MEASURED_SHARE * len(losses))) :]
    return sum(last) / len(last)


def main() -> int:
    """Print a table of losses for each parametrisation."""
    flags = read_command_line(Flags, prog="python -m tests.parity.widths", description=__doc__)
    torch.set_num_threads(1)
    data = text(flags.steps)
    for uses_mup in (True, False):
        print("muP" if uses_mup else "without muP", flush=True)
        for width in flags.widths:
            losses = {
                e: final_loss(width, 2.0**e, uses_mup, data, flags.optimizer)
                for e in flags.exponents
            }
            best = min(losses, key=lambda e: losses[e])
            row = " ".join(f"{loss:6.3f}" for loss in losses.values())
            print(f"  width {width:4d}  {row}  best 2^{best}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
