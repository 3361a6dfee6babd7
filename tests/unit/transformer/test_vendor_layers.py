"""Layers of a vendor library, with stand-ins for what needs a GPU."""

import pytest
import torch
from torch import nn

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.foundation.errors import MissingExtraError
from megatron.core.foundation.optional_imports import require
from megatron.core.parameters.initialization import initialize_parameters
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

S, B, N, D = 7, 2, 2, 4


@pytest.mark.parametrize("kind", [AttnMaskType.causal, AttnMaskType.padding])
def test_a_mask_hides_beside_what_the_type_hides(kind):
    config = TransformerConfig(
        num_layers=1, hidden_size=N * D, num_attention_heads=N, attention_dropout=0.0
    )
    groups = ProcessGroupCollection.single()
    theirs, local = (
        made(config, 1, kind, "self", pg_collection=groups)
        for made in (TEDotProductAttention, DotProductAttention)
    )
    assert (theirs.backend, local.backend) == ("fused", "auto")
    query, key, value = (torch.randn(S, B, N, D) for _ in range(3))
    mask = torch.zeros(B, 1, 1, S, dtype=torch.bool)
    mask[1, ..., 1] = True
    found = theirs(query, key, value, mask)
    assert_close(found, local(query, key, value, mask), FP32_REORDERED_SUM, "attention")


class Remaking(nn.Linear):
    """A layer whose `reset_parameters` makes new parameters, as some libraries do."""

    def reset_parameters(self):
        self.weight = nn.Parameter(torch.full_like(self.weight, 2.0))
        self.bias = nn.Parameter(torch.full_like(self.bias, 3.0))


def test_parameters_that_a_reset_makes_anew_keep_their_metadata():
    layer = Remaking(3, 2)
    parameters = dict(layer.named_parameters())
    drawn = ParamMeta(split_dim=0, split_axis="tp", stride=2, init_method=nn.init.ones_)
    set_param_meta(layer.weight, drawn)
    initialize_parameters(layer, seed=1, axis_rank={"tp": 0}, axis_size={"tp": 1})
    assert dict(layer.named_parameters()) == parameters
    assert get_param_meta(layer.weight) == drawn
    assert layer.weight.eq(1.0).all() and layer.bias.eq(3.0).all()


def test_a_library_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    (tmp_path / "flash_attn.py").write_text("raise RuntimeError('no compiled part')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError) as caught:
        require("flash_attn", purpose="--attention-backend flash")
    assert "'flash_attn', which is installed and cannot be loaded: no compiled" in str(caught.value)
    assert "install flash-attention" in str(caught.value)
