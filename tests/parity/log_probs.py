"""Log-probabilities of the generator and of the trainer, in every layout of four ranks.

    python -m tests.parity.log_probs

The generator continues prompts in its layout, without sequence and context parallelism, and notes
the log-probability of each token; the trainer is asked for those of the same tokens in the whole
layout, in several splits into micro batches. Prints a line a layout and model; exits with status 1
if two numbers differ by more than `LIMIT`, in fp32.
"""

import sys
from dataclasses import replace
from itertools import product

import torch

from megatron.core.parameters.rng import rng_state
from megatron.core.settings.command_line import NoFlags, read_command_line
from megatron.core.utils import evaluating
from megatron.inference.engine import Engine, Request
from megatron.inference.forward import CachedModel
from megatron.inference.sampling import Sampling
from megatron.post_training.log_probs import compute_log_probs
from tests.harness.distributed import run_distributed
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.training_case import (
    SEED,
    SEQUENCE,
    VOCABULARY,
    build_chunks,
    transformer_config,
)

LIMIT = 1e-6
NUM_ROWS, NEW_TOKENS = 6, 8
MODELS = (
    ModelCase("llama", False, 0.0),
    ModelCase("gpt2", True, 0.0),
    ModelCase("llama", False, 0.0, experts="deepseek"),
)
SPLITS = (1, 4, NUM_ROWS)
"""Rows of a micro batch of the trainer, and of the generator's cache."""


def layouts_of(num_ranks: int, model: ModelCase) -> list[LayoutCase]:
    """Return every product of tp, pp, cp and dp, with what each allows besides."""
    found = []
    sizes = [n for n in (1, 2, 4) if n <= num_ranks]
    for tp, pp, cp, dp in product(sizes, repeat=4):
        if tp * pp * cp * dp != num_ranks:
            continue
        for sp, vp in product((False, True) if tp > 1 else (False,), (1, 2) if pp > 1 else (1,)):
            if vp * pp > model.num_layers:
                continue
            case = LayoutCase(tp=tp, sp=sp, pp=pp, vp=vp, cp=cp, dp=dp)
            if not model.experts:
                found.append(case)
                continue
            if tp > 1 and not sp:
                continue
            for ep, expt_tp in product((1, 2, 4), {1, tp}):
                if num_ranks // pp % (ep * expt_tp) == 0:
                    found.append(replace(case, ep=ep, expt_tp=expt_tp))
    return found


def prompts() -> list[list[int]]:
    """Return prompts of several lengths."""
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, SEQUENCE - NEW_TOKENS, (NUM_ROWS,), generator=draw).tolist()
    return [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def generated(groups, layout: LayoutCase, model: ModelCase):
    """Return, per size of the cache and row, what follows the prompt: ids and log-probabilities."""
    rng_state().set_seed(SEED)
    layout = replace(layout, sp=False)
    config = transformer_config(layout, model)
    chunks = build_chunks(config, model, layout, groups)
    sampling = Sampling(temperature=1.0, seed=3)
    found = []
    with evaluating(chunks):
        for max_rows in SPLITS:
            engine = Engine(
                CachedModel(chunks, vocab_size=VOCABULARY, max_rows=max_rows, max_length=SEQUENCE,
                            groups=groups)
            )  # fmt: skip
            rows = {
                engine.add(
                    Request(
                        tokens=prompt,
                        max_new_tokens=NEW_TOKENS,
                        sampling=sampling,
                        sequence=number,
                        num_top_logprobs=0,
                    )
                ): number
                for number, prompt in enumerate(prompts())
            }
            ids, logs = [[] for _ in rows], [[] for _ in rows]
            while not engine.is_idle:
                for token in engine.step():
                    ids[rows[token.request]].append(token.token)
                    logs[rows[token.request]].append(token.logprobs[0][1])
            found.append((ids, logs))
    return found


def trained(groups, layout: LayoutCase, model: ModelCase, written):
    """Return the largest difference of the trainer's log-probabilities from the generator's."""
    rng_state().set_seed(SEED)
    chunks = build_chunks(transformer_config(layout, model), model, layout, groups)
    worst = 0.0
    for size, (ids, logs) in zip(SPLITS, written, strict=True):
        tokens = torch.zeros(NUM_ROWS, SEQUENCE, dtype=torch.long)
        labels = torch.full_like(tokens, -100)
        expected = torch.zeros(NUM_ROWS, SEQUENCE)
        for row, (prompt, new) in enumerate(zip(prompts(), ids, strict=True)):
            whole = torch.tensor(prompt + new)
            tokens[row, : len(whole)] = whole
            labels[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
            expected[row, len(prompt) - 1 : len(whole) - 1] = torch.tensor(logs[row])
        mine = torch.arange(groups.dp.rank(), NUM_ROWS, groups.dp.size())
        parts = mine.split(size)
        found = compute_log_probs(
            chunks,
            [{"tokens": tokens[part], "labels": labels[part]} for part in parts],
            pg_collection=groups,
        )
        for part, one in zip(parts, found, strict=True):
            worst = max(worst, float((one.log_probs - expected[part]).abs().max()))
    return worst


def largest_difference(layout: LayoutCase, model: ModelCase) -> float:
    """Return how far trainer and generator are apart in a layout."""
    one = model.experts and layout.tp > 1  # experts under tp want sp, which has no cache
    generator = layout.serial if layout.cp > 1 or one else layout
    written = run_distributed(
        generated, generator.world_size, generator, model, **sizes_of(generator)
    )[0]
    found = run_distributed(trained, layout.world_size, layout, model, written, **sizes_of(layout))
    return max(found)


def sizes_of(layout: LayoutCase) -> dict[str, int]:
    """Return the sizes of the axes, as the harness takes them."""
    sizes = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep")}
    if layout.ep * layout.expt_tp > 1:
        sizes["expt_tp"] = layout.expt_tp
    return sizes | ({"vp": layout.vp} if layout.vp > 1 else {})


def main() -> int:
    """Compare and print; return the exit status."""
    read_command_line(NoFlags, description=__doc__)
    worst = 0.0
    for model in MODELS:
        for layout in layouts_of(4, model):
            difference = largest_difference(layout, model)
            worst = max(worst, difference)
            print(f"{model}, {layout}: {difference:.1e}", flush=True)
    print(f"largest difference {worst:.1e}, of {LIMIT:.0e} allowed")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
