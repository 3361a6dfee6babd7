"""Log-probabilities of packed and padded micro batches of any sizes, in every layout."""

import pytest
import torch

from megatron.core.foundation.errors import DataError
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.random_scope import SequenceShard
from megatron.post_training.log_probs import compute_log_probs, compute_logits
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.log_probs import sizes_of
from tests.parity.training_case import (
    SEED,
    VOCABULARY,
    build_chunks,
    global_batch,
    transformer_config,
)

MODEL = ModelCase("llama", True, 0.1, experts="deepseek")
LAYOUTS = (
    LayoutCase(tp=2, sp=True, cp=2, ep=2),
    LayoutCase(pp=2, vp=2, dp=2, ep=2),
    LayoutCase(tp=2, sp=True, pp=2, schedule="zb-h1"),
)
DOCUMENTS, ROWS = (3, 5, 6), 5


def micro_batches():
    """Rows of packed documents, and the same documents alone: labels end with each document."""
    batch = global_batch(0, ROWS)
    tokens = batch["tokens"][:, : sum(DOCUMENTS)]
    labels = torch.full_like(tokens, -100)
    starts, alone = torch.zeros_like(tokens), []
    begin = 0
    for length in DOCUMENTS:
        end = begin + length
        labels[:, begin : end - 1] = tokens[:, begin + 1 : end]
        starts[:, begin:end] = begin
        alone.append({"tokens": tokens[:, begin:end], "labels": labels[:, begin:end]})
        begin = end
    packed = {"tokens": tokens, "labels": labels, "document_starts": starts.int()}
    parts = [{k: v[r] for k, v in packed.items()} for r in (slice(0, 1), slice(1, 4), slice(4, 5))]
    return parts, alone


def found(groups, layout):
    rng_state().set_seed(SEED)
    chunks = build_chunks(transformer_config(layout, MODEL), MODEL, layout, groups)
    parts, alone = micro_batches()
    if groups.dp.rank():  # one replica has fewer micro batches than the other, at last none
        packed = compute_log_probs(chunks, [], temperature=1.3)
        compute_log_probs(chunks, alone[:1], temperature=1.3)
        return packed, None
    packed = compute_log_probs(chunks, parts, temperature=1.3)
    return packed, compute_log_probs(chunks, alone, temperature=1.3)


def reference(groups):
    rng_state().set_seed(SEED)
    layout = LayoutCase()
    (model,) = build_chunks(transformer_config(layout, MODEL), MODEL, layout, groups)
    model.eval()
    values = []
    for one in micro_batches()[1]:
        with torch.no_grad():
            logits = model(one["tokens"], None, None)[..., :VOCABULARY] / 1.3
        logs, labels = logits.log_softmax(-1), one["labels"]
        own = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        values.append([x.masked_fill(labels == -100, 0) for x in (own, entropy)])
    return [torch.cat(parts, 1) for parts in zip(*values, strict=True)]


def test_packed_and_separate_documents_have_the_log_probabilities_of_the_logits():
    (expected,) = run_distributed(reference, 1)
    for layout in LAYOUTS:
        for packed, alone in run_distributed(found, layout.world_size, layout, **sizes_of(layout)):
            if alone is None:
                assert packed == []
                continue
            assert [len(one.log_probs) for one in packed] == [1, 3, 1]
            for index, what in enumerate(("log-probabilities", "entropy")):
                rows = torch.cat([one[index] for one in packed])
                assert_close(rows, expected[index], FP32_REORDERED_SUM, f"{what}, {layout}")
                rows = torch.cat([one[index] for one in alone], 1)
                assert_close(rows, expected[index], FP32_REORDERED_SUM, f"{what} alone, {layout}")


def test_a_micro_batch_without_labels_is_refused():
    with pytest.raises(DataError, match="micro batch 0 has .*tokens"):
        compute_log_probs([], [{"tokens": torch.zeros(2, 3)}])


def teacher_logits(groups, layout):
    rng_state().set_seed(SEED)
    chunks = build_chunks(transformer_config(layout, MODEL), MODEL, layout, groups)
    batch = global_batch(0, 4)
    found = compute_logits(chunks, [{"tokens": part} for part in batch["tokens"].split(2)])
    assert all(chunk.training for chunk in chunks)
    return groups.tp.rank(), groups.cp.rank(), found


def test_a_teachers_logits_stay_where_they_are_computed():
    ((_, _, whole),) = run_distributed(teacher_logits, 1, LayoutCase())
    for layout in (LayoutCase(tp=2, sp=True, pp=2, vp=2), LayoutCase(cp=2, dp=2, ep=2)):
        ranks = run_distributed(teacher_logits, 4, layout, **sizes_of(layout))
        held = [rank for rank in ranks if rank[2]]
        assert len(held) == (2 if layout.pp > 1 else 4)
        for tp, cp, found in held:
            for mine, expected in zip(found, whole, strict=True):
                width = mine.shape[-1]
                rows = SequenceShard.zigzag(expected.shape[1], cp, layout.cp).positions()
                part = expected[:, rows, tp * width : min((tp + 1) * width, VOCABULARY)]
                assert_close(mine[..., : part.shape[-1]], part, FP32_REORDERED_SUM, str(layout))
