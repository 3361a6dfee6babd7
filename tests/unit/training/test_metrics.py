"""FLOPs and parameters against hand-computed numbers; the log line against a parser's regex."""

from datetime import datetime

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.presets import preset, preset_names
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.metrics.flops import (
    forward_flops_per_token,
    mean_keys,
    training_flops,
    training_flops_per_token,
)
from megatron.training.metrics.log_line import (
    TrainingLine,
    duration,
    training_line,
    validation_lines,
)
from megatron.training.metrics.model_size import ModelSize
from megatron.training.metrics.peak_flops import peak_of_gpu


def words_of(text: str) -> list[str]:
    """Split a command line."""
    return text.split()


def masked_half(size):
    """Operations per token, forward and backward, of the scores that a causal mask hides."""
    return 6 * size.config.num_layers * size.seq_length * size.attention_width


def test_flops_of_llama3_70b_at_8k_are_the_published_ones():
    size = size_of(preset("llama3-70b"), seq_length=8192)
    causal = training_flops_per_token(size)
    assert causal == pytest.approx(4.49e11, rel=2e-3)
    assert causal + masked_half(size) == pytest.approx(4.81e11, rel=2e-3)  # the full square


def test_flops_of_gpt3_175b_follow_the_formula_of_the_paper():
    # Narayanan et al., section 5.1 (arXiv 2104.04473), without recomputation:
    # 72 B s L h^2 (1 + s / 6h + V / 12 L h), for a token.
    layers, hidden, seq, vocab = 96, 12288, 2048, 51200
    config = TransformerConfig(num_layers=layers, hidden_size=hidden, num_attention_heads=96)
    size = ModelSize(config=config, vocab_size=vocab, seq_length=seq)
    paper = 72 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (12 * layers * hidden))
    assert training_flops_per_token(size) + masked_half(size) == pytest.approx(paper)


@pytest.mark.parametrize("window", [0, 1, 3, 7, 8, None])
def test_keys_of_a_causal_window_are_counted(window):
    length = 8
    seen = sum(min(i, length if window is None else window) for i in range(length))
    # Half of the diagonal counts: the unrestricted mean is s/2.
    expected = (seen + length / 2) / length
    assert mean_keys(length, window) == pytest.approx(expected)


def size_of(found, *, seq_length: int) -> ModelSize:
    run = resolve(
        parse_command_line(["--preset", found.name, "--seq-length", str(seq_length)]).config,
        world_size=1,
    )
    return ModelSize.from_settings(run, vocab_size=found.vocab_size)


RECURRENT = (
    "--experimental-attention-variant gated_delta_net --linear-num-key-heads 2"
    " --linear-num-value-heads 4 --linear-key-head-dim 6 --linear-value-head-dim 5"
)


MAMBA = "--mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 6 --mamba-state-dim 5"


SPARSE = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6"
    " --qk-pos-emb-head-dim 4 --v-head-dim 5 --dsa-indexer-n-heads 3 --dsa-indexer-head-dim 8"
    " --dsa-indexer-topk 5"
)

COMPRESSED = (
    f"{SPARSE} --kv-lora-rank 10 --v-head-dim 10 --experimental-attention-variant dsv4_hybrid"
    " --o-groups 2 --o-lora-rank 3"
)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_published_models_are_counted(name):
    found = preset(name)
    size = size_of(found, seq_length=1024)
    tolerance = 0 if found.is_exact else 0.02
    assert size.total_parameters == pytest.approx(found.published_parameters, rel=tolerance, abs=0)
    active = found.active_parameters or found.published_parameters
    assert size.active_parameters == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "flags",
    [
        "--softmax-type learnable",
        "--multi-latent-attention --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4"
        " --v-head-dim 5 --qk-layernorm --normalization RMSNorm --disable-bias-linear --swiglu",
        "--multi-latent-attention --q-lora-rank 12",
        f"{SPARSE.replace('--q-lora-rank 12', '')} --experimental-attention-variant dsa"
        " --position-embedding-type rope --no-rope-freq 2 --no-rope-latent-keys --scalable-softmax"
        " --kv-source-layers [0,1,0] --qk-layernorm",
        "--multi-latent-attention --v-head-dim 5 --attention-output-gate",
        f"{SPARSE} --experimental-attention-variant dsa --v-head-dim 5 --attention-output-gate"
        " --mla-gate-by-channel",
        "--mtp-num-layers 2",
        "--mtp-num-layers 2 --mtp-use-repeated-layer --num-experts 4 --moe-ffn-hidden-size 24",
        "--mtp-num-layers 1 --normalization RMSNorm --group-query-attention --num-query-groups 2",
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq 2 --mtp-num-layers 1"
        " --moe-shared-expert-intermediate-size 8 --moe-shared-expert-gate",
        "--num-experts 2 --swiglu --disable-bias-linear",
        "--xielu --embed-layernorm --normalization RMSNorm",
        "--embed-layernorm --normalization RMSNormWithoutWeight --qk-layernorm",
        "--num-experts 4 --moe-layer-freq 2 --moe-shared-expert-intermediate-size 8"
        " --moe-branch-norms --moe-router-scales --sandwich-norm",
        "--num-experts 4 --moe-layer-freq 2 --moe-output-norm",
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-latent-size 12"
        " --moe-shared-expert-intermediate-size 8 --attention-output-gate"
        " --group-query-attention --num-query-groups 2",
        f"{RECURRENT} --linear-attention-freq 2 --mtp-num-layers 1 --qk-layernorm",
        f"{MAMBA} --experimental-attention-variant mamba2 --linear-attention-freq 2 --swiglu",
        f"{MAMBA} {RECURRENT.partition(' gated_delta_net')[2]} --hybrid-layer-pattern ME*GKS-M"
        " --num-experts 2 --moe-latent-size 12",
        f"{MAMBA} --hybrid-layer-pattern *--/ME/*- --num-experts 2",
        f"{MAMBA} --hybrid-layer-pattern M-*/*E --mtp-num-layers 2 --num-experts 2"
        " --mtp-use-repeated-layer",
        f"{RECURRENT} --num-experts 2 --normalization RMSNorm --add-qkv-bias",
        f"{SPARSE} --experimental-attention-variant dsa --linear-attention-freq 2 --qk-layernorm"
        " --mtp-num-layers 1",
        f"{SPARSE} --hybrid-layer-pattern D-+D --disable-bias-linear",
        f"{SPARSE} --experimental-attention-variant dsa --dsa-indexer-topk-freq 4"
        " --dsa-indexer-skip-topk-offset 1 --mtp-num-layers 1",
        f"{SPARSE} --experimental-attention-variant dsa --dsa-indexer-block-size 5"
        " --qk-pos-emb-head-dim 0",
        "--experimental-attention-variant dsa --group-query-attention --num-query-groups 2"
        " --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 8"
        " --dsa-indexer-block-size 4 --normalization RMSNorm --qk-layernorm",
        f"{COMPRESSED} --csa-compress-ratios [0,4,6] --mtp-num-layers 1 --softmax-type learnable",
        f"{COMPRESSED} --csa-compress-ratios [6,3,4] --csa-indexed-ratio 3 --qk-layernorm"
        " --normalization RMSNorm --disable-bias-linear",
        "--enable-mhc-connections --mtp-num-layers 1",
        "--altup-num-inputs 3 --laurel-rank 4 --mtp-num-layers 1",
        f"--altup-num-inputs 2 --laurel-rank 4 {MAMBA} --hybrid-layer-pattern *-M/*-",
        "--altup-num-inputs 2 --per-layer-embed-dim 6 --per-layer-vocab-size 50"
        " --normalization RMSNorm",
        "--enable-mhc-connections --mhc-sinkhorn-iterations 0 --mhc-learned-contraction"
        f" --mhc-num-residual-streams 3 {MAMBA} --hybrid-layer-pattern *-M/*-",
    ],
)
def test_the_count_is_that_of_the_model_that_is_built(flags, is_tied):
    words = (
        "--hidden-size 32 --num-attention-heads 4 --seq-length 8 --mock-data"
        " --micro-batch-size 1 --train-iters 1 --lr 1e-3 --position-embedding-type rope"
        f" --transformer-impl local {flags}"
        f"{'' if 'pattern' in flags else ' --num-layers 3'}"
    ).split()
    if not is_tied:
        words.append("--untie-embeddings-and-output-weights")
    run = resolve(parse_command_line(words).config, world_size=1)
    config = run.transformer_config
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=8, position_embedding_type="rope",
        share_embeddings_and_output_weights=is_tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
    )  # fmt: skip
    size = ModelSize.from_settings(run, vocab_size=64)
    assert size.total_parameters == sum(p.numel() for p in model.parameters())
    layers = [*size.layer_kinds, *size.prediction_layers]
    routed = sum(kind.has_experts for kind in layers) * size.routed_parameters
    assert routed == sum(p.numel() for p in model.parameters() if get_param_meta(p).is_expert)
    share = run.experts.moe_router_topk / (
        run.experts.num_moe_experts or run.experts.moe_router_topk
    )
    assert size.active_parameters == size.total_parameters - routed * (1 - share)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--swiglu --disable-bias-linear --group-query-attention --num-query-groups 2"
        " --untie-embeddings-and-output-weights",
        "--window-size 5,0",
        "--altup-num-inputs 3 --laurel-rank 4 --swiglu --mtp-num-layers 1",
        "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6"
        " --qk-pos-emb-head-dim 4 --v-head-dim 5",
        "--num-experts 4 --moe-ffn-hidden-size 24 --moe-router-topk 2 --mtp-num-layers 1",
    ],
)
def test_torch_counts_these_operations_and_the_scores_that_are_masked(flags):
    """The unfused formula computes the scores of each query with all keys."""
    words = (
        "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --mock-data"
        " --micro-batch-size 2 --train-iters 1 --lr 1e-3 --position-embedding-type rope"
        f" --transformer-impl local --attention-backend unfused {flags}"
    ).split()
    run = resolve(parse_command_line(words).config, world_size=1)
    config = run.transformer_config
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config, spec, vocab_size=64, max_sequence_length=24, position_embedding_type="rope",
        share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
    )  # fmt: skip
    tokens = torch.randint(64, (2, 24))
    with FlopCounterMode(display=False) as forward:
        loss = model(tokens, torch.arange(24).unsqueeze(0), None, labels=tokens).mean()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    size = ModelSize.from_settings(run, vocab_size=64)
    masked = 24 - mean_keys(24, size.window)
    scores = 2 * 2 * 24 * len(size.passed_kinds) * masked * size.score_width
    assert 3 * (forward.get_total_flops() - scores) == training_flops(size, num_samples=2)
    if (
        not config.multi_latent_attention
    ):  # its kernel on CPUs adds products in place, which torch does not count
        assert backward.get_total_flops() == 2 * forward.get_total_flops()


def test_operations_of_recurrent_layers_do_not_grow_with_the_sequence():
    def flops(length, freq):
        words = (
            f"--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length {length}"
            " --mock-data --micro-batch-size 1 --train-iters 1 --lr 1e-3 --transformer-impl local"
            f" --position-embedding-type rope {RECURRENT} --linear-attention-freq {freq}"
        ).split()
        run = resolve(parse_command_line(words).config, world_size=1)
        size = ModelSize.from_settings(run, vocab_size=64)
        return forward_flops_per_token(size)

    assert flops(64, "[1]*4") == flops(1024, "[1]*4")
    longer = 1024 - 64
    # One layer in four attends: 2 products with half of the keys in 4 heads of 8.
    assert flops(1024, 4) - flops(64, 4) == 2 * 2 * longer / 2 * 32
    # A recurrence has 2 key and 4 value heads in the place of 3 * 32 rows and the output's.
    rows, states = 2 * 2 * 6 + 2 * 4 * 5 + 2 * 4, 4 * 4 * 6 * 5 + (2 * 2 * 6 + 4 * 5) * 4
    in_place = 2 * (32 * (rows + 4 * 5) + states) - 2 * (4 * 32 * 32 + 2 * 32 * 32)
    assert flops(64, "[1]*4") - flops(64, "[1]*3+[0]") == in_place


def test_a_gpu_is_known_by_a_part_of_its_name():
    assert peak_of_gpu("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989e12
    assert peak_of_gpu("NVIDIA GB200", torch.bfloat16) == 2450e12
    assert peak_of_gpu("Some new card", torch.bfloat16) is None


LINE = TrainingLine(
    iteration=12,
    train_iters=500,
    consumed_samples=96,
    seconds_per_step=0.1234,
    learning_rate=3e-4,
    global_batch_size=8,
    losses={"lm loss": 6.54321},
    loss_scale=1.0,
    grad_norm=1.2345,
    num_skipped=1,
    tflops_per_device=12.34,
    tokens_per_second_per_device=1000.0,
    mfu=0.4,
)


def test_the_log_line_is_megatrons_to_the_letter_and_goes_on_after_it():
    assert training_line(LINE, datetime(2026, 1, 2, 3, 4, 5)) == (
        " [2026-01-02 03:04:05] iteration       12/     500 | consumed samples:           96 |"
        " elapsed time per iteration (ms): 123.4 | throughput per GPU (TFLOP/s/GPU): 12.3 |"
        " learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 6.543210E+00 |"
        " loss scale: 1.0 | grad norm: 1.234 | number of skipped iterations:   1 |"
        " number of nan iterations:   0 | tokens/s/device: 1000.0 |"
        " FLOP count: causal | MFU (causal): 40.0% | ETA: 00:01:00 |"
    )


def test_the_validation_lines_are_megatrons():
    rule, text, last = validation_lines("iteration 100", {"lm loss": 2.0}).split("\n")
    assert text == (
        " validation loss at iteration 100 | lm loss value: 2.000000E+00 |"
        " lm loss PPL: 7.389056E+00 | "
    )
    assert rule == last == "-" * (len(text) + 1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "00:00:00"), (3661, "01:01:01"), (90061, "1d 01:01:01")]
)
def test_durations_are_written_as_clocks(seconds, text):
    assert duration(seconds) == text
