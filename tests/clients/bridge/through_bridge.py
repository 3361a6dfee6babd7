"""Weights and recipes through megatron-bridge, as it is published, on the CPU.

`make bridge` installs the library; the name keeps this file out of the suite.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.clients.bridge.recipes import NUM_STEPS, RECIPES, Recipe, save_models, train
from tests.clients.hugging_face_models import logits_of, save_model
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3, yarn")
ON_ONE_RANK = (
    "mistral", "gemma", "glm4_moe", "glm4_moe_lite", "minimax_m2", "hy_v3", "olmoe", "gpt_oss",
    "qwen3_5",
)  # fmt: skip
LAYOUTS = ({}, {"tp": 2}, {"pp": 2})
WITH_EXPERTS = ({"ep": 2, "expt_tp": 1},)


def size_of(layout: dict[str, int]) -> int:
    return 2 if layout else 1


def through_bridge(_groups, directory, layout):
    """Load a directory of Transformers and export it: logits, and the exported weights."""
    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(directory)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = layout.get("tp", 1)
    provider.pipeline_model_parallel_size = layout.get("pp", 1)
    provider.expert_model_parallel_size = layout.get("ep", 1)
    provider.expert_tensor_parallel_size = layout.get("expt_tp")
    provider.params_dtype = provider.pipeline_dtype = torch.float32
    provider.bf16 = False
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    with torch.no_grad():
        exported = {
            name: weight.clone()
            for name, weight in bridge.export_hf_weights(models, cpu=True, show_progress=False)
        }
    return logits_of(models), exported


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, layout) for family in FAMILIES for layout in LAYOUTS]
    + [(family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in WITH_EXPERTS]
    + [(family, {}) for family in ON_ONE_RANK],
    ids=str,
)
def test_a_model_keeps_its_logits_and_weights(family, layout, tmp_path: Path):
    expected = save_model(family, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    results = run_distributed(
        through_bridge, size_of(layout), str(tmp_path), layout, timeout_s=300, **layout
    )
    for logits, exported in results:
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
        if logits is not None:
            assert_close(logits, expected, FP32_REORDERED_SUM, family)
    assert any(logits is not None for logits, _ in results)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    save_models(directory)
    return directory


def run_recipe(recipe: Recipe, models: Path, layout: dict[str, int]) -> list[float]:
    """Return the losses of a layout, which the ranks of the last stage know."""
    axes = {name: size for name, size in layout.items() if name != "dp"}
    results = run_distributed(
        train, size_of(layout), recipe, str(models), layout, timeout_s=300, **axes
    )
    known = [losses for losses in results if losses]
    assert known
    assert all(losses == known[0] for losses in known)
    assert len(known[0]) == NUM_STEPS
    return known[0]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_alike_on_one_rank_and_on_two(name, models):
    recipe = RECIPES[name]
    serial = run_recipe(recipe, models, {})
    assert serial[-1] < serial[0]
    with_experts = WITH_EXPERTS if recipe.family == "qwen3_moe" else ()
    for layout in ({"tp": 2}, {"pp": 2}, {"dp": 2}, {"cp": 2}, *with_experts):
        assert run_recipe(recipe, models, layout) == pytest.approx(serial, rel=1e-5), layout
