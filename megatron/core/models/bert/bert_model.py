"""BERT: an encoder that predicts masked words, and whether one sentence follows another.

J. Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language
Understanding", arXiv 1810.04805. Layers norm their input, as in M. Shoeybi et al., "Megatron-LM",
section 5.3, arXiv 1909.08053. `apply_residual_connection_post_layernorm` selects the original
order: the input norm of the first layer is then BERT's norm after the embedding, and the input norm
of any other layer is BERT's norm after the previous layer.

Legend: s sequence, b micro-batch, h hidden, v padded vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.models.bert.pooler import Pooler
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.initialization import deferred_initialization
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import in_compute_dtype
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class BertModel(LanguageModule):
    """One pipeline stage (or all) of a BERT.

    Weights start as slices of the one-device model under `rng_state().seed`, in every layout.

    Args:
        num_tokentypes: number of token types; 2 distinguishes the sentences of a pair.
        transformer_layer_spec, vocab_size, max_sequence_length, pre_process, post_process,
            parallel_output, share_embeddings_and_output_weights: see `GPTModel`.
        fp16_lm_cross_entropy: accepted; the loss is computed in fp32.
        position_embedding_type: "learned_absolute", "rope" or "none".
        add_binary_head: predict from the first token whether the second sentence of a pair follows
            the first.
        return_embeddings: the last stage returns the mean hidden state [b, h] of each sequence,
            without its first and last token.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_tokentypes: int,
        transformer_layer_spec: ModuleSpec | TransformerBlockSubmodules,
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
        add_binary_head: bool = True,
        return_embeddings: bool = False,
        vp_stage: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, pg_collection)
        self.vocab_size, self.max_sequence_length = vocab_size, max_sequence_length
        self.pre_process, self.post_process = pre_process, post_process
        self.parallel_output = parallel_output
        self.share_embeddings_and_output_weights = share_embeddings_and_output_weights
        self.add_binary_head, self.return_embeddings = add_binary_head, return_embeddings
        self.vp_stage = vp_stage
        assert config.kv_channels and config.init_method
        with deferred_initialization():
            if pre_process:
                self.embedding = LanguageModelEmbedding(
                    config=config,
                    vocab_size=vocab_size,
                    max_sequence_length=max_sequence_length,
                    position_embedding_type=position_embedding_type,
                    num_tokentypes=num_tokentypes,
                    pg_collection=self.pg_collection,
                )
            self.has_rotary = position_embedding_type == "rope"
            if self.has_rotary:
                self.rotary_pos_emb = RotaryEmbedding(
                    kv_channels=config.kv_channels,
                    rotary_percent=rotary_percent,
                    rotary_interleaved=config.rotary_interleaved,
                    seq_len_interpolation_factor=seq_len_interpolation_factor,
                    cp_group=self.pg_collection.cp,
                )
            self.encoder = TransformerBlock(
                config=config,
                spec=transformer_layer_spec,
                pre_process=pre_process,
                post_process=post_process,
                pg_collection=self.pg_collection,
                vp_stage=vp_stage,
            )
            if post_process:
                self._build_heads(config)
        self.setup_embeddings_and_output_layer()
        if config.perform_initialization:
            self.initialize()

    def _build_heads(self, config: TransformerConfig) -> None:
        hidden = config.hidden_size
        assert config.init_method
        self.lm_head = BertLMHead(hidden, config, self.pg_collection)
        self.output_layer = self.build_output_layer(bias=True)
        if self.add_binary_head:
            self.pooler = Pooler(
                hidden, config.init_method, config, config.sequence_parallel, self.pg_collection
            )
            self.binary_head = ReplicatedLinear(
                hidden,
                2,
                config=config,
                init_method=config.init_method,
                tp_group=self.pg_collection.tp,
                bias=True,
                sees_all_tokens=True,
            )

    @property
    def first_block(self) -> TransformerBlock:
        return self.encoder

    def forward(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        tokentype_ids: Tensor | None = None,
        lm_labels: Tensor | None = None,
        inference_context: object = None,
        *,
        inference_params: object = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Run this stage.

        Args:
            input_ids, tokentype_ids: [b, s/cp], this rank's positions; read by the first stage.
            attention_mask: [b, s] of the whole sequence, nonzero for tokens, zero for padding at
                the end. Every stage reads it. Default: no padding.
            lm_labels: [b, s/cp]; with labels the last stage returns the loss of every token.
            loss_mask: [b, s/cp], weights of the caller's sum of losses. They do not change the
                losses.
        Returns:
            the stage's hidden states [s/cp, b, h]. The last stage returns (fp32 loss of every token
            [b, s/cp], or without labels logits [b, s/cp, v/tp]; logits [b, 2] of the binary head,
            or None), with `return_embeddings` [b, h], and after `post_training.heads.replace_head`
            the output of the new head, [b, s/cp, n].
        """
        refuse_given(
            "BertModel.forward",
            {"inference_context": inference_context, "inference_params": inference_params},
            rule="an encoder reads all tokens at once and has no cache",
            fix="leave it out",
        )
        states = self.encoder.input_tensor
        if self.pre_process:
            assert input_ids is not None
            states = self.embedding(input_ids, None, tokentype_ids)
        rotary = None
        if self.has_rotary:
            length = RotaryEmbedding.get_rotary_seq_len(None, self.encoder, states, self.config)
            rotary = self.rotary_pos_emb(length)
        hidden_states = self.encoder(
            hidden_states=states,
            attention_mask=None,
            rotary_pos_emb=rotary,
            packed_seq_params=tokens_and_padding(attention_mask),
        )
        if not self.post_process:
            return hidden_states
        hidden_states = in_compute_dtype(hidden_states, self.config)
        if self.return_embeddings:
            return self._mean_states(hidden_states, attention_mask)
        if not hasattr(self, "lm_head"):  # `replace_head` has replaced BERT's head
            vectors, _ = self.output_layer(hidden_states)
            return vectors.transpose(0, 1).contiguous()
        binary_logits = None
        if self.add_binary_head:
            binary_logits, _ = self.binary_head(self.pooler(hidden_states))
        hidden_states = self.lm_head(hidden_states)
        return self.loss_or_logits(hidden_states, lm_labels, loss_mask), binary_logits

    def _mean_states(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        if self.config.sequence_parallel or self.config.context_parallel_size > 1:
            raise ConfigError(
                "return_embeddings with sequence or context parallelism.",
                rule="the mean of a sequence is computed on one rank",
                flags=["--sequence-parallel", "--context-parallel-size"],
                fix="drop these flags",
            )
        s, b, _ = hidden_states.shape
        where = hidden_states.device
        lengths = torch.full((b,), s, device=where)
        if attention_mask is not None:
            lengths = (attention_mask != 0).sum(1)
        positions = torch.arange(s, device=where).unsqueeze(1)
        counts = ((positions > 0) & (positions < lengths - 1)).to(hidden_states.dtype)
        total = (hidden_states * counts.unsqueeze(2)).sum(0)
        return total / counts.sum(0).clamp(min=1).unsqueeze(1)


def tokens_and_padding(attention_mask: Tensor | None) -> PackedSeqParams | None:
    """Return the tokens and the padding of each sequence as two separate documents.

    Kernels with documents then hide the padding without a mask matrix, also under context
    parallelism. The outputs for padding are never read.

    Args:
        attention_mask: [b, s] of the whole sequence, nonzero for tokens, zero for padding.
    """
    if attention_mask is None:
        return None
    return PackedSeqParams(seq_idx=(attention_mask == 0).to(torch.int32))
