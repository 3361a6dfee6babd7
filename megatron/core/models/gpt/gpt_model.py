"""GPT: a decoder-only language model.

A. Radford et al., "Language Models are Unsupervised Multitask Learners" (GPT-2); T. Brown et al.,
"Language Models are Few-Shot Learners", arXiv 2005.14165.

Legend: s sequence, b micro-batch, h hidden, v padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import Documents, PackedSeqParams
from megatron.core.parameters.initialization import deferred_initialization
from megatron.core.pipeline_parallel.layout import explicit_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.config.layer_sizes import PATH_FLAG
from megatron.core.transformer.module import in_compute_dtype
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    with_prediction_losses,
)
from megatron.core.transformer.per_layer_embedding import PerLayerEmbedding
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

POSITION_EMBEDDING_TYPES = ("learned_absolute", "rope", "yarn", "mrope", "none")


class GPTModel(LanguageModule):
    """One pipeline stage (or all) of a GPT.

    Weights start as slices of the one-device model under `rng_state().seed`, in every layout.

    Args:
        transformer_layer_spec: spec of one layer, or of all layers of this stage.
        vocab_size: padded vocabulary, divisible by the tensor-parallel size. The real size is
            `config.unpadded_vocab_size`; ids beyond it take no part in the loss.
        max_sequence_length: number of learned positions.
        pre_process, post_process: whether the stage has the embedding, the head.
        fp16_lm_cross_entropy: accepted; the loss is computed in fp32 without a copy of the logits.
        logit_dtype: dtype of returned logits; default the model's dtype.
        parallel_output: return vocabulary shards of the logits, [.., v/tp], instead of gathering.
        share_embeddings_and_output_weights: tie the head to the word embedding.
        position_embedding_type: "learned_absolute", "rope", "yarn", "mrope" or "none". "yarn"
            scales rotary positions with the config's `rotary_scaling_factor` and related fields;
            its temperature is a factor of the scores (see `yarn_softmax_scale`). "mrope" reads
            positions [3, b, s], and the config's `mrope_section` assigns channel pairs to them.
        mtp_block_spec: multi-token-prediction layers, or None. They are built on the last stage, or
            on the stage that `config.pipeline_model_parallel_layout` names.
        scatter_embedding_sequence_parallel: under sequence parallelism, split the embedding's
            output over the ranks (off if the caller does it).
        vision_model: builds the image encoder for the given groups, on the first stage; see
            `VisionLanguageModel`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        logit_dtype: torch.dtype | None = None,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "learned_absolute",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        mtp_block_spec: ModuleSpec | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
        vision_model: Callable[[ProcessGroupCollection], nn.Module] | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        _check_arguments(position_embedding_type, config)
        assert config.kv_channels
        self.transformer_layer_spec = transformer_layer_spec
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.logit_dtype = logit_dtype
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.position_embedding_type = position_embedding_type
        self.vp_stage = vp_stage
        self.mtp_process = post_process and mtp_block_spec is not None
        self.num_stacked_hidden_states = 1
        layout = explicit_layout(config)
        if layout is not None and layout.mtp_on_earlier_stage:
            stage = layout.stage(self.pg_collection.pp.rank(), vp_stage)
            self.mtp_process = stage == layout.mtp_stage and mtp_block_spec is not None
            self.num_stacked_hidden_states = layout.num_stacked_hidden_states(stage)

        with deferred_initialization():
            if pre_process and vision_model is not None:
                self.vision_model = vision_model(self.pg_collection)
            if pre_process or self.mtp_process:
                self.embedding = LanguageModelEmbedding(
                    config=config,
                    vocab_size=vocab_size,
                    max_sequence_length=max_sequence_length,
                    position_embedding_type=position_embedding_type if pre_process else "none",
                    scatter_to_sequence_parallel=scatter_embedding_sequence_parallel,
                    pg_collection=self.pg_collection,
                )
            if pre_process and config.per_layer_embed_dim:
                self.per_layer_embedding = PerLayerEmbedding(config, vocab_size, self.pg_collection)
            self.has_rotary = position_embedding_type in ("rope", "yarn", "mrope") and not (
                config.multi_latent_attention  # rotates part of its heads by itself
            )
            if self.has_rotary:
                kind: Any = RotaryEmbedding
                if position_embedding_type == "mrope":
                    kind = partial(
                        MultimodalRotaryEmbedding, interleaved_sections=config.mrope_interleaved
                    )
                rotary = partial(
                    kind,
                    kv_channels=config.kv_channels,
                    rotary_percent=rotary_percent,
                    rotary_interleaved=config.rotary_interleaved,
                    proportional=config.rotary_proportional,
                    cp_group=self.pg_collection.cp,
                )
                frequencies: dict[str, Any] = {
                    "seq_len_interpolation_factor": seq_len_interpolation_factor,
                    "rotary_base": rotary_base,
                    "rope_scaling": rope_scaling,
                    "rope_scaling_factor": rope_scaling_factor,
                    "yarn": config if position_embedding_type == "yarn" else None,
                    "longrope": config if config.rotary_short_factors else None,
                }
                self.rotary_pos_emb = rotary(**frequencies)
                # A base of its own is a base without scaling.
                self.other_rotary = {
                    own: rotary(
                        **(dict(own) if "rotary_base" in dict(own) else frequencies | dict(own))
                    )
                    for own in {config.rotary_of(n + 1) for n in range(config.num_layers)} - {()}
                }
            self.decoder = TransformerBlock(
                config=config,
                spec=transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if self.mtp_process and mtp_block_spec is not None:
                self.mtp = MultiTokenPredictionBlock(
                    config, mtp_block_spec, self.pg_collection, vp_stage
                )
            if post_process:
                self.output_layer = self.build_output_layer()
        self.setup_embeddings_and_output_layer()
        if config.perform_initialization:
            self.initialize()

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        inference_context: StaticInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        extra_block_kwargs: Mapping[str, object] | None = None,
        runtime_gather_output: bool | None = None,
        *,
        inference_params: StaticInferenceContext | None = None,
        loss_mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            input_ids: [b, s/cp], this rank's positions; only the first stage reads them, and stages
                with hash layers.
            position_ids: [b, s/cp] or [1, s/cp], for learned positions; default the absolute
                positions of these tokens. With "mrope" [3, b, s], or [b, s] for text, on every
                stage.
            attention_mask: bool, True for masked keys, or None for a causal model.
            decoder_input: [s/cp, b, h] instead of embedded ids.
            packed_seq_params: documents of the whole sequence, equal on all ranks of `cp`.
            inference_context: cache of the previous tokens. Learned positions then need
                `position_ids` that continue each sequence.
            labels: [b, s/cp]; with labels the last stage returns the loss.
            loss_mask: [b, s/cp], weights of the caller's sum of losses. They do not change the
                losses; the fused loss skips tokens of weight 0.
            padding_mask: bool [b, s/cp], True for padding, which is not routed to experts.
        Returns:
            the stage's hidden states [s/cp, b, h]; on the last stage the loss of every token
            [b, s/cp] in fp32, or logits [b, s/cp, v/tp] without labels.
        """
        context = inference_context if inference_context is not None else inference_params
        if context is not None:
            self._check_cache()
        predictions: Iterable[Tensor] = self._split_received()
        if decoder_input is None and self.pre_process:
            decoder_input = self.embedding(input_ids=input_ids, position_ids=position_ids)
        rotary_args: dict[str, Any] = {}
        by_layer: dict[str, Any] = {}
        if self.config.per_layer_embed_dim:
            by_layer["vectors_of_layers"] = self.per_layer_embedding(input_ids, decoder_input)
        if context is not None:
            rotary_args = self._begin_cached_pass(context, decoder_input, position_ids)
        elif packed_seq_params is not None or self.has_rotary:
            length = RotaryEmbedding.get_rotary_seq_len(
                inference_context, self.decoder, decoder_input, self.config, packed_seq_params
            )
            if packed_seq_params is not None:
                packed_seq_params = replace(
                    self._documents(packed_seq_params, decoder_input, length),
                    padding_mask=padding_mask,
                )
            rotary_args = self._rotary_args(length, position_ids)
            if self.config.batch_invariant_mode and packed_seq_params is not None:
                rotary_args = _at_positions(rotary_args, packed_seq_params.positions.t())
        if self.config.moe_n_hash_layers:
            rotary_args["token_ids"] = input_ids
        hidden_states = self.decoder(
            hidden_states=decoder_input,
            attention_mask=attention_mask,
            inference_context=context,
            packed_seq_params=packed_seq_params,
            padding_mask=padding_mask,
            **rotary_args,
            **by_layer,
            **(extra_block_kwargs or {}),
        )
        if self.mtp_process and context is None:
            predictions = self._predict(
                hidden_states,
                labels,
                attention_mask=attention_mask,
                rotary_pos_emb=rotary_args.get("rotary_pos_emb"),
                packed_seq_params=packed_seq_params,
                padding_mask=padding_mask,
                **(extra_block_kwargs or {}),
            )
        if not self.post_process:
            return self._message(hidden_states, predictions)
        hidden_states = in_compute_dtype(hidden_states, self.config)
        if context is not None:
            hidden_states = context.last_tokens(hidden_states)
        weight = self.head_weight
        if labels is not None:
            loss = self.compute_loss(hidden_states, labels, weight, loss_mask)
            if not (self.config.mtp_num_layers and self.training):
                return loss
            return with_prediction_losses(
                loss,
                (in_compute_dtype(states, self.config) for states in predictions),
                labels,
                loss_of=lambda states, tokens: self.compute_loss(states, tokens, weight),
                weight=self.config.mtp_loss_scaling_factor / self.config.mtp_num_layers,
                cp=self.pg_collection.microbatch_cp,
                packed_seq_params=packed_seq_params,
            )
        logits, _ = self.output_layer(
            self.scale_logits_of(hidden_states),
            weight=weight,
            runtime_gather_output=runtime_gather_output,
        )
        logits = self.softcap_logits(logits).transpose(0, 1).contiguous()
        return logits if self.logit_dtype is None else logits.to(self.logit_dtype)

    def _split_received(self) -> list[Tensor]:
        """Split the received tensor: the decoder gets its input; return the MTP hidden states."""
        received = self.decoder.input_tensor
        if self.num_stacked_hidden_states == 1 or received is None or not torch.is_grad_enabled():
            return []
        hidden_states, *predictions = received.chunk(self.num_stacked_hidden_states)
        self.decoder.set_input_tensor(hidden_states)
        return predictions

    def _message(self, hidden_states: Tensor, later: Iterable[Tensor]) -> Tensor:
        """Return the input of the next stage: hidden states and MTP hidden states, along s."""
        predictions = list(later)
        if not (predictions or self.mtp_process):
            return hidden_states
        if self.mtp_process and self.config.pipeline_dtype is not None:
            # Normed states have the dtype of the weights; messages may have the residual's dtype.
            hidden_states = hidden_states.to(self.config.pipeline_dtype)
            predictions = [states.to(hidden_states.dtype) for states in predictions]
        return torch.cat((hidden_states, *predictions)) if predictions else hidden_states

    def _predict(
        self, hidden_states: Tensor, labels: Tensor | None, **attention: object
    ) -> Iterable[Tensor]:
        """Return the hidden states of later tokens, in training; see `MultiTokenPredictionBlock`.

        On the last stage each is computed directly before its loss. With gradients but in eval mode
        the next stage expects the same message, so this returns zeros.
        """
        if not torch.is_grad_enabled() or (self.post_process and labels is None):
            return []
        if not self.training:
            count = 0 if self.post_process else self.config.mtp_num_layers or 0
            return [torch.zeros_like(hidden_states) for _ in range(count)]
        if labels is None:
            raise ConfigError(
                "the stage that predicts later tokens got no labels.",
                rule="the stage embeds the labels, which are the next tokens",
                flags=["--pipeline-model-parallel-layout", "--mtp-num-layers"],
                fix="pass labels=... on this stage too, or put the letters m next to L",
            )
        predict = self.mtp.predictions if self.post_process else self.mtp
        embed = self.embedding.embed_words
        found: Iterable[Tensor] = predict(hidden_states, labels, embed=embed, **attention)
        return found

    def _rotary_args(self, length: int, position_ids: Tensor | None = None) -> dict[str, Any]:
        """Return the angles of this rank's positions, as arguments of the layers."""
        if not self.has_rotary:
            return {}
        if self.position_embedding_type == "mrope":
            if position_ids is None:
                device = self.rotary_pos_emb.inv_freq.device
                position_ids = torch.arange(length, device=device).unsqueeze(0)
            positions = position_ids.expand(3, *position_ids.shape[-2:])
            assert self.config.mrope_section is not None
            return {"rotary_pos_emb": self.rotary_pos_emb(positions, self.config.mrope_section)}
        cp = self.pg_collection.microbatch_cp
        rotary_args: dict[str, Any] = {"rotary_pos_emb": self.rotary_pos_emb(length, cp_group=cp)}
        others = {own: angles(length, cp_group=cp) for own, angles in self.other_rotary.items()}
        if others:
            rotary_args["other_rotary_pos_emb"] = others
        return rotary_args

    def _check_cache(self) -> None:
        """Raise if this model does not support a cache."""
        if self.config.sequence_parallel or self.config.context_parallel_size > 1:
            raise ConfigError(
                "a cache of keys and values with sequence or context parallelism.",
                rule="a pass over one new token has no sequence to split",
                flags=["--sequence-parallel", "--context-parallel-size"],
                fix="build the model without them to generate; the weights are the same",
            )

    def _begin_cached_pass(
        self, context: Any, decoder_input: Tensor | None, position_ids: Tensor | None
    ) -> dict[str, Any]:
        """Prepare a pass with a cache; return the angles [s, b, 1, r] of its tokens."""
        states = self.decoder.input_tensor if decoder_input is None else decoder_input
        if states is None:
            raise RuntimeError("a stage without embedding has no input: call set_input_tensor()")
        context.enter(states.shape[0], states.shape[1], states.device)
        if self.position_embedding_type == "mrope":
            given = position_ids is not None and position_ids.dim() == 3
            return self._rotary_args(0, position_ids if given else context.positions.t())
        return _at_positions(self._rotary_args(context.max_sequence_length), context.positions)

    def _documents(
        self, packed: PackedSeqParams, decoder_input: Tensor | None, length: int
    ) -> Documents:
        """Convert document borders to the form that all layers read, and check them."""
        states = self.decoder.input_tensor if decoder_input is None else decoder_input
        assert states is not None, "no input: call set_input_tensor first"
        return packed.resolve(states.shape[1], length, states.device)


def _at_positions(rotary_args: dict[str, Any], positions: Tensor) -> dict[str, Any]:
    """Return the angles [s, b, 1, r] of positions [s, b], from angles of all positions."""
    others = rotary_args.pop("other_rotary_pos_emb", {})
    args, others = (
        {name: table.squeeze(1)[positions] for name, table in tables.items()}
        for tables in (rotary_args, others)
    )
    return args | ({"other_rotary_pos_emb": others} if others else {})


def _check_arguments(position_embedding_type: str, config: TransformerConfig) -> None:
    if position_embedding_type not in POSITION_EMBEDDING_TYPES:
        raise ConfigError(
            f"position_embedding_type={position_embedding_type!r} is not supported.",
            rule=f"known types are {', '.join(POSITION_EMBEDDING_TYPES)}",
            flags=["--position-embedding-type"],
            fix="use --position-embedding-type rope",
        )
    if position_embedding_type != "mrope":
        return
    asked = {
        "--mrope-section": config.mrope_section is None,
        "--context-parallel-size": config.context_parallel_size > 1,
        "--multi-latent-attention": config.multi_latent_attention,
        "--rotary-base-local": config.rotary_base_local is not None,
        PATH_FLAG: any(config.rotary_of(n + 1) for n in range(config.num_layers)),
        "--mtp-num-layers": bool(config.mtp_num_layers),
    }
    wrong = [flag for flag, is_wrong in asked.items() if is_wrong]
    if wrong:
        raise ConfigError(
            f"position_embedding_type='mrope' and {', '.join(wrong)}.",
            rule="mrope needs the three sections of a head, and whole sequences on each rank; all"
            " layers rotate whole heads with the same angles",
            flags=["--position-embedding-type", *wrong],
            fix="give --mrope-section, and drop the other flags",
        )
