"""Speed and memory of conversions between our parameters and Hugging Face's files.

    python -m benchmarks.conversion [--megabytes 1000] [--repeats 3] [--directory DIR]

A Llama of random bf16 weights (grouped heads, separate projections; the embedding is its largest
tensor) is read through the family's rules into our parameters and written through them into new
files, in a fresh process. The conversion alternates with a plain copy of the same bytes (read and
written 8 MiB at a time, synced to the disk like the conversion). Files are in the page cache when
they are read. Rows are medians of the wall time. The memory of a conversion is the peak resident
size of its process, minus the peak of a process that only imports the modules and opens the model.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.hugging_face import open_model, write_model
from megatron.hugging_face.model_directory import CONFIG_NAME, SINGLE_NAME
from megatron.hugging_face.writing import write_tensors
from tests.harness.machine import memory_bytes

COPY_BYTES = 8 << 20
HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 2048, 5632, 32, 4, 32000
"""Sizes of TinyLlama-1.1B; the number of layers follows from the requested bytes."""


def make_model(directory: Path, num_bytes: int) -> int:
    """Write a model of about `num_bytes`; return the bytes of its largest tensor."""
    width = HIDDEN // HEADS * GROUPS
    layer = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (width, HIDDEN),
        "self_attn.v_proj": (width, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    ends = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,),
            "lm_head": (VOCABULARY, HIDDEN)}  # fmt: skip
    per_layer = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    fixed = 2 * sum(torch.Size(shape).numel() for shape in ends.values())
    layers = max(1, round((num_bytes - fixed) / per_layer))
    shapes = {f"{name}.weight": shape for name, shape in ends.items()}
    for n in range(layers):
        shapes |= {f"model.layers.{n}.{name}.weight": shape for name, shape in layer.items()}
    directory.mkdir()
    fields = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
    }  # fmt: skip
    (directory / CONFIG_NAME).write_text(json.dumps(fields))
    described = [(name, "BF16", shape) for name, shape in shapes.items()]

    def tensors() -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        for shape in shapes.values():
            yield torch.randn(shape, dtype=torch.bfloat16, generator=generator)

    write_tensors(directory / SINGLE_NAME, described, tensors())
    return 2 * max(torch.Size(shape).numel() for shape in shapes.values())


def copy(source: Path, target: Path) -> float:
    """Copy a file, synced; return the seconds."""
    started = time.perf_counter()
    with source.open("rb") as read, target.open("wb") as write:
        shutil.copyfileobj(read, write, COPY_BYTES)
        write.flush()
        os.fsync(write.fileno())
    return time.perf_counter() - started


def convert(source: Path, target: Path | None) -> dict[str, float]:
    """Convert, or only open, a model in a fresh process. Return seconds and peak MiB."""
    torch.set_num_threads(1)
    contents = open_model(source)
    started = time.perf_counter()
    if target is not None:
        write_model(contents, target)
    return {"seconds": time.perf_counter() - started, "peak": memory_bytes("VmHWM") / (1 << 20)}


def in_fresh_process(source: Path, target: Path | None) -> dict[str, float]:
    """Run `convert` in a process of its own."""
    words = [sys.executable, "-m", "benchmarks.conversion", "--source", str(source)]
    words += [] if target is None else ["--target", str(target)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    megabytes: int = 1000
    repeats: int = 3
    directory: Path | None = None
    """Directory of the files; by default a temporary one."""
    source: Path | None = flag(None, is_hidden=True)
    target: Path | None = flag(None, is_hidden=True)


def main() -> None:
    """Measure and print."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    if options.source is not None:
        print(json.dumps(convert(options.source, options.target)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        place = Path(folder)
        largest = make_model(place / "model", options.megabytes * 10**6)
        size = (place / "model" / SINGLE_NAME).stat().st_size
        opened = in_fresh_process(place / "model", None)["peak"]
        copies, conversions, peaks = [], [], []
        for _ in range(options.repeats):
            copies.append(copy(place / "model" / SINGLE_NAME, place / "copy"))
            (place / "copy").unlink()
            measured = in_fresh_process(place / "model", place / "converted")
            conversions.append(measured["seconds"])
            peaks.append(measured["peak"] - opened)
            shutil.rmtree(place / "converted")
    copied, converted = (size / 1e6 / statistics.median(t) for t in (copies, conversions))
    peak, tensor = statistics.median(peaks), largest / 2**20
    print(f"{size / 1e6:.0f} MB, largest tensor {tensor:.0f} MiB, medians of {options.repeats}")
    print(f"plain copy  {copied:8.0f} MB/s")
    print(f"conversion  {converted:8.0f} MB/s  ({converted / copied:.2f} of the copy)")
    print(f"peak memory {peak:8.0f} MiB   ({peak / tensor:.2f} of the largest tensor)")


if __name__ == "__main__":
    main()
