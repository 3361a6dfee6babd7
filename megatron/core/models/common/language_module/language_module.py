"""Base class of language models: the tied weight, the output layer and the loss.

Tied input and output embedding: O. Press, L. Wolf, "Using the Output Embedding to Improve Language
Models", arXiv 1608.05859.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.mapping import RankOffset, ShardedStateDict
from megatron.core.foundation.optional_imports import why_missing
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.parameters.exact_sum import LOSS_GRID, on_grid
from megatron.core.parameters.initialization import initialize_parameters
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.tensor_parallel.cross_entropy import (
    transformer_engine_cross_entropy,
    vocab_parallel_cross_entropy,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.linear_cross_entropy import LinearCrossEntropy
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.sharded_state import declare_tensor
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

WORD_EMBEDDING = "embedding.word_embeddings.weight"
"""Canonical name of the input embedding; a tied head on another stage is a copy of it."""


class LanguageModule(MegatronModule):
    """Base of models that read tokens and predict tokens.

    Subclasses set `pre_process`, `post_process`, `share_embeddings_and_output_weights`,
    `mtp_process` (whether this stage has the multi-token-prediction layers), `embedding` (first
    stage and MTP stage) and `output_layer` (last stage).
    """

    vocab_size: int
    pre_process: bool
    post_process: bool
    parallel_output: bool
    share_embeddings_and_output_weights: bool
    embedding: Any
    output_layer: Any
    decoder: Any
    pg_collection: ProcessGroupCollection

    def __init__(
        self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        super().__init__(config)
        self.pg_collection = resolve_groups(pg_collection)
        self.tp_group = self.pg_collection.tp
        self.vp_stage: int | None = None
        self.fused_loss = LinearCrossEntropy()
        self.mtp_process = False

    def initialize(self) -> None:
        """Fill every weight with its layout-independent initial value."""
        axes = {"tp": self.pg_collection.tp, "expt_tp": self.pg_collection.expt_tp}
        initialize_parameters(
            self,
            seed=rng_state().seed,
            axis_rank={name: group.rank() for name, group in axes.items()},
            axis_size={name: group.size() for name, group in axes.items()},
        )

    @property
    def first_block(self) -> TransformerBlock:
        """The layers whose input is the previous stage's output."""
        return self.decoder

    def set_input_tensor(
        self, input_tensor: Tensor | list[Tensor] | tuple[Tensor, ...] | None
    ) -> None:
        """Take the previous stage's output, [s, b, h] ([s/tp, b, h] with sequence parallelism)."""
        if isinstance(input_tensor, (list, tuple)):
            if len(input_tensor) != 1:
                raise TypeError(f"set_input_tensor() takes one tensor, not {len(input_tensor)}")
            input_tensor = input_tensor[0]
        self.first_block.set_input_tensor(input_tensor)

    def build_output_layer(self, *, bias: bool = False) -> ColumnParallelLinear:
        """Build the head; without its own weight if it is tied to an embedding on this stage."""
        config, is_tied = self.config, self.share_embeddings_and_output_weights
        draws_as_embedding = is_tied or config.use_mup
        init_method = config.embedding_init_method if draws_as_embedding else config.init_method
        assert init_method
        return ColumnParallelLinear(
            config.hidden_size,
            self.vocab_size,
            config=config,
            init_method=init_method,
            bias=bias,
            skip_bias_add=False,
            gather_output=not self.parallel_output,
            skip_weight_param_allocation=is_tied and (self.pre_process or self.mtp_process),
            tp_group=self.pg_collection.tp,
            pg_collection=self.pg_collection,
        )

    @property
    def head_weight(self) -> Tensor | None:
        """The head's weight [v/tp, h] on the last stage; the embedding if the two are tied."""
        weight: Tensor | None = self.output_layer.weight
        return self.shared_embedding_or_output_weight() if weight is None else weight

    def setup_embeddings_and_output_layer(self) -> None:
        """Set the metadata of embedding and head, including which weight is a copy.

        A tied head on another stage is initialised under the embedding's name, so both start equal
        without communication. Both get the sum of their gradients, so they stay equal.
        """
        is_tied = self.share_embeddings_and_output_weights
        if self.pre_process or self.mtp_process:
            weight = self.embedding.word_embeddings.weight
            meta = replace(get_param_meta(weight), is_embedding_or_output=True)
            if not self.pre_process:
                # The MTP stage embeds later tokens with a copy.
                meta = replace(meta, tied_to=WORD_EMBEDDING)
            set_param_meta(weight, meta)
            if self.pre_process and (is_tied or self.config.mtp_num_layers):
                weight.shared_embedding = True
        if not self.post_process:
            return
        num_rows = self.config.unpadded_vocab_size
        for parameter in (self.output_layer.weight, self.output_layer.bias):
            if parameter is None:
                continue
            meta = replace(
                get_param_meta(parameter), is_embedding_or_output=True, num_rows=num_rows
            )
            if is_tied and parameter is self.output_layer.weight:
                meta = replace(meta, tied_to=WORD_EMBEDDING)
            set_param_meta(parameter, meta)

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """Return the embedding on the first stage and the head's weight on the last one.

        In a tied model both are the same weight or copies of it. Other stages return None.
        """
        if self.pre_process or (self.mtp_process and self.share_embeddings_and_output_weights):
            return self.embedding.word_embeddings.weight
        return self.output_layer.weight if self.post_process else None

    def compute_loss(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every token, by a kernel of `LOSS`.

        Args:
            hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
            labels, loss_mask: [b, s/cp].
            weight: [v/tp, h], the head's weight.
        Returns:
            [b, s/cp] fp32.
        """
        hidden_states = self.scale_logits_of(hidden_states)
        needs = loss_needs(self.config)
        if self.output_layer.bias is not None:
            needs.add(HEAD_BIAS)
        request = Request.of(hidden_states, needs)
        kernel = LOSS.choose(request, asked_loss(self.config)).kernel
        return kernel.run(self, hidden_states, labels, weight, loss_mask)

    def loss_or_logits(
        self, hidden_states: Tensor, labels: Tensor | None, loss_mask: Tensor | None = None
    ) -> Tensor:
        """Return the loss of every token [b, s/cp], or without labels logits [b, s/cp, v/tp].

        See `compute_loss` for the arguments.
        """
        if labels is not None:
            return self.compute_loss(hidden_states, labels, self.head_weight, loss_mask)
        logits, _ = self.output_layer(self.scale_logits_of(hidden_states), weight=self.head_weight)
        return self.softcap_logits(logits).transpose(0, 1).contiguous()

    def scale_logits_of(self, hidden_states: Tensor) -> Tensor:
        """Scale the head's input [...] by muP's factor of the logits / `logits_scaling`."""
        factor = self.config.logits_factor / self.config.logits_scaling
        return hidden_states if factor == 1.0 else hidden_states * factor

    def softcap_logits(self, logits: Tensor) -> Tensor:
        """Apply `final_logit_softcapping`, if there is one, to logits [...]."""
        bound = self.config.final_logit_softcapping
        return logits if bound is None else torch.tanh(logits / bound) * bound

    def compute_language_model_loss(
        self, labels: Tensor, logits: Tensor, *, overwrite_logits: bool = False
    ) -> Tensor:
        """Return the loss of every token.

        Args:
            labels: [b, s].
            logits: [s, b, v/tp].
            overwrite_logits: allow the loss to overwrite the logits.
        Returns:
            [b, s] fp32; in `layout_invariant_mode` fp64 multiples of `LOSS_GRID`, so that their sum
            over tokens is exact.
        """
        config = self.config
        loss = vocab_parallel_cross_entropy(
            logits,
            labels.t().contiguous(),
            tp_group=self.tp_group,
            num_valid=config.unpadded_vocab_size,
            overwrite_logits=overwrite_logits,
            units=config.tensor_units if config.layout_invariant_mode else 0,
        )
        return _transposed(on_grid(loss, LOSS_GRID) if config.layout_invariant_mode else loss)

    def compute_fused_loss(
        self, labels: Tensor, hidden_states: Tensor, weight: Tensor, loss_mask: Tensor | None = None
    ) -> Tensor:
        """Return the loss of every token from the last hidden states; no logits are kept.

        Args:
            labels: [b, s].
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
            weight: [v/tp, h], the head's weight.
            loss_mask: [b, s], weights of the caller's sum of losses. They do not change the losses;
                tokens of weight 0 save work.
        Returns:
            [b, s] fp32.
        """
        config = self.config
        loss = self.fused_loss(
            hidden_states,
            weight,
            labels.t().contiguous(),
            tp_group=self.tp_group,
            num_valid=config.unpadded_vocab_size,
            sequence_parallel=config.sequence_parallel,
            token_weights=None if loss_mask is None else loss_mask.t().contiguous(),
            recomputes_logits=schedule_named(config.pipeline_schedule).runs_forwards_first,
            fuses_main_grad=config.gradient_accumulation_fusion,
        )
        return _transposed(loss)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[RankOffset] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Declare the model's state; a tied head is declared as a copy and not stored twice."""
        declared = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = f"{prefix}output_layer.weight"
        embedding = prefix + WORD_EMBEDDING
        if embedding in declared and not self.pre_process:
            weight = self.embedding.word_embeddings.weight
            declared[embedding] = declare_tensor(
                embedding, weight, self.pg_collection, sharded_offsets, metadata, copy=1
            )
        if name in declared and self.share_embeddings_and_output_weights:
            declared[name] = declare_tensor(
                prefix + WORD_EMBEDDING,
                self.output_layer.weight,
                self.pg_collection,
                sharded_offsets,
                metadata,
                copy=1,
            )
        return declared


def _transposed(loss: Tensor) -> Tensor:
    """Return [s, b] as a new tensor [b, s], never a view, also if b is 1.

    FSDP hooks the model's output: an in-place operation of the caller on a view loses the hook.
    """
    return loss.t().clone(memory_format=torch.contiguous_format)


def _loss_of_logits(
    model: LanguageModule,
    hidden_states: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    _loss_mask: Tensor | None,
) -> Tensor:
    # The loss needs vocabulary shards of the logits, also if `parallel_output` is off.
    logits, _ = model.output_layer(hidden_states, weight=weight, runtime_gather_output=False)
    return model.compute_language_model_loss(
        labels, model.softcap_logits(logits), overwrite_logits=True
    )


def _loss_by_transformer_engine(
    model: LanguageModule,
    hidden_states: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    _loss_mask: Tensor | None,
) -> Tensor:
    logits, _ = model.output_layer(hidden_states, weight=weight, runtime_gather_output=False)
    loss = transformer_engine_cross_entropy(
        model.softcap_logits(logits),
        labels.t().contiguous(),
        tp_group=model.tp_group,
        num_valid=model.config.unpadded_vocab_size,
    )
    return _transposed(loss)


def _loss_of_hidden_states(
    model: LanguageModule,
    hidden_states: Tensor,
    labels: Tensor,
    weight: Tensor | None,
    loss_mask: Tensor | None,
) -> Tensor:
    assert weight is not None
    return model.compute_fused_loss(labels, hidden_states, weight, loss_mask)


SOFTCAP = "soft-capped logits"
HEAD_BIAS = "a bias of the head"
_OF_LOGITS = frozenset({SOFTCAP, HEAD_BIAS})

_VOCAB_PARALLEL = Kernel("vocab-parallel", _loss_of_logits, _OF_LOGITS)
_LINEAR_FUSED = Kernel("linear-fused", _loss_of_hidden_states)

LOSS: KernelTable[
    Callable[[LanguageModule, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
] = KernelTable(
    "loss",
    {
        "cpu": (_VOCAB_PARALLEL, _LINEAR_FUSED),
        OTHER_DEVICES: (
            _VOCAB_PARALLEL,
            _LINEAR_FUSED,
            Kernel(
                "transformer-engine",
                _loss_by_transformer_engine,
                _OF_LOGITS,
                missing=partial(why_missing, "transformer_engine.pytorch"),
                library=True,
            ),
        ),
    },
)
"""Functions of (model, hidden states [s, b, h], labels [b, s], head's weight, loss mask)."""


def loss_needs(config: TransformerConfig) -> set[str]:
    """Return the features that the loss of a model needs."""
    return {SOFTCAP} if config.final_logit_softcapping else set()


def asked_loss(config: TransformerConfig) -> tuple[str, ...]:
    """Return the kernels that the settings request, in order of preference."""
    if not config.cross_entropy_loss_fusion:
        return ()
    is_te = config.cross_entropy_fusion_impl == "te"
    return ("transformer-engine", "linear-fused") if is_te else ("linear-fused",)
