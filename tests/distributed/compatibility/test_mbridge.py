"""Weights through mbridge, as it is published: Transformers -> layers here -> Transformers' names.

On four CPU ranks two calls of CUDA have stand-ins, and the config has the attributes of the release
of Transformers that the library was written for.
"""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.clients.hugging_face_models import logits_of, save_model
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

CHANGED = {
    # The library leaves the weights of the chosen experts as they are; Mixtral's sum to one.
    "mixtral": {"moe_router_pre_softmax": False},
}


class FormerConfig:
    """A config as Transformers 4 has it: rotary settings are attributes, `in` asks for one."""

    def __init__(self, config: transformers.PreTrainedConfig) -> None:
        self._config = config
        self.rope_theta = config.rope_parameters["rope_theta"]
        self.rope_scaling = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._config, name)

    def __contains__(self, name: str) -> bool:
        return getattr(self, name, None) is not None


def through_mbridge(_groups, family, directory):
    """Load a directory of Transformers and export it: logits, and the exported weights."""
    # It imports every model of Transformers that it knows: seconds that only the ranks spend.
    from mbridge import AutoBridge
    from mbridge.core.safetensor_io import SafeTensorIO

    with (
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch.object(torch.nn.Module, "cuda", lambda module, *_: module),
    ):
        config = FormerConfig(transformers.AutoConfig.from_pretrained(directory))
        bridge = AutoBridge.from_config(config, dtype=torch.float32)
        bridge.set_extra_args(**CHANGED.get(family, {}))
        # Its reader of DeepSeek's FP8 files puts tensors on a GPU; these files are in fp32.
        bridge._get_safetensor_io = SafeTensorIO
        models = bridge.get_model(weight_path=directory, bf16=False)
        with torch.no_grad():
            exported = {name: weight.clone() for name, weight in bridge.export_weights(models)}
        return logits_of(models), exported


@pytest.mark.filterwarnings("default:Apex is not installed:UserWarning")
@pytest.mark.parametrize(
    ("family", "experts"),
    [
        *(("llama", {}), ("qwen2", {}), ("mixtral", {"ep": 2, "expt_tp": 1})),
        *(("qwen3_moe", {"ep": 2, "expt_tp": 1}), ("qwen3_moe", {"expt_tp": 2})),
        ("deepseek_v3", {"ep": 2, "expt_tp": 1}),
    ],
)
def test_a_model_keeps_its_logits_and_weights_through_mbridge(family, experts, tmp_path: Path):
    expected = save_model(family, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    results = run_distributed(
        through_mbridge, 4, family, str(tmp_path), timeout_s=120, tp=2, pp=2, **experts
    )
    for logits, exported in results:
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[name], stored[name]) for name in stored)
        if logits is not None:
            assert_close(logits, expected, FP32_REORDERED_SUM, family)
    assert sum(logits is not None for logits, _ in results) == 2
