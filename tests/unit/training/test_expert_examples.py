"""Examples of mixtures of experts, and the dry runs of their files."""

import pytest

from megatron.core.models.gpt.presets import preset, preset_names
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.metrics.model_size import ModelSize
from tests.harness.pool import REPOSITORY

DIRECTORY = REPOSITORY / "examples/mixture_of_experts"


def test_every_preset_with_experts_has_an_example_and_its_count():
    names = [name for name in preset_names() if "num_moe_experts" in preset(name).config]
    assert sorted(path.stem.replace("_", "-") for path in DIRECTORY.glob("*.yaml")) == sorted(names)
    for name in names:
        words = ["--yaml-cfg", str(DIRECTORY / f"{name.replace('-', '_')}.yaml"), "--mock-data"]
        run = resolve(parse_command_line(words).config, world_size=1024)
        assert run.config.model.preset == name
        size = ModelSize.from_settings(run, vocab_size=preset(name).vocab_size)
        published = preset(name).published_parameters
        assert size.total_parameters == pytest.approx(published, rel=0.002, abs=0)


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
