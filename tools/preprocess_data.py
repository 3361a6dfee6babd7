"""Turn text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod --workers 8

This writes data/corpus_text_document.bin and .idx. Any number of workers writes the same bytes.
The files get their final names only when they are complete. To continue a killed run, give the
same command again. See docs/preprocessing.md.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Set before a tokenizer library is loaded: --workers processes run one thread each.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

from megatron.core.datasets.corpus.files import MASK_SUFFIX
from megatron.core.datasets.corpus.index_file import DType
from megatron.core.datasets.corpus.inspection import PERCENTILES, percentiles_of, write_report
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.chat_template import find_chat_template
from megatron.core.datasets.preprocessing.encoder import (
    ConversationEncoder,
    Encoder,
    unit_bytes_for,
)
from megatron.core.datasets.preprocessing.flags import (
    PreprocessingFlags,
    rank_and_world,
    shard_name,
    shards_of,
)
from megatron.core.datasets.preprocessing.inputs import InputFile, expand_inputs, share_of
from megatron.core.datasets.preprocessing.job import Job, encode_in_order
from megatron.core.datasets.preprocessing.stats import CorpusStats, CorpusTally
from megatron.core.datasets.preprocessing.transforms import (
    FillInMiddle,
    SentenceSplitter,
    fill_in_middle,
)
from megatron.core.datasets.preprocessing.units import read_units
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.foundation.pictures import check_picture_name
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.tokenizers.gigatoken_backend import TokenizerBackend, make_engine
from megatron.core.tokenizers.megatron_tokenizer import TOKENIZER_TYPES
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

DESCRIPTION = """Turn text into token files for training: PREFIX_text_document.bin and .idx.
The same input gives the same bytes with any number of workers. A killed run continues where it
stopped when the same command is given again.

example:
  python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER --append-eod"""


@dataclass(frozen=True, kw_only=True)
class TokenizerFlags:
    """Tokenizer."""

    tokenizer_type: str = flag(metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    tokenizer_model: str | None = None
    """File, folder or name of the model."""
    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Ids of NullTokenizer, limit of TikTokenizer."""
    vocab_extra_ids: int = 0
    """Added <extra_id_N> tokens."""
    tiktoken_pattern: str | None = None
    """v1, v2, or a regular expression."""
    tiktoken_num_special_tokens: int | None = None
    """Reserved ids before the ranks of a list (default: from its file, else 1000)."""
    tiktoken_special_tokens: tuple[str, ...] | None = None
    """Names of the first reserved ids."""
    trust_remote_code: bool = False
    """Run Python code from a tokenizer's folder."""
    tokenizer_hf_no_include_special_tokens: bool = False
    """Leave out the special tokens that a Hugging Face tokenizer adds around a text."""
    tokenizer_backend: TokenizerBackend = flag(
        TokenizerBackend.auto, values={one.value: one for one in TokenizerBackend}
    )
    """auto chooses gigatoken if it is installed and gives the same ids."""
    append_eod: bool = False
    """End every document with a token."""

    def load(self) -> TextTokenizer:
        """Load the tokenizer."""
        return build_tokenizer(self)


@dataclass(frozen=True, kw_only=True)
class Flags(PreprocessingFlags):
    """Flags of the command line."""

    tokenizer: TokenizerFlags


def make_encoder(flags: Flags, files: Sequence[InputFile]) -> Encoder | ConversationEncoder:
    """Load the tokenizer and everything that a worker needs."""
    flags.check(files)
    tokenizer = flags.tokenizer.load()
    engine, reason = make_engine(tokenizer, flags.tokenizer.tokenizer_backend)
    print(f"tokenizing with {reason}", file=sys.stderr)
    end = (
        tokenizer.special_id("eod", purpose="--append-eod") if flags.tokenizer.append_eod else None
    )
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    if flags.conversations.sft:
        return ConversationEncoder(
            engine=engine,
            template=find_chat_template(
                flags.conversations.chat_template,
                flags.tokenizer.tokenizer_model,
                flags.template_limits,
            ),
            key=flags.json_keys[0],
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            end_of_document=end,
            pack_length=flags.conversations.pack_length,
            identity=tokenizer.unique_identifiers,
        )
    splitter = None
    if flags.input.split_sentences:
        splitter = SentenceSplitter(flags.input.lang, keep_newlines=flags.input.keep_newlines)
        splitter.load()
    middle: FillInMiddle | None = None
    if flags.fill_in_middle.fim_rate:
        middle = fill_in_middle(
            tokenizer.vocab,
            rate=flags.fill_in_middle.fim_rate,
            spm_rate=flags.fill_in_middle.fim_spm_rate,
            seed=flags.fill_in_middle.fim_seed,
            names=flags.fill_in_middle.fim_tokens,
        )
    # Datasets of sentences put special tokens around the sentences that they join.
    around = ((), ()) if flags.input.split_sentences else tokenizer.around_a_text
    if around[1][-1:] == (end,):
        end = None  # the tokenizer adds it
    return Encoder(
        engine=engine,
        keys=flags.json_keys,
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        around_a_text=around,
        end_of_document=end,
        split=splitter,
        transform=middle,
        identity=tokenizer.unique_identifiers,
    )


def settings_of(flags: Flags, encoder: Encoder | ConversationEncoder) -> dict[str, Any]:
    """Return the settings that determine the output for given files."""
    if isinstance(encoder, ConversationEncoder):
        return {
            "tokenizer": encoder.identity,
            "chat_template": encoder.template.source,
            "json_keys": flags.json_keys,
            "append_eod": flags.tokenizer.append_eod,
            "pack_length": flags.conversations.pack_length,
        }
    text, middle = flags.input, flags.fill_in_middle
    found = {
        "tokenizer": encoder.identity,
        "json_keys": flags.json_keys,
        "split_sentences": text.split_sentences,
        "append_eod": flags.tokenizer.append_eod,
        "fim_rate": middle.fim_rate,
    }
    if text.split_sentences:
        found |= {"lang": text.lang, "keep_newlines": text.keep_newlines}
    if middle.fim_rate:
        names = None if middle.fim_tokens is None else list(middle.fim_tokens)
        found |= {"fim_spm_rate": middle.fim_spm_rate, "fim_seed": middle.fim_seed}
        found["fim_tokens"] = names
    return found


def corpus_prefix(output: str, name: str, level: str, keys: Sequence[str]) -> str:
    """Return the path of one output corpus without its suffix."""
    if name not in keys:  # the mask of a corpus
        return f"{output}_{name.removesuffix(MASK_SUFFIX)}_{level}{MASK_SUFFIX}"
    return f"{output}_{name}_{level}"


def preprocess(flags: Flags) -> list[CorpusStats]:
    """Write the corpora of this process's shards and print a summary."""
    if flags.output.report:
        check_picture_name(flags.output.report, flag="--report")
    files = expand_inputs(flags.input.input, flags.input.input_format)
    num_shards = flags.shards.num_shards or flags.shards.world_size or 1
    rank, world_size = 0, 1
    if flags.shards.num_shards or flags.shards.world_size or flags.shards.rank is not None:
        rank, world_size = rank_and_world(num_shards, flags.shards.rank, flags.shards.world_size)
    encoder = make_encoder(flags, files)
    level = "sentence" if flags.input.split_sentences else "document"
    tallies = []
    for shard in shards_of(rank, world_size, num_shards):
        output = shard_name(flags.output.output_prefix, shard, num_shards)
        prefixes = {
            name: corpus_prefix(output, name, level, flags.json_keys) for name in encoder.corpora
        }
        job = Job(
            files=share_of(files, shard, num_shards),
            keys=flags.json_keys,
            encoder=encoder,
            settings=settings_of(flags, encoder),
            corpora={name: (prefixes[name], dtype) for name, dtype in encoder.corpora.items()},
            output=output,
            num_workers=flags.running.workers,
            skip_bad=flags.input.skip_bad_lines,
            restart=flags.output.restart,
            log_interval=flags.running.log_interval,
            journal_interval_s=flags.running.journal_interval,
            unit_bytes=unit_bytes_for(flags.conversations.pack_length),
        )
        begun = time.perf_counter()
        tally = job.run()
        dtypes = {name: dtype.__name__ for name, dtype in encoder.corpora.items()}
        lengths = {
            name: IndexedDataset(prefix).document_lengths() for name, prefix in prefixes.items()
        }
        text = summary(tally, prefixes, dtypes, time.perf_counter() - begun, lengths)
        if job.was_finished:
            text += f"\nalready complete; --restart writes {output} again"
        print(text, flush=True)
        if flags.output.report:
            write_report(
                shard_name(flags.output.report, shard, num_shards)
                if num_shards > 1
                else flags.output.report,
                lengths,
                title=os.path.basename(output),
                summary=text,
            )
        tallies.append(tally)
    return tallies


def summary(
    tally: CorpusStats,
    prefixes: dict[str, str],
    dtypes: dict[str, str],
    seconds: float,
    lengths: dict[str, np.ndarray],
) -> str:
    """Return documents, tokens, lengths, bytes per token, skipped lines, and the rate.

    Args:
        prefixes: name of a corpus -> its path without suffix.
        dtypes: name of a corpus -> type of its tokens.
        seconds: duration of this run.
        lengths: name of a corpus -> tokens of each document.
    """
    lines = []
    for name, prefix in prefixes.items():
        corpus = tally.corpora.get(name, CorpusTally())
        lines += [
            f"{prefix}.bin/.idx",
            f"  documents         {corpus.documents:>14,}",
        ]
        if corpus.sequences != corpus.documents:
            lines.append(f"  sequences         {corpus.sequences:>14,}")
        lines.append(f"  tokens            {corpus.tokens:>14,}  ({dtypes[name]})")
        if corpus.documents:
            shown = ", ".join(
                f"{percent} %: {length:,}"
                for percent, length in zip(PERCENTILES, percentiles_of(lengths[name]), strict=True)
            )
            if corpus.text_bytes:  # a mask holds none
                per_token = corpus.text_bytes / max(corpus.tokens, 1)
                lines.append(f"  bytes per token   {per_token:>14.3f}")
            lines += [
                f"  tokens/document   {corpus.tokens / corpus.documents:>14.1f}  "
                f"({shown}; longest {lengths[name].max():,})",
            ]
        if corpus.cut:
            lines.append(f"  cut to a pack     {corpus.cut:>14,}")
        if corpus.empty:
            lines.append(f"  empty, left out   {corpus.empty:>14,}")
    for reason, count in sorted(tally.skipped.items()):
        lines.append(f"skipped lines, {reason}: {count:,} of {tally.lines:,}")
    rate = max(seconds, 1e-9)
    lines.append(
        f"{tally.seconds:.1f} s"
        + (f" in all, {seconds:.1f} s in this run" if tally.seconds > seconds + 0.1 else "")
        + f", {tally.text_bytes / max(tally.seconds, rate) / 1e6:.2f} MB/s, "
        f"{tally.tokens / max(tally.seconds, rate):,.0f} tokens/s"
    )
    return "\n".join(lines)


def find_optimal_num_workers(flags: Flags) -> None:
    """Tokenize the beginning of the input with several numbers of workers and print the rates."""
    files = expand_inputs(flags.input.input, flags.input.input_format)
    encoder = make_encoder(flags, files)
    units, documents = [], 0
    for unit in read_units(files, keys=flags.json_keys):
        units.append(unit)
        documents += sum(len(part.per_document) for part in encoder(unit).parts.values())
        if documents >= flags.running.max_documents:
            break
    rates: dict[int, float] = {}
    print(f"{'workers':>8} {'docs/s':>12} {'tokens/s':>12}")
    for num_workers in flags.running.workers_to_check:
        begun = time.perf_counter()
        tally = CorpusStats()
        for unit, encoded in encode_in_order(units, encoder, num_workers):
            tally.add(unit.file, encoded)
        seconds = time.perf_counter() - begun
        print(
            f"{num_workers:>8} {tally.documents / seconds:>12.1f} {tally.tokens / seconds:>12.0f}",
            flush=True,
        )
        rates[num_workers] = tally.tokens / seconds
    if rates:
        print(f"most tokens/s: --workers {max(rates, key=lambda workers: rates[workers])}")


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    flags = read_command_line(
        Flags,
        argv,
        usage="%(prog)s --input PATH ... --output-prefix PREFIX --tokenizer-type TYPE [flags]",
        description=DESCRIPTION,
        allow_abbrev=False,
    )
    try:
        if flags.running.find_optimal_num_workers:
            find_optimal_num_workers(flags)
        else:
            preprocess(flags)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
