"""A gated MLP whose Swish, x * sigmoid(slope * x), has a learned slope per channel.

P. Ramachandran, B. Zoph, Q. Le, "Searching for Activation Functions", arXiv 1710.05941.
"""

import torch

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.transformer.mlp import MLP


class SwishMLP(MLP):
    def __init__(self, config, submodules, **options):
        super().__init__(config, submodules, **options)
        self.slope = torch.nn.Parameter(torch.ones(self.linear_fc2.input_size_per_partition))
        # Metadata for checkpoints and the optimizer: channels are split over the ranks.
        set_param_meta(self.slope, ParamMeta(split_dim=0, split_axis="tp"))

    def activate(self, x, bias):
        gate, up = x.chunk(2, dim=-1)
        return gate * torch.sigmoid(self.slope * gate) * up


def layer_spec(config):
    spec = get_gpt_layer_local_spec()
    spec.submodules.mlp.module = SwishMLP
    return spec
