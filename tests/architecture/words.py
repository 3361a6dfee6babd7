"""The field's words: what the text and the names of the project say, and what they do not.

    python -m tests.architecture.words

A reader who knows PyTorch, Megatron and the papers needs no glossary. Each entry is a word that has
been used in place of one of the field's, with what to say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.architecture.source import ROOT

INSTEAD: Mapping[str, str] = {
    r"houses?": "the project, the package",
    r"floors? of|the floors?|floors [0-9]": "layers of the import contract",
    r"rooms?": "package, folder; capacity, memory",
    r"doors?": "interface",
    r"ladders?|rungs?": "ZeRO stage; list of stages",
    r"journeys?": "asynchronous all-to-all; path",
    r"bells?": "wakeup semaphore",
    r"roof": "facade; roofline",
    r"in vain": "without success; what happened",
    r"under way": "in flight, running",
    r"dear": "expensive",
    r"alike": "equal, the same",
    r"behind": "after",
    r"facts?": "metadata",
    r"put off|let go|let_go|come to rest": "defer; release; finish",
    r"as it lies|where (?:it|they) lies?": "in place",
    r"uncut|is_whole|whole_parameters?": "unsharded; unshard(), summon_full_params()",
    r"forms? again|formed again": "recompute",
    r"tak(?:es?|ing) turns": "overlap; alternate",
    r"update[_ ]rules?": "optimizer",
    r"lends?|lenders?|lent": "share; pool",
    r"lies|lie (?:in|on|at|beside|with)": "is, are",
    r"stands? (?:in|at|beside|under|there)": "is, are",
    r"goes on (?:from|at|with)|go on (?:from|at|with)": "continue",
    r"visits? (?:its |no |their )?experts?|visits of experts": "routed to; tokens of",
    r"loose_shards?|granules?": "unbucketed_shards; alignment",
    r"SequenceRows|RunParts|TrainingParts|KeysAndValues": "SequenceShard; contexts; KVBlock",
    r"place_of\w*|is_here": "rank_info, position; is_local",
    r"put_state|gradient_arrived|take_over_\w+": "set_state; register_grad_ready; load",
}
"""Regular expression of whole words -> what to say instead."""

_PATTERN = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join(f"({p})" for p in INSTEAD) + r")(?![A-Za-z])", re.IGNORECASE
)
_ALLOWED = re.compile(
    r"roofline|in fact|left behind|Behind|stands? in for|room temperature|//|math\.floor"
)
"""The field's own expressions that contain such a word."""

READ = ("megatron", "megatron_lattice", "tools", "examples", "docs", "benchmarks", "README.md",
        "CONTRIBUTING.md", "pretrain_gpt.py", "Makefile", "Dockerfile")  # fmt: skip
_SUFFIXES = {".py", ".md", ".sh", ".yaml", ".yml", ".c", ".cpp", ""}


def files() -> Iterator[Path]:
    """Yield what is read: source and documents, but not data."""
    for name in READ:
        path = ROOT / name
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in found:
            if file.is_file() and file.suffix in _SUFFIXES and "__pycache__" not in file.parts:
                yield file


def findings() -> Iterator[str]:
    """Yield each use: file, line, word, and what to say."""
    instead = list(INSTEAD.values())
    for file in files():
        for number, line in enumerate(file.read_text().splitlines(), 1):
            for match in _PATTERN.finditer(line):
                if _ALLOWED.search(line):
                    continue
                group = next(i for i, found in enumerate(match.groups()) if found)
                where = f"{file.relative_to(ROOT)}:{number}"
                yield f"{where}: {match.group()!r}: {instead[group]}: {line.strip()}"


def main() -> int:
    """Print all findings; 1 if there are any."""
    found = list(findings())
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
