"""Train on 32k tokens at a time, on four ranks and on one.

`python -m tests.parity.long_context`

A two-layer model reads the plays and poems of `tests/fixtures/text` as bytes, three optimizer steps
of one sequence of 32,768 tokens each. The losses of one process are compared
with those of context-parallel size 4, one line per type of communication. Exits with status 1 if a
loss differs by more than the rounding of reordered sums.

Takes about four minutes on two cores; --seq-length 4096 takes half of one.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.distributed import run_distributed
from tests.harness.pool import REPOSITORY
from tests.harness.tolerances import FP32_REORDERED_SUM
from tests.parity.training_run import read_metrics, train_with_flags

TEXTS = [REPOSITORY / "tests/fixtures/text" / name for name in ("macbeth.txt", "sonnets.txt")]
NUM_STEPS = 3
KINDS = {
    "p2p": {"cp": 4},
    "all_gather": {"cp": 4},
    "a2a": {"cp": 4},
    "a2a+p2p": {"cp": 4, "hierarchical_cp": [2, 2]},
}


def prepare_corpus(
    directory: Path, files: Sequence[Path] = tuple(TEXTS), document: int = 12_000
) -> Path:
    """Write texts as a corpus of bytes, in documents of so many characters; return its prefix."""
    texts = [path.read_text(errors="replace") for path in files]
    # Shorter documents than a sample, so that samples hold ends of documents.
    pieces = [text[i : i + document] for text in texts for i in range(0, len(text), document)]
    lines = directory / "text.jsonl"
    lines.write_text("\n".join(json.dumps({"text": piece}) for piece in pieces))
    command = [sys.executable, "tools/preprocess_data.py", "--input", str(lines)]
    command += ["--output-prefix", str(directory / "text"), "--tokenizer-type", "ByteTokenizer"]
    command += ["--append-eod", "--workers", "1"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    return directory / "text_text_document"


def losses(corpus: Path, seq_length: int, flags: str, **layout) -> list[float]:
    """Train and return the loss of each step."""
    metrics = corpus.parent / f"{len(list(corpus.parent.iterdir()))}.jsonl"
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope"
        f" --seq-length {seq_length} --max-position-embeddings {seq_length} --normalization RMSNorm"
        f" --swiglu --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 1"
        f" --global-batch-size 1 --train-iters {NUM_STEPS} --lr 1e-2 --lr-decay-style constant"
        f" --data-path {corpus} --split 100,0,0 --tokenizer-type ByteTokenizer --eval-iters 0"
        " --cross-entropy-loss-fusion --num-workers 0 --log-interval 1"
        f" --metrics-jsonl {metrics} {flags}"
    ).split()
    size = layout.get("cp", 1)
    run_distributed(train_with_flags, size, words, timeout_s=1200.0, **layout)
    return [line["lm loss"] for line in read_metrics(metrics)]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    seq_length: int = 32768
    """Tokens of a sample."""
    kinds: tuple[str, ...] = flag(tuple(KINDS), choices=KINDS)


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(Path(directory))
        started = time.time()
        expected = losses(corpus, options.seq_length, "")
        shown = "".join(f"{loss:>12.7f}" for loss in expected)
        print(f"{options.seq_length} tokens\n{'one rank':<16}{shown}", flush=True)
        print(f"{'':<16}({time.time() - started:.0f} s)", flush=True)
        for kind in options.kinds:
            layout = KINDS[kind]
            flags = f"--context-parallel-size 4 --cp-comm-type {kind}"
            if "hierarchical_cp" in layout:
                flags += " --hierarchical-context-parallel-sizes 2 2"
            started = time.time()
            found = losses(corpus, options.seq_length, flags, **layout)
            error = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            failed |= not error <= FP32_REORDERED_SUM.rtol
            shown = "".join(f"{loss:>12.7f}" for loss in found)
            print(
                f"{'cp 4 ' + kind:<16}{shown}   largest difference {error:.1e}"
                f" ({time.time() - started:.0f} s)",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
