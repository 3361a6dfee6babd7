"""The rows of the embedding: known only when the tokenizer is open."""

from __future__ import annotations

from dataclasses import replace

from megatron.training.config.resolved import Derivation, ResolvedRun


def pad_vocabulary(size: int, *, multiple: int, tp: int) -> int:
    """Return `size` rounded up so that each tensor-parallel rank owns equal, aligned rows."""
    step = multiple * tp
    return -(-size // step) * step


def resolve_vocabulary(run: ResolvedRun, tokenizer_size: int) -> ResolvedRun:
    """Derive the embedding's rows: those of the model that is loaded, else from the tokenizer.

    Args:
        run: with --load-hf or --use-checkpoint-args, its `vocab_size` is the stored model's.
        tokenizer_size: number of ids.
    """
    size, formula = tokenizer_size, "the tokenizer's number of ids"
    asked = run.tokenizer
    rows = asked.vocab_size
    is_stored = run.checkpoint.load_hf is not None or run.checkpoint.use_checkpoint_args
    if is_stored and rows is not None and rows < size:
        # Rows that the model has not would be further classes of its loss.
        formula = (
            f"the model that is loaded; the tokenizer has {size} ids, of which those from {rows} on"
            " stop the run"
        )
        size = rows
    elif rows is not None and rows > size:
        size, formula = rows, "--vocab-size"
    derived = [Derivation("unpadded_vocab_size", size, formula)]
    tokenizer = asked
    if asked.padded_vocab_size is None:
        tp = run.parallelism.tensor_model_parallel_size
        multiple = run.model.make_vocab_size_divisible_by
        padded = pad_vocabulary(size, multiple=multiple, tp=tp)
        formula = f"{size} rounded up to a multiple of {multiple} * tp {tp}"
        tokenizer = replace(asked, padded_vocab_size=padded)
        derived.append(Derivation("padded_vocab_size", padded, formula))
    return run.with_vocabulary(replace(run.model, unpadded_vocab_size=size), tokenizer, derived)
