"""The settings in examples/mixture_of_experts are those of the published models."""

import pytest

from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.metrics.model_size import ModelSize
from tests.harness.pool import REPOSITORY

DIRECTORY = REPOSITORY / "examples/mixture_of_experts"

PUBLISHED = {
    # name: (rows of the vocabulary, parameters, billions of them for a token, tolerance of both)
    "mixtral_8x7b": (32000, 46_702_792_704, 12.9, 0.0),
    "qwen3_30b_a3b": (151936, 30_532_122_624, 3.3, 0.0),
    "deepseek_v2_lite": (102400, 15_706_484_224, 2.66, 0.0),
    "gpt_oss_20b": (201088, 20_914_757_184, 3.6 + 0.58, 0.0),
    "qwen3_235b_a22b": (151936, 235_093_634_560, 22.2, 0.0),
    "gpt_oss_120b": (201088, 116_829_156_672, 5.1 + 0.58, 0.0),
    "kimi_k2": (163840, 1_026_000_000_000, 32.9, 0.002),
    "deepseek_v3": (129280, 671_026_404_352 + 11_514_000_000, 37.0 + 1.6, 0.002),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_model(name):
    vocabulary, total, active, tolerance = PUBLISHED[name]
    words = ["--yaml-cfg", str(DIRECTORY / f"{name}.yaml"), "--mock-data"]
    run = resolve(parse_command_line(words).config, world_size=1024)
    size = ModelSize.from_settings(run, vocab_size=vocabulary)
    assert size.total_parameters == pytest.approx(total, rel=tolerance, abs=0)
    assert size.active_parameters == pytest.approx(active * 1e9, rel=0.02)


@pytest.mark.parametrize("name", [path.stem for path in sorted(DIRECTORY.glob("*.yaml"))])
def test_every_example_is_a_run_that_could_start(name):
    words = ["--yaml-cfg", str(DIRECTORY / f"{name}.yaml"), "--mock-data", "--dry-run"]
    words += ["--vocab-size", "32000"]
    report = describe_run(lambda: parse_command_line(words))
    assert "of them active for one token" in report
    assert "the same ranks for experts" in report


def test_a_dry_run_says_which_kernels_a_cpu_and_a_gpu_take_and_why():
    words = ["--yaml-cfg", str(DIRECTORY / "deepseek_v2_lite.yaml"), "--mock-data", "--dry-run"]
    report = describe_run(lambda: parse_command_line([*words, "--vocab-size", "32000"]))
    on_cpu, on_gpu = report.split("kernels of a training step on CPU:")[1].split("and on a GPU")
    assert "attention: blockwise (cpu-blocks does not support two head widths)" in on_cpu
    assert "attention: sdpa\n" in on_gpu
    for operation in ("RMSNorm: ", "gated activation: ", "loss: "):
        assert operation in on_cpu
        assert operation in on_gpu
