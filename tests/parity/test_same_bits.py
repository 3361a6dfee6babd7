"""`--layout-invariant-mode` computes the same bits in every layout."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.tolerances import FP32_REORDERED_SUM
from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.execution import Execution
from tests.parity.random_layouts.outcomes import Kind
from tests.parity.random_layouts.same_bits import cases, differences
from tests.parity.random_layouts.settings import from_words


@pytest.mark.distributed
def test_drawn_layouts_have_the_bits_of_one_process(tmp_path):
    assert num_equal(tmp_path, cases(seed=5, num=12)) > 6


@pytest.mark.distributed
@pytest.mark.parametrize("part", ["mtp-num-layers", "multi-latent-attention", "num-experts"])
def test_drawn_layouts_of_models_with_this_part_have_the_bits_of_one_process(part, tmp_path):
    assert num_equal(tmp_path, cases(seed=5, num=5, having=part)) > 2


_MODEL = (
    "--hidden-size 64 --num-attention-heads 4 --kv-channels 32 --ffn-hidden-size 256"
    " --seq-length 16 --vocab-size 89 --tokenizer-type NullTokenizer --layout-invariant-mode"
    " --layout-invariant-tensor-units 4 --layout-invariant-sequence-units 8 --num-workers 0"
    " --log-interval 1 --log-params-norm --distributed-backend gloo --micro-batch-size 1"
    " --train-iters 2 --data-path CORPUS --seed 77 --lr 0.001 --lr-decay-style constant"
    " --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope"
    " --normalization RMSNorm --swiglu --disable-bias-linear --bf16"
)
MODEL_OF_ALL_PARTS = (
    f"{_MODEL} --num-layers 1 --global-batch-size 2 --mtp-num-layers 1 --num-experts 4"
    " --moe-ffn-hidden-size 128 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss"
    " --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --moe-router-score-function sigmoid"
    " --moe-router-dtype fp32 --multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6"
    " --qk-pos-emb-head-dim 4 --v-head-dim 32"
)


@pytest.mark.distributed
def test_split_sequences_of_experts_latents_and_later_tokens_have_the_bits_of_one_process(tmp_path):
    execution, settings = Execution(tmp_path), from_words(MODEL_OF_ALL_PARTS.split())
    one = execution.run(Case(1, False, settings))
    assert one.kind is Kind.EQUAL, one.text
    layout = "--context-parallel-size 2 --tensor-model-parallel-size 2"
    experts = " --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    split = Case(4, False, settings | from_words((layout + experts).split()))
    other = execution.run(split)
    assert other.kind is Kind.EQUAL, other.text
    assert differences(one, other) == []


MODEL_OF_SHARED_KEYS = (
    f"{_MODEL} --num-layers 4 --global-batch-size 4 --group-query-attention"
    " --num-query-groups 2 --qk-layernorm --sandwich-norm --v-l2-norm --attention-k-eq-v"
    " --layer-scalar --num-kv-shared-layers 2 --per-layer-embed-dim 32 --rotary-proportional"
    " --rotary-percent 0.5"
)


@pytest.mark.distributed
def test_shared_keys_and_vectors_of_layers_have_the_bits_of_one_process(tmp_path):
    execution, settings = Execution(tmp_path), from_words(MODEL_OF_SHARED_KEYS.split())
    one = execution.run(Case(1, False, settings))
    assert one.kind is Kind.EQUAL, one.text
    for ranks, layout in (
        (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
        (4, "--tensor-model-parallel-size 2 --context-parallel-size 2"),
        (2, "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"),
    ):
        other = execution.run(Case(ranks, False, settings | from_words(layout.split())))
        assert other.kind is Kind.EQUAL, other.text
        assert differences(one, other) == [], layout


MODELS_OF_ODD_PARTS = (
    "--num-layers 1 --softmax-type learnable --num-attention-heads 12",
    "--num-layers 2 --hybrid-layer-pattern M- --mamba-num-heads 12 --mamba-head-dim 5"
    " --mamba-num-groups 4 --mamba-state-dim 6",
)


@pytest.mark.distributed
@pytest.mark.parametrize("parts", MODELS_OF_ODD_PARTS)
def test_parameters_that_fill_no_vectors_have_the_bits_of_one_process(parts, tmp_path):
    words = _MODEL.replace("-sequence-units 8", "-sequence-units 1").split()
    settings = from_words([*words, *parts.split(), "--global-batch-size", "2"])
    execution = Execution(tmp_path)
    one = execution.run(Case(1, False, settings))
    assert one.kind is Kind.EQUAL, one.text
    for layout in (
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer",
    ):
        other = execution.run(Case(2, False, settings | from_words(layout.split())))
        assert other.kind is Kind.EQUAL, other.text
        assert differences(one, other) == [], layout


def num_equal(folder: Path, drawn: Iterable[Case]) -> int:
    """Count the cases whose bits are the bits of one process; fail at a case that differs."""
    execution, of_one, count = Execution(folder), {}, 0
    for case in drawn:
        key = str(case.serial)
        one = of_one[key] = of_one.get(key) or execution.run(case.serial)
        other = execution.run(case) if one.kind is Kind.EQUAL else one
        if other.kind is Kind.REFUSED:
            assert "--layout-invariant-mode" in other.text
            continue
        assert other.kind is Kind.EQUAL, other.text
        assert differences(one, other) == [], case
        count += 1
    return count


MODE = (
    "layout-invariant-mode", "layout-invariant-tensor-units", "layout-invariant-sequence-units",
)  # fmt: skip
KINDS_OF_CONTEXT_PARALLELISM = (
    "--context-parallel-size 2 --cp-comm-type p2p --pipeline-model-parallel-size 2",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
    "--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2"
    " --sequence-parallel",
)


@pytest.mark.distributed
def test_kinds_of_context_parallelism_have_the_bits_of_one_process(tmp_path):
    execution = Execution(tmp_path)
    drawn = next(cases(seed=5, num=9, having="context-parallel-size"))
    one = execution.run(drawn.serial)
    for layout in KINDS_OF_CONTEXT_PARALLELISM:
        settings = drawn.serial.settings | from_words(layout.split())
        other = execution.run(replace(drawn, ranks=4, settings=settings))
        assert other.kind is Kind.EQUAL, other.text
        assert differences(one, other) == [], layout


@pytest.mark.distributed
def test_the_mode_changes_a_hybrid_model_by_rounding_only(tmp_path):
    execution, flags = Execution(tmp_path), ("bf16", "grad-reduce-in-bf16")
    drawn = next(c for c in cases(seed=5, num=20) if "hybrid-layer-pattern" in c.settings)
    case = drawn.serial.without(*flags)
    one, plain = execution.run(case), execution.run(case.without(*MODE))
    assert one.kind is plain.kind is Kind.EQUAL, one.text + plain.text
    losses = [
        [figure.value for figure in result.figures if figure.name == "step 1 lm loss"]
        for result in (one, plain)
    ]
    assert losses[0] and losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=FP32_REORDERED_SUM.rtol)


@pytest.mark.distributed
def test_without_the_mode_the_bits_depend_on_the_layout(tmp_path):
    execution = Execution(tmp_path)
    plain = [case.without(*MODE) for case in cases(seed=5, num=12)]
    split = next(case for case in plain if case.settings.get("tensor-model-parallel-size") == 2)
    assert differences(execution.run(split.serial), execution.run(split))
