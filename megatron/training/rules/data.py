"""Rules about the corpus and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.core.datasets.corpus.files import tokens_exist
from megatron.core.datasets.corpus.object_store import is_url
from megatron.core.foundation.errors import MegatronError, MissingInputError
from megatron.training.config.data import DataSettings, TokenizerSettings
from megatron.training.config.resolved import ResolvedRun, transitions_of
from megatron.training.rules.registry import problem, rule


def _blends(data: DataSettings) -> dict[str, list[str] | str | None]:
    return {
        "--data-path": data.data_path,
        "--data-args-path": data.data_args_path,
        "--per-split-data-args-path": data.per_split_data_args_path,
    }


def _per_split(data: DataSettings) -> dict[str, list[str] | None]:
    return {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }


def names_data(run: ResolvedRun) -> bool:
    """Return whether any flag names a corpus; otherwise samples are synthetic."""
    return any(_blends(run.data).values()) or any(_per_split(run.data).values())


@rule
def data_is_named_once(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that flags name corpora in one way."""
    data = run.data
    ways = [flag for flag, value in _blends(data).items() if value]
    per_split = [flag for flag, value in _per_split(data).items() if value]
    if len(ways) + bool(per_split) > 1:
        yield problem(
            f"{' and '.join(ways + per_split)} are given together.",
            "corpora are named in one way: one blend that --split cuts, or one blend per split",
            *ways,
            *per_split,
            fix=f"keep {(per_split or ways)[0]}",
        )
    if data.mock_data and (ways or per_split):
        yield problem(
            f"--mock-data is given together with {(ways + per_split)[0]}.",
            "samples are synthetic or read",
            *ways,
            *per_split,
            fix="drop --mock-data",
        )
    if data.split is not None and (per_split or data.per_split_data_args_path):
        yield problem(
            "--split is given although each split names its own corpora.",
            "--split cuts one blend",
            *per_split,
            fix="drop --split",
        )


@rule
def corpora_exist(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the files of all corpora and all settings files exist."""
    data = run.data
    for flag, words in {"--data-path": data.data_path, **_per_split(data)}.items():
        if run.encoders.traits.has_images:
            rule = "a model that reads images is trained on files of JSON lines"
            fix = "name a file; weights of files are not supported"
            yield from _missing_files(dict.fromkeys(words or (), flag), rule, fix)
            continue
        for prefix in _prefixes(words or []):
            if is_url(prefix):
                if data.object_storage_cache_path is None:
                    yield problem(
                        f"{flag} {prefix} is in an object store.",
                        "its index and blocks are cached in a local directory",
                        "--object-storage-cache-path",
                        fix="add --object-storage-cache-path DIRECTORY",
                    )
                continue
            missing = [] if Path(f"{prefix}.idx").is_file() else [f"{prefix}.idx"]
            missing += [] if tokens_exist(f"{prefix}.bin") else [f"{prefix}.bin"]
            if missing and _is_number(prefix):
                yield problem(
                    f"{flag} has {len(words or [])} words, including the weight {prefix}.",
                    "no corpus has a weight, or each corpus has one: weight and prefix in turn",
                    fix="give a weight for every corpus",
                )
                break
            if missing:
                yield MissingInputError(
                    f"{flag} {prefix}: {' and '.join(missing)} not found.",
                    rule="a corpus is a pair of files PREFIX.idx and PREFIX.bin, given as PREFIX",
                    flags=[flag],
                    fix=_nearest_prefix(prefix),
                )
    for flag in ("--data-args-path", "--per-split-data-args-path"):
        if path := _blends(data)[flag]:
            yield from _missing_files({str(path): flag})


def _missing_files(
    flags: Mapping[str, str], rule: str = "it names a file", fix: str = "check the path"
) -> Iterator[MegatronError]:
    """Yield an error for each path that is no file; `flags` are path -> flag."""
    for path, flag in flags.items():
        if not Path(path).is_file():
            found = f"{flag} {path}: no such file."
            yield MissingInputError(found, rule=rule, flags=[flag], fix=fix)


def _prefixes(words: list[str]) -> list[str]:
    """Return the prefixes of a blend: all words, or every second word after a weight."""
    if len(words) % 2 == 0:
        is_weighted = all(map(_is_number, words[::2]))
        return words[1::2] if is_weighted else words
    return words


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _nearest_prefix(prefix: str) -> str:
    path = Path(prefix)
    if path.suffix in (".bin", ".idx") and path.is_file():
        return f"leave out the suffix: {path.with_suffix('')}"
    found = sorted(path.parent.glob("*.idx")) if path.parent.is_dir() else []
    if found:
        return f"there is {found[0].with_suffix('')}"
    return "make the files with tools/preprocess_data.py, or try --mock-data"


@rule
def split_is_readable(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --split is up to three numbers with a positive sum."""
    text = run.data.split
    if text is None:
        return
    try:
        # Quotes and brackets of a launch script may reach the program: '99,1,0'.
        parts = [float(part) for part in text.strip(" '\"[]()").replace("/", ",").split(",")]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < sum(parts) < float("inf"):
        yield problem(
            f"--split {text!r}.",
            "it is up to three shares, of train, validation and test",
            fix="use --split 969,30,1",
        )


@rule
def phases_are_iterations(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that phases end at ascending numbers of steps within the run."""
    schedule = run.schedule
    if schedule.phase_transition_iterations is None:
        return
    flag = "--phase-transition-iterations"
    try:
        steps = transitions_of(run)
    except ValueError:
        steps = [0]
    within = all(0 < step < (schedule.train_iters or 0) for step in steps)
    if not within or sorted(set(steps)) != steps:
        yield problem(
            f"{flag} {schedule.phase_transition_iterations!r} with {schedule.train_iters} steps.",
            "ascending numbers of steps, separated by commas, all before the last step",
            fix=f"{flag} {max(1, (schedule.train_iters or 2) // 2)}",
        )


_MODEL_FILE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer",
               "TikTokenizer")  # fmt: skip


def _needed(asked: TokenizerSettings) -> dict[str, str | int | None]:
    """Return flag -> value of the settings that the tokenizer's type requires."""
    if asked.tokenizer_type == "GPT2BPETokenizer":
        return {"--vocab-file": asked.vocab_file, "--merge-file": asked.merge_file}
    if asked.tokenizer_type in (*_MODEL_FILE, "HuggingFaceTokenizer"):
        return {"--tokenizer-model": asked.tokenizer_model}
    if asked.tokenizer_type == "NullTokenizer":
        return {"--vocab-size": asked.vocab_size}
    return {}


@rule
def the_tokenizer_is_complete(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the type and the files of the tokenizer."""
    kind = run.tokenizer.tokenizer_type
    if kind is None:
        if run.tokenizer.vocab_size is None and names_data(run):
            yield problem(
                "neither --tokenizer-type nor --vocab-size is given.",
                "the embedding has one row per token id",
                fix="name the tokenizer of the corpus",
            )
        return
    needed = _needed(run.tokenizer)
    for flag, value in needed.items():
        # The model of a Hugging Face tokenizer is a directory or the name of a repository.
        is_file = isinstance(value, str) and kind != "HuggingFaceTokenizer"
        if value is None:
            yield problem(
                f"--tokenizer-type {kind} without {flag}.",
                f"{kind} is built from {', '.join(needed)}",
                fix=f"add {flag}",
            )
        elif is_file:
            yield from _missing_files({str(value): flag})
