"""Turn text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx. The same input gives the same bytes with any number
of workers. Nothing appears under the final names before everything is written; a run that was
killed continues where it stopped when the same command is given again. See docs/preprocessing.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# Before a tokenizer library is loaded: --workers says how many processes work, each on one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
from megatron.core.datasets.corpus.index_file import DType
from megatron.core.datasets.corpus.paths import MASK_SUFFIX
from megatron.core.datasets.preprocessing.chat_template import find_chat_template
from megatron.core.datasets.preprocessing.conversations import (
    ConversationEncoder,
    unit_bytes_for,
)
from megatron.core.datasets.preprocessing.encoder import Encoder
from megatron.core.datasets.preprocessing.fill_in_middle import FillInMiddle, fill_in_middle
from megatron.core.datasets.preprocessing.flags import check_flags, parse_flags
from megatron.core.datasets.preprocessing.inputs import (
    InputFile,
    InputFormat,
    expand_inputs,
    share_of,
)
from megatron.core.datasets.preprocessing.job import Job
from megatron.core.datasets.preprocessing.length_report import check_report_name, write_report
from megatron.core.datasets.preprocessing.sentence_splitting import SentenceSplitter
from megatron.core.datasets.preprocessing.shards import rank_and_world, shard_name, shards_of
from megatron.core.datasets.preprocessing.stats import CorpusStats, percentiles_of, summary
from megatron.core.datasets.preprocessing.template_process import template_limits_of
from megatron.core.datasets.preprocessing.units import read_units
from megatron.core.datasets.preprocessing.workers import encode_in_order
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.tokenizers.gigatoken_backend import (
    CheckedEngine,
    GigatokenEngine,
    TokenizerBackend,
    make_engine,
)
from megatron.core.tokenizers.megatron_tokenizer import TOKENIZER_TYPES, make_tokenizer


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; the flags are Megatron's."""
    return parse_flags(argv, TOKENIZER_TYPES, [one.value for one in TokenizerBackend])


def load_tokenizer(args: argparse.Namespace) -> TextTokenizer:
    """Load the tokenizer that the flags name."""
    return make_tokenizer(
        args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        vocab_extra_ids=args.vocab_extra_ids,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tiktoken_special_tokens=args.tiktoken_special_tokens,
        trust_remote_code=args.trust_remote_code,
    )


def make_encoder(
    args: argparse.Namespace, files: Sequence[InputFile]
) -> Encoder | ConversationEncoder:
    """Load the tokenizer and everything else that a worker needs."""
    check_flags(args, files)
    tokenizer = load_tokenizer(args)
    engine, reason = make_engine(tokenizer, TokenizerBackend(args.tokenizer_backend))
    print(f"tokenizing with {reason}", file=sys.stderr)
    checked = CheckedEngine(engine, tokenizer) if isinstance(engine, GigatokenEngine) else engine
    end = tokenizer.special_id("eod", purpose="--append-eod") if args.append_eod else None
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    if args.sft:
        return ConversationEncoder(
            engine=checked,
            template=find_chat_template(
                args.chat_template, args.tokenizer_model, template_limits_of(args)
            ),
            key=args.json_keys[0],
            dtype=dtype,
            vocab_size=tokenizer.vocab_size,
            end_of_document=end,
            pack_length=args.pack_length,
            identity=tokenizer.unique_identifiers,
        )
    splitter = None
    if args.split_sentences:
        splitter = SentenceSplitter(args.lang, keep_newlines=args.keep_newlines)
        splitter.load()
    middle: FillInMiddle | None = None
    if args.fim_rate:
        middle = fill_in_middle(
            tokenizer.vocab,
            rate=args.fim_rate,
            spm_rate=args.fim_spm_rate,
            seed=args.fim_seed,
            names=args.fim_tokens,
        )
    return Encoder(
        engine=checked,
        keys=args.json_keys,
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        end_of_document=end,
        split=splitter,
        transform=middle,
        identity=tokenizer.unique_identifiers,
    )


def settings_of(args: argparse.Namespace, encoder: Encoder | ConversationEncoder) -> dict[str, Any]:
    """Return what decides the output besides the files."""
    if isinstance(encoder, ConversationEncoder):
        return {
            "tokenizer": encoder.identity,
            "chat_template": encoder.template.source,
            "json_keys": args.json_keys,
            "append_eod": args.append_eod,
            "pack_length": args.pack_length,
        }
    names = "json_keys split_sentences append_eod fim_rate"
    if args.split_sentences:
        names += " lang keep_newlines"
    if args.fim_rate:
        names += " fim_spm_rate fim_seed fim_tokens"
    return {"tokenizer": encoder.identity, **{name: getattr(args, name) for name in names.split()}}


def corpus_prefix(output: str, name: str, level: str, keys: Sequence[str]) -> str:
    """Return the path of one output corpus without its suffix."""
    if name not in keys:  # the mask beside a corpus
        return f"{output}_{name.removesuffix(MASK_SUFFIX)}_{level}{MASK_SUFFIX}"
    return f"{output}_{name}_{level}"


def preprocess(args: argparse.Namespace) -> list[CorpusStats]:
    """Write the corpora of this process's shards and print what was made."""
    if args.report:
        check_report_name(args.report)
    format = InputFormat(args.input_format) if args.input_format else None
    files = expand_inputs(args.input, format)
    num_shards = args.num_shards or args.world_size or 1
    rank, world_size = 0, 1
    if args.num_shards or args.world_size or args.rank is not None:
        rank, world_size = rank_and_world(num_shards, args.rank, args.world_size)
    encoder = make_encoder(args, files)
    level = "sentence" if args.split_sentences else "document"
    tallies = []
    for shard in shards_of(rank, world_size, num_shards):
        output = shard_name(args.output_prefix, shard, num_shards)
        prefixes = {
            name: corpus_prefix(output, name, level, args.json_keys) for name in encoder.corpora
        }
        job = Job(
            files=share_of(files, shard, num_shards),
            keys=args.json_keys,
            encoder=encoder,
            settings=settings_of(args, encoder),
            corpora={name: (prefixes[name], dtype) for name, dtype in encoder.corpora.items()},
            output=output,
            num_workers=args.workers,
            skip_bad=args.skip_bad_lines,
            restart=args.restart,
            log_interval=args.log_interval,
            journal_interval_s=args.journal_interval,
            unit_bytes=unit_bytes_for(args.pack_length),
        )
        begun = time.perf_counter()
        tally = job.run()
        dtypes = {name: dtype.__name__ for name, dtype in encoder.corpora.items()}
        percentiles = {name: percentiles_of(prefix) for name, prefix in prefixes.items()}
        told = summary(tally, prefixes, dtypes, time.perf_counter() - begun, percentiles)
        if job.was_finished:
            told += f"\nalready there; --restart makes {output} again"
        print(told, flush=True)
        if args.report:
            write_report(
                shard_name(args.report, shard, num_shards) if num_shards > 1 else args.report,
                tally,
                percentiles,
                title=os.path.basename(output),
                summary=told,
            )
        tallies.append(tally)
    return tallies


def find_optimal_num_workers(args: argparse.Namespace) -> None:
    """Tokenize the beginning of the input with several numbers of workers and print the rates."""
    files = expand_inputs(args.input, InputFormat(args.input_format) if args.input_format else None)
    encoder = make_encoder(args, files)
    units, documents = [], 0
    for unit in read_units(files, keys=args.json_keys):
        units.append(unit)
        documents += sum(len(part.sequences.per_document) for part in encoder(unit).parts.values())
        if documents >= args.max_documents:
            break
    rates: dict[int, float] = {}
    print(f"{'workers':>8} {'docs/s':>12} {'tokens/s':>12}")
    for num_workers in args.workers_to_check:
        begun = time.perf_counter()
        tally = CorpusStats()
        for encoded in encode_in_order(units, encoder, num_workers):
            tally.add(encoded)
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
    args = parse_args(argv)
    try:
        if args.find_optimal_num_workers:
            find_optimal_num_workers(args)
        else:
            preprocess(args)
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
