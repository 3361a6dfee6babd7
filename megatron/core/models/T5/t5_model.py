"""T5: an encoder, and a decoder that attends to the encoder's output.

C. Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", arXiv 1910.10683.

Layers are numbered through both stacks, encoder first, and a pipeline can be split between any two
layers. A message between stages has the hidden states of both stacks: in the encoder's stages, the
decoder's part is its embedded tokens; in the decoder's stages, the encoder's part is its output.

Legend: s sequence of the encoder, t sequence of the decoder, b micro-batch, h hidden, v padded
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.parameters.initialization import deferred_initialization
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import in_compute_dtype
from megatron.core.transformer.sharded_state import declare_tensor
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

POSITION_EMBEDDING_TYPES = ("relative", "learned_absolute", "rope", "none")
_BIASES = ("encoder_relative_pos_emb", "decoder_relative_pos_emb")


class T5Model(LanguageModule):
    """One pipeline stage (or all) of a T5.

    Weights start as slices of the one-device model under `rng_state().seed`, in every layout.

    Args:
        config: `num_layers` counts the layers of both stacks, `encoder_num_layers` the layers of
            the encoder.
        encoder_config: used if `config.encoder_num_layers` is not set. As in Megatron,
            `config.num_layers` then counts the decoder's layers and `encoder_config.num_layers` the
            encoder's. Its other fields are ignored.
        transformer_encoder_layer_spec, transformer_decoder_layer_spec: the spec of one layer, or of
            all layers of the stack in all stages.
        vocab_size, max_sequence_length, pre_process, post_process, parallel_output,
            share_embeddings_and_output_weights: see `GPTModel`.
        fp16_lm_cross_entropy: accepted; the loss is computed in fp32.
        position_embedding_type: "relative" (T5's own, with `relative_attention_num_buckets` and
            `relative_attention_max_distance`: see `RelativePositionEmbedding`), "learned_absolute"
            (one table for both stacks), "rope" or "none".
        scales_logits: divide the head's input by sqrt(h), as in the first T5 with its tied head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        encoder_config: TransformerConfig | None,
        transformer_encoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        transformer_decoder_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
        scales_logits: bool = False,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        config = _of_both_stacks(config, encoder_config)
        super().__init__(config, pg_collection)
        _check(config, position_embedding_type)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.scales_logits = scales_logits
        self.vp_stage = vp_stage
        self.input_tensor: Tensor | None = None
        assert config.kv_channels
        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config=config,
                    vocab_size=vocab_size,
                    max_sequence_length=max_sequence_length,
                    position_embedding_type=position_embedding_type,
                    pg_collection=self.pg_collection,
                )
            if position_embedding_type == "relative":
                self._build_biases(relative_attention_num_buckets, relative_attention_max_distance)
            elif position_embedding_type == "rope":
                self.rotary_pos_emb = RotaryEmbedding(
                    kv_channels=config.kv_channels,
                    rotary_percent=rotary_percent,
                    rotary_interleaved=config.rotary_interleaved,
                    seq_len_interpolation_factor=seq_len_interpolation_factor,
                    cp_group=self.pg_collection.cp,
                )
            self._build_stacks(transformer_encoder_layer_spec, transformer_decoder_layer_spec)
            if post_process:
                self.output_layer = self.build_output_layer()
        self.setup_embeddings_and_output_layer()
        if config.perform_initialization:
            self.initialize()

    def _build_biases(self, num_buckets: int, max_distance: int) -> None:
        """Build the bias tables of both stacks; later stages have copies of the first stage's."""
        for name in _BIASES:
            table = RelativePositionEmbedding(
                self.config,
                bidirectional=name.startswith("encoder"),
                num_buckets=num_buckets,
                max_distance=max_distance,
                name_of_original=None if self.pre_process else name,
                pg_collection=self.pg_collection,
            )
            self.add_module(name, table)

    def _build_stacks(
        self,
        encoder_spec: ModuleSpec | TransformerBlockSubmodules,
        decoder_spec: ModuleSpec | TransformerBlockSubmodules,
    ) -> None:
        """Build this stage's layers of encoder and decoder, and the final norms."""
        num_encoder, num_layers = self.config.encoder_num_layers or 0, self.config.num_layers
        layers = pipeline_layout(self.config).layers(self.pg_collection.pp.rank(), self.vp_stage)
        of_encoder = range(layers.start, min(layers.stop, num_encoder))
        of_decoder = range(max(layers.start, num_encoder), layers.stop)
        self.encoder: TransformerBlock | None = None
        self.decoder: TransformerBlock | None = None
        if of_encoder:
            ends = of_encoder.stop == num_encoder
            self.encoder = self._block(encoder_spec, range(num_encoder), of_encoder, ends)
        if of_decoder or self.post_process:
            stack = range(num_encoder, num_layers)
            self.decoder = self._block(decoder_spec, stack, of_decoder, self.post_process)

    def _block(
        self,
        spec: ModuleSpec | TransformerBlockSubmodules,
        stack: range,
        layers: range,
        has_final_norm: bool,
    ) -> TransformerBlock:
        norm: Any = WrappedTorchNorm
        if isinstance(spec, TransformerBlockSubmodules):
            specs = (spec.layer_specs or [])[layers.start - stack.start :][: len(layers)]
            norm = spec.layer_norm or norm
        else:
            specs = [spec] * len(layers)
        return TransformerBlock(
            config=self.config,
            spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm),
            post_process=has_final_norm,
            pg_collection=self.pg_collection,
            vp_stage=self.vp_stage,
            stack=stack,
        )

    def set_input_tensor(
        self, input_tensor: Tensor | list[Tensor] | tuple[Tensor, ...] | None
    ) -> None:
        """Take the previous stage's output, [s + t, b, h] ([(s + t)/tp, b, h])."""
        if isinstance(input_tensor, (list, tuple)):
            (input_tensor,) = input_tensor
        self.input_tensor = input_tensor

    def forward(
        self,
        encoder_input_ids: Tensor,
        decoder_input_ids: Tensor,
        encoder_attn_mask: Tensor | None = None,
        decoder_attn_mask: object = None,
        encoder_decoder_attn_mask: object = None,
        lm_labels: Tensor | None = None,
        *,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            encoder_input_ids: [b, s], and decoder_input_ids: [b, t]; other stages than the first
                read their lengths.
            encoder_attn_mask: [b, s], nonzero for tokens, zero for padding. Default: no padding.
            decoder_attn_mask, encoder_decoder_attn_mask: must be None. Padding of the decoder is at
                the end, where causal attention hides it, and cross attention uses
                `encoder_attn_mask`.
            lm_labels: [b, t]; with labels the last stage returns the loss of every token.
            loss_mask: [b, t], weights of the caller's sum of losses. They do not change the losses.
        Returns:
            the message to the next stage, [s + t, b, h] ([(s + t)/tp, b, h] under sequence
            parallelism); on the last stage the loss of every token [b, t] in fp32, or logits
            [b, t, v/tp] without labels.
        """
        refuse_given(
            "T5Model.forward",
            {
                "decoder_attn_mask": decoder_attn_mask,
                "encoder_decoder_attn_mask": encoder_decoder_attn_mask,
            },
            rule="the decoder is causal, and encoder_attn_mask masks its cross attention",
            fix="leave it out",
        )
        s, t = encoder_input_ids.shape[1], decoder_input_ids.shape[1]
        if self.pre_process:
            encoded = self.embedding(encoder_input_ids, None, stack=("encoder",))
            decoded = self.embedding(decoder_input_ids, None, stack=("decoder",))
        else:
            encoded, decoded = self._received(s, t)
        hidden = None
        if encoder_attn_mask is not None:
            hidden = (encoder_attn_mask == 0)[:, None, None, :]
        if self.encoder is not None:
            encoded = self.encoder(encoded, hidden, **self._positions("encoder", s))
        if self.decoder is not None:
            decoded = self.decoder(
                decoded,
                None,
                context=in_compute_dtype(encoded, self.config),
                context_mask=hidden,
                **self._positions("decoder", t),
            )
        if not self.post_process:
            return torch.cat((encoded.to(decoded.dtype), decoded))
        return self.loss_or_logits(in_compute_dtype(decoded, self.config), lm_labels, loss_mask)

    def _received(self, s: int, t: int) -> tuple[Tensor, Tensor]:
        """Split the previous stage's message into the hidden states of encoder and decoder."""
        if self.input_tensor is None:
            raise RuntimeError("a stage without embedding has no input: call set_input_tensor()")
        ranks = self.pg_collection.tp.size() if self.config.sequence_parallel else 1
        encoded, decoded = self.input_tensor.split((s // ranks, t // ranks))
        return encoded, decoded

    def _positions(self, stack: str, length: int) -> dict[str, Tensor]:
        """Return the position arguments of a stack's layers."""
        if self.position_embedding_type == "relative":
            return {"attention_bias": getattr(self, f"{stack}_relative_pos_emb")(length, length)}
        if self.position_embedding_type == "rope":
            return {"rotary_pos_emb": self.rotary_pos_emb(length)}
        return {}

    def scale_logits_of(self, hidden_states: Tensor) -> Tensor:
        """Scale the head's input [...]; its logits get the same factor."""
        scaled = super().scale_logits_of(hidden_states)
        return scaled * self.config.hidden_size**-0.5 if self.scales_logits else scaled

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the model's state; the first stage stores the bias tables."""
        declared = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, weight in self.named_parameters():
            meta = get_param_meta(weight)
            if meta.is_on_all_stages:
                declared[prefix + name] = declare_tensor(
                    prefix + name,
                    weight,
                    self.pg_collection,
                    sharded_offsets,
                    metadata,
                    copy=int(meta.tied_to is not None),
                )
        return declared


def _of_both_stacks(
    config: TransformerConfig, encoder_config: TransformerConfig | None
) -> TransformerConfig:
    """Return a config that counts the layers of both stacks."""
    if encoder_config is None or config.encoder_num_layers:
        return config
    num_encoder = encoder_config.num_layers
    return replace(
        config, num_layers=num_encoder + config.num_layers, encoder_num_layers=num_encoder
    )


def _check(config: TransformerConfig, position_embedding_type: str) -> None:
    """Raise if T5 does not support the config."""
    num_encoder = config.encoder_num_layers or 0
    if not 0 < num_encoder < config.num_layers:
        raise ConfigError(
            f"{num_encoder} of {config.num_layers} layers are encoder layers.",
            rule="a T5 has an encoder and a decoder",
            flags=["--encoder-num-layers", "--decoder-num-layers"],
            fix="give both at least one layer",
        )
    if position_embedding_type not in POSITION_EMBEDDING_TYPES:
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r} for a T5.",
            rule=f"known types are {', '.join(POSITION_EMBEDDING_TYPES)}",
            flags=["--position-embedding-type"],
            fix="use --position-embedding-type relative",
        )
    if config.context_parallel_size > 1:
        raise ConfigError(
            f"context_parallel_size={config.context_parallel_size} for a T5.",
            rule="context-parallel attention has no bias of the scores",
            flags=["--context-parallel-size"],
            fix="leave it out",
        )
