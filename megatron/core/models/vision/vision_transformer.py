"""An image encoder: patches, transformer layers, and a merger that turns blocks into tokens.

The vision transformer is A. Dosovitskiy et al., "An Image is Worth 16x16 Words", section 3.1, arXiv
2010.11929, with two-dimensional rotary positions. All images of a micro batch are packed into one
sequence of patches (M. Dehghani et al., "Patch n' Pack: NaViT", section 2, arXiv 2307.06304); each
frame is a document of attention. Windows and merging: S. Bai et al., "Qwen2.5-VL Technical Report",
section 2.1.1, arXiv 2502.13923.

Legend: p patches of all images, i blocks of all images, m^2 patches of a block, h width of the
encoder, n heads, d channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.datasets.images.grid import (
    Grid,
    frame_of_patches,
    interpolation,
    patch_positions,
    windows,
)
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.common.embeddings.rotary_pos_embedding import inverse_frequencies
from megatron.core.models.gpt.gpt_layer_specs import gpt_layer_submodules
from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.backend import LocalBackend
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer


class PatchEmbedding(ParallelLayer):
    """Linear embedding of each patch; replicated on every tensor-parallel rank.

    The weight [h, channels, frames, patch, patch] has the form of a convolution with stride equal
    to its kernel size.
    """

    def __init__(self, vision: VisionConfig, config: TransformerConfig, tp: Group) -> None:
        super().__init__(config, tp_group=tp)
        self.tensor_model_parallel = False
        sides = (vision.patch_dim, vision.patch_dim)
        shape = (config.hidden_size, vision.num_channels, vision.temporal_patch_size, *sides)
        self.weight = self.new_parameter(*shape, init_method=config.init_method, split_dim=None)
        self.bias: nn.Parameter | None = None
        if vision.kind.has_patch_bias:
            self.bias = self.new_parameter(config.hidden_size, init_method=None, split_dim=None)

    def forward(self, patches: Tensor) -> Tensor:
        """Embed [p, channels * frames * patch * patch] as [p, h]."""
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class PatchMerger(MegatronModule):
    """Merge the patches of each block to one token: a norm and two linear layers.

    Args:
        output_size: hidden size of the language model.
        norms_block: norm the concatenated patches of a block instead of each patch.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        vision: VisionConfig,
        config: TransformerConfig,
        output_size: int,
        pg_collection: ProcessGroupCollection,
        *,
        norms_block: bool = False,
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        self.norms_block, self.width = norms_block, vision.merged_size
        self.norm: Any = WrappedTorchNorm(
            config=config,
            hidden_size=self.width if norms_block else config.hidden_size,
            eps=config.layernorm_epsilon,
        )
        assert config.init_method is not None
        options: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "tp_group": pg_collection.tp,
            "pg_collection": pg_collection,
        }
        self.linear_fc1 = ColumnParallelLinear(self.width, self.width, **options)
        self.linear_fc2 = RowParallelLinear(
            self.width, output_size, bias=True, input_is_parallel=True, skip_bias_add=False,
            **options,
        )  # fmt: skip

    def forward(self, patches: Tensor) -> Tensor:
        """Merge [p, h] to [i, output size]."""
        if self.norms_block:
            normed = self.norm(patches.reshape(-1, self.width))
        else:
            normed = self.norm(patches).reshape(-1, self.width)
        hidden, _ = self.linear_fc1(normed.unsqueeze(1))
        output, _ = self.linear_fc2(F.gelu(hidden))
        return output.squeeze(1)


class VisionBlock(TransformerBlock):
    """The layers of the encoder; some attend to whole frames, the others within windows.

    Args:
        full_attention_layers: layers that attend to whole frames, counted from 0.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: TransformerBlockSubmodules,
        *,
        full_attention_layers: list[int],
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, spec, pg_collection=pg_collection)
        self.full_attention_layers = frozenset(full_attention_layers)
        self.whole_frames: PackedSeqParams | None = None
        """Documents of the whole frames of the current images."""

    def _options_of_layer(
        self, layer: Any, common: dict[str, Any], others: Mapping[Any, dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the arguments of one layer; full-attention layers get whole frames."""
        if layer.layer_number - 1 not in self.full_attention_layers:
            return common
        return common | {"packed_seq_params": self.whole_frames}


class VisionTransformer(MegatronModule):
    """The image encoder and the mergers that map its output to the language model's width.

    The whole encoder is on the first pipeline stage. Ranks of `tp` split heads and MLPs, and each
    returns the whole output; the gradients of the output must be equal on all of them.

    Args:
        config: config of the language model.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        vision: VisionConfig,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        layers = vision.layer_config(config)
        super().__init__(layers)
        # The encoder is not split over pipeline stages or context-parallel ranks.
        self.pg_collection = pg_collection.with_groups(pp=SINGLE_RANK, cp=SINGLE_RANK)
        self.vision, groups = vision, self.pg_collection
        self.patch_embed = PatchEmbedding(vision, layers, groups.tp)
        if vision.kind.has_position_table:
            self.pos_embed = self._position_table()
        parts = gpt_layer_submodules(LocalBackend(), attn_mask_type=AttnMaskType.padding)
        parts.self_attn_bda = parts.mlp_bda = get_bias_dropout_add
        spec = ModuleSpec(module=TransformerLayer, submodules=parts)
        self.decoder = VisionBlock(
            layers,
            TransformerBlockSubmodules([spec] * layers.num_layers, None),
            pg_collection=groups,
            full_attention_layers=vision.full_attention_layers,
        )
        self.merger = PatchMerger(vision, layers, config.hidden_size, groups)
        self.deepstack_mergers = nn.ModuleList(
            PatchMerger(vision, layers, config.hidden_size, groups, norms_block=True)
            for _ in vision.layers_added
        )
        head = layers.kv_channels
        assert head
        # Not a buffer: converting the model to half precision must not round the angles.
        self.inv_freq = inverse_frequencies(head // 2, 10000.0)

    def _position_table(self) -> nn.Embedding:
        config, count = self.config, self.vision.vision_num_position_embeddings
        weight = torch.empty(count, config.hidden_size, dtype=config.params_dtype)
        table = nn.Embedding(count, config.hidden_size, _weight=weight)
        set_param_meta(table.weight, ParamMeta(init_method=config.embedding_init_method))
        return table

    def forward(self, patches: Tensor, grids: list[Grid]) -> tuple[Tensor, list[Tensor]]:
        """Encode images.

        Args:
            patches: [p, channels * frames * patch * patch], in the order of `images.grid`.
            grids: grids of the images, in order.
        Returns:
            (image tokens [i, hidden size of the language model], and a list of tensors of the same
            shape, one for each layer of `deepstack_layers`).
        """
        vision, where = self.vision, patches.device
        merge = vision.spatial_merge_size
        hidden = self.patch_embed(patches)
        if vision.kind.has_position_table:
            rows, weights = (
                x.to(where) for x in interpolation(grids, merge, vision.positions_side)
            )
            learned = (self.pos_embed(rows) * weights.to(hidden.dtype).unsqueeze(-1)).sum(1)
            hidden = hidden + learned
        angles = self._angles(patch_positions(grids, merge))
        frames = frame_of_patches(grids)
        documents, order = frames, None
        if vision.kind.has_windows:
            order, of_block = windows(grids, merge, vision.window_blocks)
            documents = of_block.repeat_interleave(merge**2)
            of_patch = (order[:, None] * merge**2 + torch.arange(merge**2)).flatten()
            angles, frames = angles[of_patch], frames[of_patch]
            hidden = hidden[of_patch.to(where)]
        num_patches = len(documents)
        self.decoder.whole_frames = _documents(frames, where)
        taken: list[Tensor] = []
        hooks = [
            self.decoder.layers[layer].register_forward_hook(
                lambda _module, _inputs, output: taken.append(output[0])
            )
            for layer in vision.layers_added
        ]
        try:
            hidden = self.decoder(
                hidden.unsqueeze(1),
                None,
                rotary_pos_emb=angles.to(where),
                packed_seq_params=_documents(documents, where),
            ).squeeze(1)
        finally:
            for hook in hooks:
                hook.remove()
        assert len(hidden) == num_patches
        tokens = self.merger(hidden)
        if order is not None:
            tokens = tokens[torch.argsort(order).to(where)]
        added = [
            merger(states.squeeze(1))
            for merger, states in zip(self.deepstack_mergers, taken, strict=True)
        ]
        return tokens, added

    def _angles(self, positions: Tensor) -> Tensor:
        """Return the angles [p, 1, 1, d] fp32 of patches at (row, column) positions [p, 2]."""
        freqs = (positions[:, :, None].float() * self.inv_freq.cpu()).flatten(1)
        return torch.cat((freqs, freqs), dim=1)[:, None, None, :]


def _documents(of_patch: Tensor, where: torch.device) -> PackedSeqParams:
    """Return the documents of one sequence of patches, checked once for all layers."""
    ids = of_patch.unsqueeze(0).to(where)
    return PackedSeqParams(seq_idx=ids).resolve(1, ids.shape[1], where)
