"""Open, index and blend corpora, and fetch samples, compared with three references.

    python -m benchmarks.data_start [--peer PYTHON]       about 50 s on two cores

Measures each figure in a separate process (time, and peak memory above the imports):

* the order of a corpus of 2,000,000 documents and a billion tokens, cold (no cache) and warm;
* a blend of ten corpora of the same total;
* opening a blend of 1,000 files;
* fetching random samples of 4,096 tokens from documents of about 500.

The references are the recipe in plain numpy, one raw slice of the memory map, and, with `--peer`,
the builder of an installed megatron-core: PYTHON is an interpreter with megatron-core. The peer's
arrays are compared with ours.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import RandomState  # imported here, so that measured times exclude the import

from megatron.core.settings.command_line import read_command_line

SEQUENCE = 4096
VOCABULARY = 50_000


def write_index_only(prefix: str, lengths: np.ndarray) -> None:
    """Write an index, and a sparse token file."""
    from megatron.core.datasets.corpus.index_file import write_index
    from megatron.core.datasets.corpus.token_file import AtomicFile

    index = AtomicFile(prefix + ".idx")
    boundaries = np.arange(len(lengths) + 1, dtype=np.int64)
    write_index(index, dtype=np.uint16, sequence_lengths=lengths, document_indices=boundaries)
    index.rename()
    with open(prefix + ".bin", "wb") as tokens:
        tokens.truncate(2 * int(lengths.sum(dtype=np.int64)))


def write_all(folder: Path, num_documents: int, num_files: int, num_real: int) -> None:
    """Write the corpora of all measurements."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    random = RandomState(0)
    lengths = random.randint(1, 1000, num_documents).astype(np.int32)
    write_index_only(str(folder / "whole"), lengths)
    for part, piece in enumerate(np.array_split(lengths, 10)):
        write_index_only(str(folder / f"part{part}"), piece)
    for file in range(num_files):
        write_index_only(str(folder / f"file{file}"), lengths[file * 200 : file * 200 + 200])
    lengths = random.randint(1, 1000, num_real)
    with IndexedDatasetBuilder(str(folder / "real.bin"), dtype=np.uint16) as builder:
        tokens = random.randint(0, VOCABULARY, lengths.sum()).astype(np.uint16)
        builder.add_documents(tokens, lengths, np.ones(num_real, np.int64))
        builder.finalize(str(folder / "real.idx"))


class Tokenizer:
    """The attributes of a tokenizer that both builders read."""

    vocab_size = VOCABULARY
    eod = VOCABULARY - 1
    pad = -1
    unique_identifiers = {"class": "Tokenizer"}


def build_train(blend: Any, size: int | None, cache: str, **settings: Any) -> Any:
    """Build a train split with the megatron.core of this interpreter."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE,
        blend=blend,
        split="1",
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
        **settings,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, [size, 0, 0], lambda: True, config).build()[0]


def plain_recipe(prefix: str) -> list[np.ndarray]:
    """Make the three arrays of one epoch with numpy alone."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    lengths = IndexedDataset(prefix, check=False).sequence_lengths
    random = RandomState(1234)
    documents = np.arange(len(lengths), dtype=np.int32)
    random.shuffle(documents)
    ends = np.cumsum(lengths[documents], dtype=np.int64)
    count = int(ends[-1] - 1) // SEQUENCE
    begins = np.arange(count + 1, dtype=np.int64) * SEQUENCE
    position = np.searchsorted(ends, begins, side="right")
    offset = begins - (ends[position] - lengths[documents[position]])
    shuffle = np.arange(count, dtype=np.uint32)
    random.shuffle(shuffle)
    return [documents, np.stack([position, offset], 1).astype(np.int32), shuffle]


def digest_of(dataset: Any) -> str:
    """Return a digest of all order arrays, equal for equal orders."""
    import zlib

    parts = getattr(dataset, "datasets", [dataset])
    names = ("document_index", "sample_index", "shuffle_index")
    arrays = [getattr(part, name) for part in parts for name in names]
    if parts != [dataset]:
        arrays += [dataset.dataset_index, dataset.dataset_sample_index]
    return " ".join(f"{zlib.crc32(np.ascontiguousarray(a).tobytes()):08x}" for a in arrays)


def blend_of(kind: str, folder: str) -> tuple[Any, int | None]:
    """Return the blend and its size."""
    if kind == "corpus":
        return ([f"{folder}/whole"], None), None
    if kind == "blend":
        weights = (RandomState(3).rand(10) * 0.2 + 0.9).tolist()
        return ([f"{folder}/part{n}" for n in range(10)], weights), 240_000
    files = len(list(Path(folder).glob("file*.idx")))
    return ([f"{folder}/file{n}" for n in range(files)], [1.0] * files), 20 * files


def fetch_rates(folder: str, order: str) -> dict[str, Any]:
    """Return microseconds for one random sample, best of 5 rounds."""
    import torch

    torch.set_num_threads(1)
    settings = {"sample_order": order} if order else {}
    dataset = build_train(([f"{folder}/real"], None), None, f"{folder}/fetch-cache", **settings)
    tokens = np.memmap(f"{folder}/real.bin", np.uint16, mode="r")
    places = RandomState(5).permutation(len(dataset))[:4000].tolist()

    def raw(place: int) -> Any:
        begin = place * SEQUENCE
        return torch.from_numpy(tokens[begin : begin + SEQUENCE + 1].astype(np.int64))

    best: dict[str, Any] = {"raw": 1e9, "sample": 1e9}
    for _ in range(5):
        for name, work in (("raw", raw), ("sample", dataset.__getitem__)):
            begun = time.perf_counter()
            for place in places:
                work(place)
            best[name] = min(best[name], (time.perf_counter() - begun) / len(places) * 1e6)
    return best


def status_kib(name: str) -> int:
    """Return a memory figure of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise KeyError(name)


def one(kind: str, folder: str, cache: str, order: str) -> dict[str, Any]:
    """Run one measurement in this process."""
    if kind == "fetch":
        return fetch_rates(folder, order)
    if kind != "recipe":
        import torch.distributed

        import megatron.core.datasets.blended_megatron_dataset_builder
        import megatron.core.datasets.gpt_dataset  # noqa: F401

        if not order:  # megatron-core needs a process group
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
    blend, size = blend_of(kind, folder)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    resident = status_kib("VmRSS")
    before = resource.getrusage(resource.RUSAGE_SELF)
    begun = time.perf_counter()
    if kind == "recipe":
        plain_recipe(f"{folder}/whole")
    else:
        settings = {"sample_order": order} if order else {}
        dataset = build_train(blend, size, cache, **settings)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_SELF)
    result: dict[str, Any] = {
        "wall": wall,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "mib": (status_kib("VmHWM") - resident) / 1024,
    }
    if kind in ("corpus", "blend") and order != "native":
        result["digest"] = digest_of(dataset)
    return result


def measured(python: str, kind: str, folder: str, cache: str, order: str) -> dict[str, Any]:
    """Run one measurement in a fresh process of `python`."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = cache or folder  # remembered facts about a corpus are part of the cache
    environment.pop("PYTHONPATH", None)
    here = Path(__file__).resolve()
    if python == sys.executable:
        environment["PYTHONPATH"] = str(here.parents[1])
    done = subprocess.run(
        [python, str(here), "--one", kind, folder, cache, order],
        capture_output=True, text=True, env=environment, cwd=tempfile.gettempdir(),
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def rounds(python: str, kind: str, folder: str, order: str, repeats: int) -> list[dict[str, Any]]:
    """Return the fastest cold and the fastest warm measurement."""
    cold, warm = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            cold.append(measured(python, kind, folder, cache, order))
            warm.append(measured(python, kind, folder, cache, order))
    return [min(found, key=lambda result: result["cpu"]) for found in (cold, warm)]


def show(label: str, state: str, result: dict[str, Any]) -> None:
    """Print one line."""
    print(
        f"  {label:<34} {state:<5} wall {result['wall']:7.4f} s   processor "
        f"{result['cpu']:7.4f} s   peak memory +{result['mib']:6.1f} MiB"
    )


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    peer: str | None = None
    """Interpreter of an environment with megatron-core."""
    documents: int = 2_000_000
    files: int = 1000
    repeats: int = 2


def main() -> None:
    """Write the corpora, measure and print; fail if arrays differ."""
    args = read_command_line(Flags, description="Start-up and fetching of datasets.")
    from megatron.core.datasets import native

    if native.compiled is None:
        print("the compiled part is not built; numpy does its work (pip install . builds it)")
    with tempfile.TemporaryDirectory() as name:
        folder = name
        write_all(Path(folder), args.documents, args.files, 200_000)
        ways = [
            ("megatron order", sys.executable, "megatron"),
            ("native order", sys.executable, "native"),
        ]
        if args.peer:
            ways.append(("megatron-core", args.peer, ""))
        for kind, title in (("corpus", f"one corpus of {args.documents:,} documents"),
                            ("blend", "a blend of ten corpora of the same total"),
                            ("files", f"a blend of {args.files:,} files")):  # fmt: skip
            print(f"{title}, samples of {SEQUENCE} tokens")
            if kind == "corpus":
                show(
                    "recipe in plain numpy", "", measured(sys.executable, "recipe", folder, "", "")
                )
            digests = set()
            for label, python, order in ways:
                for state, result in zip(
                    ("cold", "warm"), rounds(python, kind, folder, order, args.repeats), strict=True
                ):
                    show(label, state, result)
                    digests |= {result["digest"]} if "digest" in result else set()
            if len(digests) > 1:
                raise SystemExit("the arrays differ between the builders")
            if digests and args.peer:
                print("  arrays equal")
        print(f"fetching random samples of {SEQUENCE} tokens")
        for label, python, order in ways:
            rates = measured(python, "fetch", folder, "", order)
            print(
                f"  {label:<34} {rates['sample']:7.1f} us a sample, {1e6 / rates['sample']:8,.0f} "
                f"samples/s, {rates['raw'] / rates['sample']:.2f} of one raw slice "
                f"({rates['raw']:.1f} us)"
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main()
