"""Build the index files of a run ahead of time, on a machine without accelerators.

    python tools/build_index.py --data-path 0.3 data/a 0.7 data/b --data-cache-path cache ...

It reads all flags of pretrain_gpt.py, so that it builds exactly the files that training maps. If
several processes run at once (an array of jobs on a common file system, RANK and WORLD_SIZE set),
each starts with other corpora, and no index is built twice. With --sample-order native there is
nothing to build; the corpora are checked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.cli.dry_run import planned_world_size
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolved import resolve_vocabulary
from megatron.training.datasets.blends import gpt_dataset_class, gpt_dataset_config
from megatron.training.datasets.iterators import sample_counts
from megatron.training.rules import resolve_and_check
from megatron_lattice import read_deepspeed_config


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Build all index files, print their sizes, and return the exit status."""
    begun = time.perf_counter()
    run = resolve_and_check(
        lambda: parse_command_line(argv, deepspeed_reader=read_deepspeed_config), planned_world_size
    )
    tokenizer = build_tokenizer(run.namespace())
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    run = resolve_vocabulary(run, int(tokenizer.vocab_size))
    run = run.overlaid({"rank": rank, "world_size": world_size})
    config = gpt_dataset_config(run, tokenizer)
    if config.mock:
        print("synthetic samples: nothing to build")
        return ExitStatus.DONE
    parts = BlendedMegatronDatasetBuilder(
        gpt_dataset_class(run.data), list(sample_counts(run)), lambda: True, config
    ).build()
    for split, part in zip(Split, parts, strict=True):
        for dataset in part if isinstance(part, list) else [part]:
            if dataset is not None:
                members = len(getattr(dataset, "datasets", [dataset]))
                print(f"{split.name}: {len(dataset):,} samples of {members} corpora")
    print(f"done in {time.perf_counter() - begun:.2f} s")
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
