"""Processor time of mixers with a state, by length, and the learning of models with them.

    python -m benchmarks.mixers
    python -m benchmarks.mixers --train FOLDER

The first command prints the seconds of forward and backward of one mixer (width 128, 4 heads of 32,
states of 32 rows, fp32, one thread) at each length, lengths in turn. They are user time of the
process; system time is excluded, because it is mostly the allocation of large tensors.

The second command trains a model of 4 layers of width 96 with attention, and one with each mixer in
all layers, on Shakespeare's plays as bytes. It prints the mean losses of 50 steps, and tokens per
second of user time, start included. FOLDER keeps the text and the logs; a model with a log in it is
not trained again. Takes about 1.5 minutes of processor time per model.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from examples.quickstart.corpus import fetch_plays, write_json_lines
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.core.ssm.mixers import RECURRENT_MIXERS
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig

MODELS = ("attention", *RECURRENT_MIXERS)
REPOSITORY = Path(__file__).resolve().parent.parent
HIDDEN, AVERAGED, TOKENS_OF_STEP = 128, 50, 512
_DELTA = ("--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 16"
          " --linear-value-head-dim 24")  # fmt: skip
SIZES_OF_MIXER = {
    "gated_delta_net": _DELTA,
    "kda": _DELTA,
    "mamba2": "--mamba-num-groups 1 --mamba-num-heads 6 --mamba-head-dim 16 --mamba-state-dim 32",
}
TRAINING = (
    "--hidden-size 96 --num-layers 4 --num-attention-heads 4 --ffn-hidden-size 256 --swiglu"
    " --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
    " --seq-length 256 --micro-batch-size 2 --global-batch-size 2 --lr 3e-3 --min-lr 3e-4"
    " --lr-decay-style cosine --lr-warmup-iters 50 --weight-decay 0.1 --clip-grad 1.0"
    " --hidden-dropout 0 --attention-dropout 0 --split 99,1,0 --eval-iters 0"
    " --tokenizer-type ByteTokenizer --transformer-impl local --num-workers 0 --log-interval 10"
    " --init-method-std 0.05 --seed 11"
)


def build_mixer(name: str) -> torch.nn.Module:
    """Return a mixer with the benchmark's sizes."""
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, linear_num_key_heads=4, linear_num_value_heads=4,
        linear_key_head_dim=32, linear_value_head_dim=32, mamba_num_groups=1, mamba_num_heads=4,
        mamba_head_dim=32, mamba_state_dim=32, use_cpu_initialization=True,
        experimental_attention_variant=name,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(kind=config.layer_kind(1)).submodules.self_attention
    single = ProcessGroupCollection.single()
    return build_module(spec, config=config, layer_number=1, pg_collection=single)


def user_seconds(who: int = resource.RUSAGE_SELF) -> float:
    """Return the user time of this process, or of its finished children."""
    return resource.getrusage(who).ru_utime


def seconds_of_step(mixer: torch.nn.Module, length: int) -> float:
    """Return the user time of forward and backward of one sequence."""
    x = torch.randn(length, 1, HIDDEN, requires_grad=True)
    before = user_seconds()
    mixer(x)[0].sum().backward()
    return user_seconds() - before


def print_times(lengths: list[int], repeats: int) -> None:
    """Print the least seconds, and microseconds per token, by mixer and length."""
    torch.set_num_threads(1)
    for name in RECURRENT_MIXERS:
        mixer, best = build_mixer(name), dict.fromkeys(lengths, float("inf"))
        for _ in range(repeats):
            for length in lengths:
                best[length] = min(best[length], seconds_of_step(mixer, length))
        for length, seconds in best.items():
            each = seconds / length * 1e6
            print(
                f"{name:>16} {length:>7} tokens {seconds:7.2f} s {each:7.1f} us a token", flush=True
            )


def run(*words: str, folder: Path, log: str) -> float:
    """Run a script of the repository with its output in a file; return its user time."""
    before = user_seconds(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    script, *rest = words
    subprocess.run(
        [sys.executable, str(REPOSITORY / script), *rest], cwd=folder, env=environment, check=True,
        stdout=(folder / log).open("w"),
    )  # fmt: skip
    return user_seconds(resource.RUSAGE_CHILDREN) - before


def train(folder: Path, names: Sequence[str], iterations: int) -> None:
    """Train each model; print mean losses, and tokens per second of user time."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "plays_text_document.bin").exists():
        text, _ = write_json_lines(fetch_plays(folder), folder)
        run("tools/preprocess_data.py", "--input", str(text), "--output-prefix", "plays",
            "--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1",
            folder=folder, log="text.txt")  # fmt: skip
    for name in names:
        log, mixer = folder / f"{name}.jsonl", []
        if name in RECURRENT_MIXERS:
            mixer = ["--experimental-attention-variant", name, *SIZES_OF_MIXER[name].split()]
        seconds = folder / f"{name}.seconds"
        if not seconds.exists():
            log.unlink(missing_ok=True)
            used = run("pretrain_gpt.py", *TRAINING.split(), *mixer, "--data-path",
                       "plays_text_document", "--train-iters", str(iterations),
                       "--metrics-jsonl", log.name, folder=folder, log=f"{name}.txt")  # fmt: skip
            seconds.write_text(f"{used}\n")
        losses = [line["lm loss"] for line in map(json.loads, log.read_text().splitlines())
                  if "lm loss" in line]  # fmt: skip
        means = {step: sum(losses[step - AVERAGED : step]) / AVERAGED
                 for step in (100, 200, 500, 1000) if step <= len(losses)}  # fmt: skip
        shown = "  ".join(f"{step}: {mean:.3f}" for step, mean in means.items())
        rate = len(losses) * TOKENS_OF_STEP / float(seconds.read_text())
        print(f"{name:>16} {rate:7.0f} tokens/s of processor   {shown}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    lengths: list[int] = flag([8192, 16384, 32768], nargs="+")
    """Tokens of a sequence."""
    repeats: int = 3
    """Repetitions of each length; the least time counts."""
    train: Path | None = flag(None, metavar="FOLDER")
    """Train models instead; keep text and logs in this folder."""
    models: tuple[str, ...] = flag(MODELS, choices=MODELS)
    """Mixers to train."""
    iterations: int = 1000
    """Steps of each model."""


def main() -> None:
    """Measure and print."""
    flags = read_command_line(Flags, prog="python -m benchmarks.mixers", description=__doc__)
    if flags.train is None:
        print_times(flags.lengths, flags.repeats)
    else:
        train(flags.train.resolve(), flags.models, flags.iterations)


if __name__ == "__main__":
    main()
