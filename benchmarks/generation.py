r"""Tokens per second of greedy generation, against `generate` of Transformers, on the same weights.

    python -m benchmarks.generation                       # batch 1 and 8, 135 million parameters
    python -m benchmarks.generation --batches 8 --new-tokens 128 --dtype bf16

Transformers saves a Llama of random weights, and both load it. The two programs alternate in one
process with the same threads. Every prompt of a batch has the same length. Both write the same
number of tokens, prefill included, and the tokens must be equal: otherwise the exit status is 1.
The result is the median of the turns. The time to read all weights once is the lower bound of a
step, for any batch size.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.foundation.optional_imports import require
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import NoFlags, read_command_line
from megatron.core.settings.flags import flag
from megatron.inference.forward import CachedModel
from megatron.inference.generate import generate
from megatron.inference.session import open_session
from pretrain_gpt import model_provider

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    batches: tuple[int, ...] = (1, 8)
    prompt_tokens: int = 32
    new_tokens: int = 64
    dtype: str = flag("fp32", choices=DTYPES)
    turns: int = 3
    no_weight_packing: bool = False
    layers: int = 30
    hidden: int = 576
    heads: int = 9
    kv_heads: int = 3
    ffn: int = 1536
    vocabulary: int = 49152


def their_model(directory: Path, options: Flags) -> Any:
    """Save a Llama of the options' size, and return it."""
    transformers = require("transformers", purpose="this comparison")
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.ffn,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        # Large enough that rounding does not change the most likely token.
        initializer_range=0.06,
    )
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config).to(DTYPES[options.dtype]).eval()
    model.save_pretrained(directory)
    return model


def our_model(directory: Path, options: Flags) -> Any:
    """Load the saved model."""
    sys.argv = [
        sys.argv[0], "--load-hf", str(directory), "--tokenizer-type", "NullTokenizer",
        "--seq-length", "2048", "--transformer-impl", "local",
        *(["--bf16"] if options.dtype == "bf16" else []),
    ]  # fmt: skip
    return open_session(model_provider, NoFlags).model


def floor_of(model: Any) -> float:
    """Return the seconds to read all weights once: a lower bound of a step.

    The head reads the embedding, because the two are tied.
    """
    weights = [p.detach() for chunk in model for p in chunk.parameters() if p.dim() > 1]
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        for weight in weights:
            weight.sum()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def main() -> int:
    """Measure and print; return the exit status."""
    options = read_command_line(Flags, description=__doc__.split("\n")[0])
    with tempfile.TemporaryDirectory() as folder:
        theirs = their_model(Path(folder), options)
        ours = our_model(Path(folder), options)
    floor = floor_of(ours)
    print(
        f"{options.dtype}, {torch.get_num_threads()} thread(s), prompt {options.prompt_tokens}, "
        f"{options.new_tokens} new tokens; reading the weights takes {1e3 * floor:.1f} ms"
    )
    is_equal = True
    for batch in options.batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(
            options.vocabulary, (batch, options.prompt_tokens), generator=generator
        )
        times: dict[str, list[float]] = {"theirs": [], "ours": []}
        written: dict[str, Any] = {}
        cached = CachedModel(
            ours,
            vocab_size=options.vocabulary,
            max_rows=batch,
            max_length=options.prompt_tokens + options.new_tokens,
            groups=ProcessGroupCollection.single(),
            packs_weights=not options.no_weight_packing,
        )
        for turn in range(options.turns + 1):
            for name in times:
                begin = time.perf_counter()
                if name == "theirs":
                    written[name] = theirs.generate(
                        prompts,
                        attention_mask=torch.ones_like(prompts),
                        max_new_tokens=options.new_tokens,
                        do_sample=False,
                        pad_token_id=0,
                    ).tolist()
                else:
                    written[name] = generate(
                        cached,
                        prompts.tolist(),
                        max_new_tokens=options.new_tokens,
                        vocab_size=options.vocabulary,
                        max_sequence_length=2048,
                        pg_collection=ProcessGroupCollection.single(),
                    )
                if turn:  # the first turn is a warm-up
                    times[name].append(time.perf_counter() - begin)
        rates = {n: batch * options.new_tokens / statistics.median(t) for n, t in times.items()}
        step = statistics.median(times["ours"]) / options.new_tokens
        same = sum(a == b for a, b in zip(written["ours"], written["theirs"], strict=True))
        is_equal &= same == batch
        print(
            f"batch {batch}: Transformers {rates['theirs']:.1f} tokens/s, "
            f"Lattice {rates['ours']:.1f} tokens/s, {rates['ours'] / rates['theirs']:.2f}x; "
            f"{same} of {batch} rows equal; {1e3 * step:.1f} ms a step with its share of the"
            f" prompt, {step / floor:.1f} times reading the weights",
            flush=True,
        )
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
