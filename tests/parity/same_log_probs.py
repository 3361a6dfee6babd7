"""Compare the bits of log-probabilities of a trainer and a generator, with `batch_invariant_mode`.

    python -m tests.parity.same_log_probs --num-prompts 200

The generator continues each prompt alone and in batches that change, with a cache that is filled in
one pass or in pieces. The trainer computes the log-probabilities of the same tokens without a
cache: each sequence alone, in padded batches, and packed into rows. All have to be equal to the bit
in every layout. The command exits with status 1 if a bit differs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import evaluating
from megatron.inference.engine import Engine, Request
from megatron.inference.forward import CachedModel
from megatron.inference.sampling import Draw, Sampling
from megatron.post_training.log_probs import compute_log_probs
from tests.harness.distributed import run_distributed
from tests.parity.layouts import LayoutCase

VOCABULARY, PADDED, LENGTH, NEW_TOKENS = 230, 256, 160, 6
TIMEOUT_S = 900.0
SAMPLING = Sampling(temperature=1.0, seed=3)
FAMILIES = {
    "llama": dict(
        normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, num_query_groups=4,
    ),
    "gpt2": {},
}  # fmt: skip


LAYOUTS = (
    LayoutCase(), LayoutCase(tp=2), LayoutCase(tp=2, sp=True), LayoutCase(tp=4),
    LayoutCase(tp=2, pp=2),
)  # fmt: skip
"""Layouts of the trainer; the generator has no sequence parallelism."""


def model_of(family: str, dtype: torch.dtype, layout: LayoutCase, groups: object, *, mode: bool):
    """Return (config, model) of one rank."""
    rng_state().set_seed(7)
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=8, kv_channels=32, ffn_hidden_size=256,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, unpadded_vocab_size=VOCABULARY,
        tensor_model_parallel_size=layout.tp, sequence_parallel=layout.sp,
        pipeline_model_parallel_size=layout.pp, pipeline_dtype=dtype, batch_invariant_mode=mode,
        **FAMILIES[family],
    )  # fmt: skip
    stages, rank = pipeline_layout(config), groups.pp.rank()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, False, pp_rank=rank),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        pre_process=stages.has_embedding(rank, 0),
        post_process=stages.has_loss(rank, 0),
        position_embedding_type="learned_absolute" if family == "gpt2" else "rope",
        pg_collection=groups,
    )
    return model


def prompts(count: int) -> list[list[int]]:
    """Return prompts of many lengths."""
    draw = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, LENGTH - NEW_TOKENS, (count,), generator=draw).tolist()
    return [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


def generated(model: object, groups: object, count: int, max_rows: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities [count, new] of an engine that runs `max_rows` at once."""
    cached = CachedModel(
        model, vocab_size=VOCABULARY, max_rows=max_rows, max_length=LENGTH, groups=groups
    )
    engine = Engine(cached)
    rows = {}
    for number, prompt in enumerate(prompts(count)):
        request = Request(
            tokens=prompt, max_new_tokens=NEW_TOKENS, sampling=SAMPLING, sequence=number,
            num_top_logprobs=0,
        )  # fmt: skip
        rows[engine.add(request)] = number
    found = [[] for _ in rows]
    while not engine.is_idle:
        for token in engine.step():
            found[rows[token.request]].append(token.logprobs[0])
    ids, logs = zip(*(zip(*row, strict=True) for row in found), strict=True)
    return torch.tensor(ids), torch.tensor(logs)


def in_pieces(model: object, groups: object, ids: Tensor) -> Tensor:
    """Return the log-probabilities [count, 1] of first tokens whose prompts enter in pieces."""
    cached = CachedModel(model, vocab_size=VOCABULARY, max_rows=1, max_length=LENGTH, groups=groups)
    found = []
    for number, prompt in enumerate(prompts(len(ids))):
        cached.context.reset()
        for begin in range(0, len(prompt), 7):
            piece = prompt[begin : begin + 7]
            draw = Draw(SAMPLING, number, begin + len(piece))
            _, logs = cached.next_tokens(
                [piece], [draw], first_row=0, offsets=[begin], num_top_logprobs=0
            )
        found.append([logs[0][0][1]])
    return torch.tensor(found)


def trained(model: object, groups: object, ids: Tensor, size: int) -> Tensor:
    """Return the log-probabilities [count, new] of a trainer with `size` sequences in a batch, or,
    with size 0, of sequences that are packed into rows."""
    whole = [prompt + new for prompt, new in zip(prompts(len(ids)), ids.tolist(), strict=True)]
    places = list(
        _packed(whole) if size == 0 else ((n // size, n % size, 0) for n in range(len(whole)))
    )
    micro = []
    for batch in range(places[-1][0] + 1):
        mine = [(n, row, begin) for n, (at, row, begin) in enumerate(places) if at == batch]
        ends = [begin + len(whole[n]) for n, _, begin in mine]
        shape = (1 + max(row for _, row, _ in mine), max(ends))
        tokens, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
        labels, starts = torch.full(shape, IGNORED_LABEL), torch.full(shape, shape[1])
        for (n, row, begin), end in zip(mine, ends, strict=True):
            tokens[row, begin:end] = torch.tensor(whole[n])
            positions[row, begin:end] = torch.arange(end - begin)
            starts[row, begin:end] = begin
            labels[row, end - 1 - NEW_TOKENS : end - 1] = ids[n]
        micro.append({"tokens": tokens, "labels": labels, "position_ids": positions})
        if size == 0:
            micro[-1]["document_starts"] = starts.int()
    # In one call all micro batches are padded to the longest one.
    calls = [[one] for one in micro] if size == 1 else [micro]
    found = [
        log_probs
        for call in calls
        for log_probs in compute_log_probs([model], call, pg_collection=groups)
    ]
    return torch.stack(
        [
            found[at].log_probs[row, begin + len(one) - 1 - NEW_TOKENS : begin + len(one) - 1]
            for one, (at, row, begin) in zip(whole, places, strict=True)
        ]
    )


def _packed(whole: list[list[int]]) -> Iterator[tuple[int, int, int]]:
    """Yield (batch, row, first position) of each sequence, several in a row."""
    row = begin = 0
    for one in whole:
        if begin + len(one) > LENGTH:
            row, begin = row + 1, 0
        yield row // 4, row % 4, begin
        begin += len(one)


def ways(
    groups: object, layout: LayoutCase, family: str, dtype: torch.dtype, count: int, mode: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the ids, and name -> log-probabilities of each way; the job of a rank."""
    found: dict[str, Tensor] = {}
    plain = replace(layout, sp=False)
    model = model_of(family, dtype, plain, groups, mode=mode)
    with evaluating([model]):
        ids = None
        for rows in (1, 5, count):
            new, found[f"generator, {rows} rows"] = generated(model, groups, count, rows)
            assert ids is None or not mode or torch.equal(ids, new), f"other tokens in {rows} rows"
            ids = new if ids is None else ids
        found["generator, prompt in pieces"] = in_pieces(model, groups, ids)
    model = model_of(family, dtype, layout, groups, mode=mode)
    for size in (1, 4, count, 0):
        name = f"trainer, batches of {size}" if size else "trainer, packed"
        found[name] = trained(model, groups, ids, size)
    return ids, found


def differences(
    family: str,
    dtype: torch.dtype,
    layouts: tuple[LayoutCase, ...],
    count: int,
    *,
    mode: bool = True,
) -> Iterator[tuple[str, int, int]]:
    """Yield (way, number of log-probabilities that differ in a bit, their number)."""
    expected = None
    for layout in layouts:
        sizes = {"tp": layout.tp, "pp": layout.pp}
        job = (ways, layout.tp * layout.pp, layout, family, dtype, count, mode)
        ids, found = run_distributed(*job, timeout_s=TIMEOUT_S, **sizes)[0]
        expected = expected or (ids, found["trainer, batches of 1"])
        assert not mode or torch.equal(ids, expected[0]), f"{layout} generates other tokens"
        for name, one in found.items():
            reference = expected[1][:, : one.shape[1]]
            yield f"{family}, {dtype}, {layout}: {name}", int((one != reference).sum()), one.numel()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    num_prompts: int = 200
    without_mode: bool = False
    """Count the differences of the same layouts without the mode."""


def main() -> int:
    """Compare all layouts, print a line for each way, and return the exit status."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.same_log_probs", description=__doc__
    )
    total = [0, 0]
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            found = differences(
                family, dtype, LAYOUTS, flags.num_prompts, mode=not flags.without_mode
            )
            for name, num_differ, num in found:
                print(f"{num_differ:6d} of {num} differ: {name}", flush=True)
                total = [total[0] + num_differ, total[1] + num]
    print(f"{total[0]} of {total[1]} log-probabilities differ in a bit")
    return int(total[0] > 0)


if __name__ == "__main__":
    sys.exit(main())
