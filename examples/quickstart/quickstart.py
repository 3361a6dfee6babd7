"""Pretrain a GPT on Shakespeare, from download to sampled text, in one command.

run.sh (`make quickstart`) makes the environment and starts this script. Each phase writes files to
./quickstart, and is skipped if they exist, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

import corpus
import report
import training_run
from training_run import REPOSITORY, Layout, Recipe, Stopwatch

PROMPTS = ("ACT I.\n\nScene I. A street in Verona.\n\n", "KING HENRY.\n", "To be, or not to be")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, help="folder of .txt files instead of Shakespeare")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "quickstart")
    parser.add_argument("--train-iters", type=int, help="training steps instead of the recipe's")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    root: Path = options.output
    (root / "data").mkdir(parents=True, exist_ok=True)
    layout = training_run.choose_layout(training_run.available_gpus())
    recipe = training_run.recipe_for(layout)
    if options.train_iters is not None:
        recipe = Recipe(**{**recipe.__dict__, "train_iters": options.train_iters})
    watch = Stopwatch()

    say(f"\n1. Corpus and tokenizer -> {root / 'data'}")
    plays = options.texts or corpus.fetch_plays(root)
    train, valid = corpus.write_json_lines(plays, root / "data")
    vocabulary, merges = corpus.train_tokenizer(train, root / "data")
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(vocabulary),
                 "--merge-file", str(merges)]  # fmt: skip
    prefixes = [preprocess(path, tokenizer, layout, root) for path in (train, valid)]
    vocab_size = len(json.loads(vocabulary.read_text()))
    counts = [corpus.token_counts(prefix, vocab_size) for prefix in prefixes]
    unigram = corpus.unigram_loss(*counts)
    num_valid_tokens = int(counts[1].sum())
    num_valid_bytes = sum(
        len(json.loads(line)["text"].encode()) for line in valid.read_text().splitlines()
    )
    say(f"   {counts[0].sum():,} training and {num_valid_tokens:,} held-out tokens, vocabulary "
        f"{vocab_size:,}; guessing by frequency costs {unigram:.3f} nats a token.")  # fmt: skip
    watch.lap("corpus, tokenizer")

    say(f"\n2. Training on {layout}")
    checkpoints, scalars = root / "checkpoints", root / "tensorboard"
    data = ["--train-data-path", str(prefixes[0]), "--valid-data-path", str(prefixes[1]),
            "--data-cache-path", str(root / "data" / "cache"), "--num-workers", "0"]  # fmt: skip
    # As many evaluation batches as the held-out text fills. Training ends with a further
    # evaluation, so no interval may end there.
    samples = (num_valid_tokens - 1) // recipe.seq_length
    evaluation = ["--eval-interval", str(recipe.train_iters // 4 + 1), "--eval-iters",
                  str(max(samples // recipe.global_batch_size, 1))]  # fmt: skip
    progress = train_model(
        [*recipe.flags(), *training_run.layout_flags(layout), *tokenizer, *data, *evaluation],
        layout, recipe, root, checkpoints, scalars,
    )  # fmt: skip
    watch.lap("training, evaluation")

    title = f"GPT on Shakespeare: tensor {layout.tensor} x pipeline {layout.pipeline}"
    picture = root / "loss.png"
    report.draw_losses(scalars, picture, unigram, title)
    loss = report.read_scalars(scalars)[report.VALIDATION_SCALAR][-1][1]
    watch.lap("picture")

    say("\n3. Sampled text (temperature 0.8, top-k 50)")
    text = sample(recipe, layout, tokenizer, checkpoints, root)
    say(text)
    watch.lap("sampling")

    install = float(os.environ.get("LATTICE_INSTALL_SECONDS", "0"))
    rows = [
        ("held-out loss", f"{loss:.3f} nats per token"),
        ("  perplexity", f"{report.perplexity(loss):.1f}"),
        ("  guessing by frequency", f"{unigram:.3f} nats per token (perplexity "
                                    f"{report.perplexity(unigram):.1f})"),
        ("  bits per byte", f"{corpus.bits_per_byte(loss, num_valid_tokens, num_valid_bytes):.3f}"),
        ("throughput", throughput(progress.milliseconds, recipe)),
        ("install", f"{install:.0f} s"),
        *((name, f"{seconds:.0f} s") for name, seconds in watch.seconds.items()),
        ("total", f"{install + sum(watch.seconds.values()):.0f} s"),
        ("loss curve", str(picture)),
        ("checkpoint", str(checkpoints)),
    ]  # fmt: skip
    say("\n" + report.closing_table(rows))
    say(what_next(root, layout))
    if options.train_iters is None and not loss < unigram - 0.5:
        raise SystemExit("The model did not clearly beat guessing by frequency.")


def preprocess(path: Path, tokenizer: list[str], layout: Layout, root: Path) -> Path:
    """Turn JSON lines into .bin/.idx and return the data prefix."""
    prefix = path.with_suffix("")
    result = prefix.with_name(prefix.name + "_text_document")
    if not result.with_suffix(".idx").exists():
        command = [sys.executable, "tools/preprocess_data.py", "--input", str(path),
                   "--output-prefix", str(prefix), *tokenizer, "--append-eod",
                   "--workers", "2"]  # fmt: skip
        training_run.run_quietly(command, layout, root / "preprocess.log")
    return result


def train_model(
    flags: list[str],
    layout: Layout,
    recipe: Recipe,
    root: Path,
    checkpoints: Path,
    scalars: Path,
) -> training_run.Progress:
    """Train, or continue, up to the recipe's last step."""
    command = training_run.torchrun(layout, "pretrain_gpt.py", [
        *flags, "--save", str(checkpoints), "--load", str(checkpoints),
        "--save-interval", str(max(recipe.train_iters // 3, 1)),
        "--tensorboard-dir", str(scalars), "--log-interval", "2", "--log-throughput",
        "--log-memory-to-tensorboard", "--log-progress",
        # A slow machine stops here with a checkpoint; a second run continues from it.
        "--exit-duration-in-mins", "20",
    ])  # fmt: skip
    (root / "train_command.sh").write_text(training_run.show(command) + "\n")
    done = 0
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    if tracker.exists():
        done = int(tracker.read_text())
    speeds = root / "step_ms.json"
    if done >= recipe.train_iters and speeds.exists():
        say("   Done already; remove the checkpoints folder to train again.")
        return training_run.Progress(json.loads(speeds.read_text()))
    say(f"   The command is in {root / 'train_command.sh'}, its log in {root / 'train.log'}.")
    progress = training_run.run_training(command, layout, root / "train.log", done)
    speeds.write_text(json.dumps(progress.milliseconds))
    return progress


def sample(
    recipe: Recipe, layout: Layout, tokenizer: list[str], checkpoints: Path, root: Path
) -> str:
    """Continue the prompts with the saved model, in the layout of the training."""
    arguments = [*recipe.flags(), *training_run.layout_flags(layout), *tokenizer,
                 "--load", str(checkpoints), "--max-new-tokens", "80", "--temperature", "0.8",
                 "--top-k", "50", "--output", str(root / "samples.txt")]  # fmt: skip
    for prompt in PROMPTS:
        arguments += ["--prompt", prompt]
    command = training_run.torchrun(layout, "tools/generate.py", arguments)
    training_run.run_quietly(command, layout, root / "sample.log")
    return (root / "samples.txt").read_text()


def throughput(milliseconds: list[float], recipe: Recipe) -> str:
    """Format tokens per second by the median step: the first steps warm up, some evaluate."""
    if not milliseconds:
        return "not measured"
    step_ms = statistics.median(milliseconds)
    tokens = recipe.global_batch_size * recipe.seq_length
    return f"{tokens / step_ms * 1000:,.0f} tokens/s ({step_ms:.0f} ms per step of {tokens:,})"


def what_next(root: Path, layout: Layout) -> str:
    """Return suggestions for the time after the first run."""
    return f"""
What to try next
  the curves         quickstart/venv/bin/tensorboard --logdir {root / "tensorboard"}
  your own text      examples/quickstart/run.sh --texts FOLDER --output quickstart/mine
  a longer run       examples/quickstart/run.sh --train-iters 2000 --output quickstart/long
  another layout     edit {root / "train_command.sh"}: the same seed gives the same curve, for
                     example with --tensor-model-parallel-size 1
                     --pipeline-model-parallel-size {layout.num_processes}
  your own model     examples/custom_model"""


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
