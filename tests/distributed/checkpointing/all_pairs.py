"""Every ordered pair of many layouts: python -m tests.distributed.checkpointing.all_pairs

Saves a run in each layout, loads it in each other one, saves it again and compares digests.
Prints a summary; exits 1 on any difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

from megatron.core.dist_checkpointing.digest import checkpoint_digest
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    load_each_and_save_again,
    train_and_save,
)
from tests.harness.distributed import run_distributed


def layouts(max_ranks: int) -> list[Layout]:
    """TP {1,2,4} x PP {1,2,4} x VPP {1,2} x DP {1,2,4} x ZeRO {0,1}, up to `max_ranks` ranks."""
    found = []
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if tp * pp * dp > max_ranks:
            continue
        for vp in (1, 2) if pp == 2 else (1,):
            for zero in (0, 1) if dp > 1 else (0,):
                found.append(Layout(tp=tp, pp=pp, dp=dp, vp=vp, zero=zero, sp=tp == 4))
    return found


def main() -> int:
    """Run all pairs and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max-ranks", type=int, default=4)
    arguments = parser.parse_args()
    every, started_at = layouts(arguments.max_ranks), time.monotonic()
    num_pairs, different = 0, []
    for is_tied in (True, False):
        model = Model(is_tied=is_tied)
        with tempfile.TemporaryDirectory() as name:
            root, digests = Path(name), {}
            for layout in every:
                where = root / str(layout)
                run_distributed(
                    train_and_save, layout.size, layout, model, where, 2, **layout.axes()
                )
                digests[layout] = checkpoint_digest(where / "iter_0000002")
            for wanted in every:
                work = [(root / str(source), root / f"{source}--{wanted}") for source in every]
                run_distributed(
                    load_each_and_save_again, wanted.size, wanted, model, work, **wanted.axes()
                )
                for source in every:
                    num_pairs += 1
                    found = checkpoint_digest(root / f"{source}--{wanted}" / "iter_0000002")
                    if found != digests[source]:
                        different.append(f"{source} -> {wanted} ({'' if is_tied else 'un'}tied)")
    print(f"{len(every)} layouts, {num_pairs} ordered pairs, {len(different)} digests differ")
    print(f"{time.monotonic() - started_at:.0f} s")
    for pair in different:
        print(f"  {pair}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
