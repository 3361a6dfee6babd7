"""The flags of tools/preprocess_data.py, under Megatron's names; which shards a process writes.

No torch import.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.core.datasets.preprocessing.chat_template import TemplateLimits
from megatron.core.datasets.preprocessing.inputs import InputFile, InputFormat
from megatron.core.foundation.errors import ConfigError, raise_together
from megatron.core.settings.flags import flag


def usable_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class InputFlags:
    """Input."""

    input: tuple[str, ...] = flag(metavar="PATH")
    """Files, folders, glob patterns or URLs; .gz, .bz2, .xz and .zst are decompressed."""
    input_format: InputFormat | None = flag(None, values={one.value: one for one in InputFormat})
    """Format of all files; by default it follows from the suffix of each file."""
    json_keys: tuple[str, ...] = ()
    """Members that hold text (by default 'text')."""
    split_sentences: bool = False
    """One sequence for each sentence (NLTK)."""
    lang: str = "english"
    """Language of the sentence model (%(default)s)."""
    keep_newlines: bool = False
    """Keep white space between sentences."""
    skip_bad_lines: bool = False
    """Leave faulty documents out and count them."""


@dataclass(frozen=True, kw_only=True)
class FillInMiddleFlags:
    """Fill in the middle."""

    fim_rate: float = 0.0
    """Share of documents cut in three (%(default)s: none)."""
    fim_spm_rate: float = 0.5
    """Share of the cut documents that begin with the suffix (%(default)s)."""
    fim_seed: int = 1234
    """Seed of the cuts (%(default)s)."""
    fim_tokens: tuple[str, str, str] | None = flag(None, metavar=("PREFIX", "MIDDLE", "SUFFIX"))
    """Tokens of the vocabulary; the usual names if not given."""


@dataclass(frozen=True, kw_only=True)
class ConversationFlags:
    """Conversations."""

    sft: bool = False
    """Documents are lists of messages, under --json-keys (by default 'messages'); a loss mask is
    written in addition to the tokens."""
    pack_length: int | None = None
    """Pack conversations into samples of this many tokens."""
    chat_template: str | None = flag(None, metavar="FILE")
    """Jinja template; by default the tokenizer's template."""


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Output."""

    output_prefix: str
    """Path without _KEY_document.bin."""
    report: str | None = flag(None, metavar="FILE")
    """Lengths of documents: .html or .png."""
    restart: bool = False
    """Ignore an unfinished run and a finished output, and begin again."""
    dataset_impl: str = flag("mmap", choices=["mmap"], is_hidden=True)


@dataclass(frozen=True, kw_only=True)
class ShardFlags:
    """Many machines."""

    num_shards: int | None = None
    """Number of shards, each with its own output."""
    rank: int | None = None
    """Rank of this process; by default from SLURM's variables."""
    world_size: int | None = None
    """Number of processes that share the shards."""


@dataclass(frozen=True, kw_only=True)
class RunningFlags:
    """Running."""

    workers: int = usable_cores()
    """Processes that tokenize; 0 tokenizes in this process (one for each core: %(default)s)."""
    partitions: int = 1
    """Accepted without effect: the workers share one ordered stream."""
    keep_sequential_samples: bool = False
    """Accepted: documents always stay in the order of the input."""
    log_interval: int = 1000
    """Documents between two lines of progress (%(default)s)."""
    journal_interval: float = 5.0
    """Seconds of work a kill can cost (%(default)s)."""
    find_optimal_num_workers: bool = False
    """Measure --workers-to-check on the first --max-documents and write nothing."""
    workers_to_check: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of workers to measure (1 2 4 8 16)."""
    max_documents: int = 100_000
    """Number of documents to measure on (%(default)s)."""


@dataclass(frozen=True, kw_only=True)
class PreprocessingFlags:
    """Input, output and running; the tool adds the flags of the tokenizer."""

    input: InputFlags
    fill_in_middle: FillInMiddleFlags
    conversations: ConversationFlags
    template_limits: TemplateLimits
    output: OutputFlags
    shards: ShardFlags
    running: RunningFlags

    @property
    def json_keys(self) -> list[str]:
        """The members of a document that are tokenized."""
        return list(self.input.json_keys) or ["messages" if self.conversations.sft else "text"]

    def check(self, files: Sequence[InputFile]) -> None:
        """Raise one error for all flags that exclude each other."""
        raise_together([*self._problems(files)], summary="this command line")

    def _problems(self, files: Sequence[InputFile]) -> Iterator[ConfigError]:
        sft, pack_length = self.conversations.sft, self.conversations.pack_length
        if self.running.workers < 0:
            yield ConfigError(
                f"--workers {self.running.workers}.",
                rule="0 (this process) or more",
                flags=["--workers"],
            )
        for spelling, of_what, is_given in (
            ("--split-sentences", "", self.input.split_sentences),
            ("--fim-rate", "", self.fill_in_middle.fim_rate),
            ("--json-keys", " of several keys", len(self.json_keys) > 1),
        ):
            if sft and is_given:
                yield ConfigError(
                    f"--sft with {spelling}{of_what}.",
                    rule="conversations are written by their template, from one key",
                    flags=["--sft", spelling],
                    fix=f"leave out {spelling}",
                )
        if pack_length is not None and (not sft or pack_length < 2):
            yield ConfigError(
                f"--pack-length {pack_length}{'' if sft else ' without --sft'}.",
                rule="conversations are packed, into 2 tokens or more; plain text is cut into "
                "samples when it is read",
                flags=["--pack-length", "--sft"],
            )
        is_text = [f for f in files if f.format in (InputFormat.text, InputFormat.text_lines)]
        if is_text and (len(self.json_keys) > 1 or sft):
            given = "--sft" if sft else f"--json-keys {' '.join(self.json_keys)}"
            yield ConfigError(
                f"{given}, and {is_text[0].path} is plain text.",
                rule="plain text has one key, and no messages",
                flags=["--json-keys", "--sft", "--input-format"],
                fix="give one key, which names the output",
            )


# --- shards -------------------------------------------------------------------------------------


def shard_name(prefix: str, shard: int, num_shards: int) -> str:
    """Return the output prefix of one shard; names sort in the order of the shards."""
    return prefix if num_shards == 1 else f"{prefix}-{shard:05d}-of-{num_shards:05d}"


def rank_and_world(
    num_shards: int,
    rank: int | None,
    world_size: int | None,
    environment: Mapping[str, str] = os.environ,
) -> tuple[int, int]:
    """Return (rank, number of processes) of this process among the processes that share the shards.

    The flags are used first, then a SLURM array, SLURM's process number, and torchrun's variables.
    A task of an array is one of `world_size`, by default of `num_shards`, even if only a part of
    the array was submitted: a killed task can be submitted again alone.

    Raises:
        ConfigError: the rank is not below the number of processes.
    """
    found = "--rank"
    if rank is None and "SLURM_ARRAY_TASK_ID" in environment:
        found = "SLURM_ARRAY_TASK_ID"
        rank, world_size = int(environment[found]), world_size or num_shards
    elif rank is None:
        for found, size in (("SLURM_PROCID", "SLURM_NTASKS"), ("RANK", "WORLD_SIZE")):
            if found in environment and size in environment:
                rank, world_size = int(environment[found]), int(environment[size])
                break
        else:
            rank, world_size = 0, world_size or 1
    world_size = world_size or num_shards
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"{found} {rank} among {world_size} processes.",
            rule="ranks are numbered from 0 and are below the number of processes",
            flags=["--rank", "--world-size", "--num-shards"],
            fix=f"submit an array of 0-{world_size - 1}",
        )
    return rank, world_size


def shards_of(rank: int, world_size: int, num_shards: int) -> range:
    """Return the shards that a process works on, one after the other."""
    return range(rank, num_shards, world_size)
