"""Continue prompts with a trained model, in any layout its checkpoint can be loaded in.

    torchrun --nproc-per-node 4 tools/generate.py --load checkpoints \
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --prompt "To be, or not to be" --max-new-tokens 50 --temperature 0.8 --top-k 50

The shape of the model comes from the checkpoint. Flags of layout, precision and tokenizer are
those of pretrain_gpt.py. Without --temperature the most likely token is taken.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.errors import ConfigError
from megatron.inference.generate import generate
from megatron.inference.sampling import Sampling
from megatron.training import launch
from megatron.training.checkpointing import load_checkpoint
from megatron.training.initialize import initialize_megatron
from megatron.training.printing import is_rank_0
from megatron.training.resilience.failure import failures_reported
from megatron.training.resilience.progress import RunProgress
from megatron.training.setup.distributed import shut_down
from megatron.training.setup.model import build_model
from pretrain_gpt import model_provider

DEFAULTS = {
    "use_checkpoint_args": True,
    "exit_on_missing_checkpoint": True,
    "no_load_optim": True,
    "no_load_rng": True,
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 0.0,
    "mock_data": True,
}
"""What training asks for and text does not need."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of this tool to those of training."""
    group = parser.add_argument_group("text generation")
    group.add_argument("--prompt", action="append", required=True, help="text; may be repeated")
    group.add_argument("--max-new-tokens", type=int, default=50, help="tokens added to each")
    group.add_argument("--temperature", type=float, default=0.0, help="0 takes the most likely")
    group.add_argument("--top-k", type=int, default=0, help="choose among the k most likely")
    group.add_argument("--top-p", type=float, default=1.0, help="choose inside this probability")
    group.add_argument("--output", type=Path, help="file for the text, besides the screen")
    return parser


def main() -> None:
    """Load, continue, print."""
    progress = RunProgress(rank=launch.place_of_this_process().rank)
    with failures_reported(progress, []):
        session = initialize_megatron(extra_args_provider=add_arguments, args_defaults=DEFAULTS)
        run, tokenizer = session.run, session.tokenizer
        if run.load is None:
            raise ConfigError(
                "there is no checkpoint to generate from.",
                rule="generation needs trained weights",
                flags=["--load"],
                fix="--load DIRECTORY, the --save of the training run",
            )
        options = run.namespace()
        model = build_model(vars(options), model_provider, session.groups, wrap_with_ddp=False)
        load_checkpoint(model, None, None)
        rows = generate(
            model,
            [tokenizer.tokenize(prompt) for prompt in options.prompt],
            max_new_tokens=options.max_new_tokens,
            vocab_size=tokenizer.vocab_size,
            max_sequence_length=run.max_position_embeddings,
            sampling=Sampling(
                temperature=options.temperature,
                top_k=options.top_k,
                top_p=options.top_p,
                seed=run.seed,
            ),
            eod=tokenizer.eod,
            pg_collection=session.groups,
        )
        text = "\n----------\n".join(tokenizer.detokenize(row) for row in rows)
        if is_rank_0():
            print(text, flush=True)
            if options.output is not None:
                options.output.write_text(text + "\n")
        shut_down()


if __name__ == "__main__":
    main()
