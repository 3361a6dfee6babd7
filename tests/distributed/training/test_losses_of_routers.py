"""What routers and indexers count and lose: of tokens, not of padding, in every layout."""

import pytest

from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.random_layouts.corpus import VOCABULARY, write_all
from tests.parity.shared_rows_case import COUNTED, train_and_report
from tests.parity.training_case import assemble

pytestmark = pytest.mark.distributed
TRAINED = (
    "--hidden-size 32 --num-attention-heads 4 --max-position-embeddings 48 --lr 1e-3"
    " --num-workers 0 --micro-batch-size 2 --global-batch-size 8 --log-interval 1"
    " --hidden-dropout 0 --attention-dropout 0 --sft --split 1 --tokenizer-type NullTokenizer"
    " --train-iters 2"
    f" --vocab-size {VOCABULARY} --adam-eps 1e-5 --make-vocab-size-divisible-by 1"
)
LATER = f"{COUNTED} --moe-latent-size 12 --mtp-num-layers 1 --moe-token-drop-policy position"
CLIPPED = (
    "--num-layers 2 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --qk-clip --qk-clip-threshold 0.001"
)
INDEXED = (
    "--num-layers 2 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6"
    " --qk-pos-emb-head-dim 4 --v-head-dim 8 --experimental-attention-variant dsa"
    " --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 8 --dsa-indexer-topk 3"
    " --dsa-indexer-loss-coeff 0.5"
)
LAYOUTS = {
    "tp2 sp": (COUNTED, "--tensor-model-parallel-size 2 --sequence-parallel", {"tp": 2}),
    "tp2 recompute": (LATER, "--tensor-model-parallel-size 2 --moe-layer-recompute", {"tp": 2}),
    "cp2 mtp": (LATER, "--context-parallel-size 2", {"cp": 2}),
    "pp2 mtp": (
        LATER,
        "--pipeline-model-parallel-size 2 --recompute-granularity full --recompute-method uniform"
        " --recompute-num-layers 1",
        {"pp": 2},
    ),
    "cp2 indexer": (INDEXED, "--context-parallel-size 2", {"cp": 2}),
    "ep2": (COUNTED, "--expert-model-parallel-size 2", {"ep": 2}),
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("corpora"))


def gradients(corpus, flags, length, world_size=1, **layout):
    """Return the gradients of two steps, by step and parameter."""
    words = f"{TRAINED} --data-path {corpus} --seq-length {length} {flags}".split()
    reports = run_distributed(train_and_report, world_size, words, timeout_s=180.0, **layout)
    return assemble(reports, VOCABULARY).gradients


def assert_same(found, expected, tolerance):
    for step, of_step in expected.items():
        for name, gradient in of_step.items():
            assert_close(found[step][name], gradient, tolerance, f"step {step} {name}")


@pytest.mark.parametrize("word", ["SINGLE_CONVERSATIONS", "PACKED_CONVERSATIONS"])
@pytest.mark.parametrize("flags", [COUNTED, LATER, INDEXED, CLIPPED])
def test_how_far_samples_are_padded_changes_nothing(corpora, word, flags):
    short, long = (gradients(corpora[word], flags, length) for length in (16, 48))
    assert_same(long, short, FP32_REORDERED_SUM)


@pytest.mark.parametrize("name", LAYOUTS)
def test_padding_is_known_in_every_layout(corpora, name):
    model, flags, layout = LAYOUTS[name]
    corpus = corpora["PACKED_CONVERSATIONS"]
    expected = gradients(corpus, model, 16)
    assert_same(
        gradients(corpus, f"{model} {flags}", 48, 2, **layout), expected, FP32_REORDERED_SUM
    )


@pytest.mark.parametrize("layout", [{}, {"dp": 2}, {"cp": 2}, {"pp": 2}], ids=str)
def test_losses_of_routers_are_means_over_micro_batches_whatever_divides_the_main_loss(
    corpora, layout
):
    """Micro batches with few and with many learned tokens count equally."""
    names = {"cp": "context", "pp": "pipeline-model"}
    words = "".join(f" --{names[n]}-parallel-size 2" for n in layout if n in names)
    model = "--num-layers 2 --num-experts 4 --moe-router-topk 2 --train-iters 1"
    balanced = f"{model} --moe-z-loss-coeff 0.9 --moe-aux-loss-coeff 0.9"
    corpus = corpora["SINGLE_CONVERSATIONS"]

    def of_routers(flags, **options):
        with_losses, without = (
            gradients(corpus, f"{each} {flags}", 16, **options)[0] for each in (balanced, model)
        )
        return {0: {name: with_losses[name] - without[name] for name in without}}

    expected = of_routers("")
    options = {n: size for n, size in layout.items() if n != "dp"}
    found = of_routers(
        f"--calculate-per-token-loss{words}", world_size=2 if layout else 1, **options
    )
    assert_same(found, expected, FP32_REORDERED_SUM)
