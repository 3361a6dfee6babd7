"""Train a small GPT for a few steps in one layout and report everything that must be equal.

The functions here run inside a worker process of `tests.harness.distributed`; with one rank they
are the serial oracle. They use the library directly, as a third party's training loop would.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.initialization import canonical_names, parameters_without_memory
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, unshard
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.load_balancing import routers_of
from megatron.core.transformer.moe.router_replay import NOT_GIVEN, replay_routing
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.parity.layouts import EXPERTS, LayoutCase, ModelCase
from tests.parity.objectives import entries, forward_step_of, with_head

UNEVEN_EIGHT_STAGES = "Et|tt|t|tt|t|tt|t|ttL"
SEQUENCE = 16
VOCABULARY = 93  # odd on purpose: the padding differs between tensor-parallel sizes
NUM_STEPS = 5
SEED = 4321
ADAM_EPSILON = 1e-5
"""Adam divides by |g|: with the usual 1e-8 a gradient that is zero up to rounding (the key bias)
would move its weight by a full step in a random direction."""


@dataclass
class RankReport:
    """What one rank saw."""

    tp_rank: int
    expt_tp_rank: int
    dp_rank: int
    losses: list[float]
    """Mean token loss of each step; empty except on the last stage."""
    grad_norms: list[float]
    gradients: dict[int, dict[str, Tensor]]
    """step -> canonical name -> local gradient after reduction."""
    weights: dict[str, Tensor]
    metas: dict[str, tuple[int | None, int, bool]]
    """canonical name -> (split_dim, stride, is_expert)."""
    routers: dict[str, list[float]]
    """figure of a router -> its value in each step: tokens of its experts, balance losses."""


@dataclass
class Run:
    """The whole model of one run, assembled from its ranks."""

    losses: list[float]
    grad_norms: list[float]
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    routers: dict[str, list[float]] = field(default_factory=dict)


def transformer_config(layout: LayoutCase, model: ModelCase) -> TransformerConfig:
    """Return the config of a model of width 32 in `layout`."""
    family: dict[str, Any] = {"ffn_hidden_size": 64}
    if model.family != "gpt2":
        family = dict(
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            num_query_groups=2,
            ffn_hidden_size=48,
        )
    if model.family == "latent":
        family |= dict(
            num_query_groups=None,
            multi_latent_attention=True,
            q_lora_rank=12,
            kv_lora_rank=10,
            qk_head_dim=6,
            qk_pos_emb_head_dim=4,
            v_head_dim=5,
            qk_layernorm=True,
            rotary_scaling_factor=4,
            original_max_position_embeddings=8,
            mscale_all_dim=0.5,
        )
    if model.experts:
        family |= dict(
            num_moe_experts=4,
            moe_ffn_hidden_size=24,
            moe_grouped_gemm=layout.grouped,
            moe_token_dispatcher_type=layout.dispatcher,
            moe_expert_rank_capacity_factor=layout.capacity or None,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.expt_tp,
            moe_shared_expert_overlap="shared_experts" not in layout.recomputed
            and layout.grouped
            and layout.dispatcher == "alltoall"
            and "moe_shared_expert_intermediate_size" in EXPERTS[model.experts],
            **EXPERTS[model.experts],
        )
    if model.letters:
        mamba = dict(mamba_num_groups=4, mamba_num_heads=8, mamba_head_dim=6, mamba_state_dim=5)
        family |= dict(hybrid_layer_pattern=model.letters, **mamba)
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=32,
        num_attention_heads=8,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        unpadded_vocab_size=VOCABULARY,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        context_parallel_size=layout.cp,
        cp_comm_type=layout.cp_kind,
        hierarchical_context_parallel_sizes=list(layout.levels) or None,
        recompute_granularity="full"
        if layout.recomputes
        else "selective"
        if layout.recomputed
        else None,
        recompute_modules=list(layout.recomputed),
        recompute_method="uniform" if layout.recomputes else None,
        recompute_num_layers=1 if layout.recomputes else None,
        fine_grained_activation_offloading=bool(layout.offloaded)
        and "layers" not in layout.offloaded,
        offload_modules=list(layout.offloaded),
        min_offloaded_tensor_size=1,
        cpu_offloading_num_layers=int("layers" in layout.offloaded),
        mlp_chunks_for_training=3 if layout.tiled else 1,
        cross_entropy_loss_fusion=layout.tiled,
        mtp_num_layers=model.later_tokens or None,
        mtp_loss_scaling_factor=0.5,
        softmax_type="learnable" if model.sink else "vanilla",
        use_mup=model.base_width is not None,
        mup_base_hidden_size=model.base_width,
        mup_embedding_mult=2.0,
        mup_output_mult=3.0,
        attention_output_gate=model.gated,
        qk_clip=model.largest_logit is not None,
        qk_clip_threshold=model.largest_logit or 100.0,
        qk_clip_alpha=0.3,
        window_size=None if model.window is None else (model.window, 0),
        pipeline_model_parallel_size=layout.pp,
        pipeline_schedule=layout.schedule,
        overlap_moe_expert_parallel_comm=layout.combined,
        microbatch_group_size_per_vp_stage=layout.group,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        pipeline_model_parallel_layout=layout.letters
        or (UNEVEN_EIGHT_STAGES if layout.pp * layout.vp == 8 else None),
        init_method_std=0.1,  # large enough that every layer matters in the loss
        **family,
    )


def build_chunks(
    config: TransformerConfig, model: ModelCase, layout: LayoutCase, groups: ProcessGroupCollection
) -> list[GPTModel]:
    """Build this rank's model chunks."""
    padded = -(-VOCABULARY // (8 * layout.tp)) * 8 * layout.tp
    pp_rank, stages = groups.pp.rank(), pipeline_layout(config)
    specs = [
        get_gpt_decoder_block_spec(
            config, layout.engine, vp_stage=stage if layout.vp > 1 else None, pp_rank=pp_rank
        )
        for stage in range(layout.vp)
    ]
    return [
        with_head(
            model.objective,
            GPTModel(
                config,
                specs[stage],
                vocab_size=padded,
                max_sequence_length=SEQUENCE,
                mtp_block_spec=get_gpt_mtp_block_spec(config, specs[stage], layout.engine),
                pre_process=stages.has_embedding(pp_rank, stage),
                post_process=stages.has_loss(pp_rank, stage),
                share_embeddings_and_output_weights=model.tied,
                position_embedding_type="learned_absolute" if model.family == "gpt2" else "rope",
                pg_collection=groups,
                vp_stage=stage if layout.vp > 1 else None,
            ),
        )
        for stage in range(layout.vp)
    ]


def global_batch(step: int, samples: int) -> dict[str, Tensor]:
    """Return the samples [samples, s] of one step: the same in every layout."""
    generator = torch.Generator().manual_seed(1000 + step)
    text = torch.randint(VOCABULARY, (samples, SEQUENCE + 1), generator=generator)
    mask = (torch.rand(samples, SEQUENCE, generator=generator) > 0.2).float()
    ends = torch.rand(samples, SEQUENCE, generator=generator) < 0.2
    positions = torch.arange(SEQUENCE).expand(samples, -1)
    begins = torch.zeros(samples, SEQUENCE, dtype=torch.bool)
    begins[:, 1:] = ends[:, :-1]
    starts = torch.where(begins, positions, 0).cummax(1).values
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "mask": mask,
        "position_ids": positions,
        "document_starts": starts.int(),
        "position_in_document": positions - starts,
    }


def local_micro_batches(
    step: int,
    layout: LayoutCase,
    dp_rank: int,
    is_packed: bool = False,
    is_padded: bool = False,
    objective: str = "",
):
    """Yield the micro batches of one data-parallel rank, in order.

    Ranks that share a sequence keep their positions of it.
    """
    batch, size = global_batch(step, layout.samples), layout.micro_batch_size
    batch |= entries(objective, step, batch, VOCABULARY)
    if is_padded:
        lengths = SEQUENCE - torch.arange(layout.samples).remainder(4)[:, None]
        batch["padding"] = torch.arange(SEQUENCE) >= lengths
    counted_from_document = batch.pop("position_in_document")
    if is_packed:
        batch["position_ids"] = counted_from_document
    else:
        del batch["document_starts"]
    for row in range(dp_rank, layout.samples // size, layout.dp):
        one = {name: value[row * size : (row + 1) * size] for name, value in batch.items()}
        yield get_batch_on_this_cp_rank(one)


def given_routing(step: int, layout: LayoutCase, config: TransformerConfig, dp_rank: int):
    """Return experts [b, s, l, k] for the micro batches of one data-parallel rank, at random.

    Every fifth token chooses for itself.
    """
    generator = torch.Generator().manual_seed(2000 + step)
    shape = layout.samples, SEQUENCE, config.num_layers, config.num_moe_experts
    experts = torch.rand(shape, generator=generator).argsort(-1)[..., : config.moe_router_topk]
    experts[:, ::5] = NOT_GIVEN
    return experts.split(layout.micro_batch_size)[dp_rank :: layout.dp]


def masked_loss(mask: Tensor, output: Tensor):
    """Return (summed loss, number of tokens, report), as a loss function of the schedules."""
    loss, tokens = (output.float() * mask).sum(), mask.sum()
    report = torch.stack([loss.detach(), tokens])
    return loss, tokens.to(torch.int), {"lm loss": report}


def forward_step(iterator, model):
    """Run one micro batch through one model chunk."""
    batch = next(iterator)
    documents = batch.get("document_starts")
    output = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=batch["labels"],
        padding_mask=batch.get("padding"),
        packed_seq_params=None if documents is None else PackedSeqParams(seq_idx=documents),
    )
    return output, partial(masked_loss, batch["mask"])


def train(
    groups: ProcessGroupCollection,
    layout: LayoutCase,
    model: ModelCase,
    optimizer_settings: Mapping[str, Any] | None = None,
    num_steps: int = NUM_STEPS,
) -> RankReport:
    """Train on `NUM_STEPS` batches, again and again if that is too few; the job of one rank."""
    rng_state().set_seed(SEED)
    rng_state().counts_on_cpu = model.draws_by_counter
    config = transformer_config(layout, model)
    with parameters_without_memory() if layout.fsdp2 else nullcontext():
        chunks = build_chunks(config, model, layout, groups)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True,
        bucket_size=5000,
        data_parallel_sharding_strategy=SHARDING_STRATEGIES[layout.stage],
        num_distributed_optimizer_instances=layout.instances,
    )
    wrapper = TorchFullyShardedDataParallel if layout.fsdp2 else DistributedDataParallel
    wrapped = [wrapper(config, ddp_config, chunk, pg_collection=groups) for chunk in chunks]
    chosen: dict[str, Any] = dict(
        optimizer="adam", lr=1e-3, adam_eps=ADAM_EPSILON, weight_decay=0.1, clip_grad=0.5,
        use_distributed_optimizer=layout.stage > 0,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**chosen | dict(optimizer_settings or {})), wrapped, pg_collection=groups
    )
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    config.no_sync_func = [chunk.no_sync for chunk in wrapped]
    config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    if len(wrapped) == 1:
        config.no_sync_func, config.grad_sync_func = wrapped[0].no_sync, wrapped[0].start_grad_sync
    schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp)
    step_of_objective = forward_step
    if model.objective:
        step_of_objective = forward_step_of(model.objective, groups, VOCABULARY)

    dp_rank, dp_size = groups.dp.rank(), groups.dp.size()
    ranks = groups.tp.rank(), groups.expt_tp.rank(), dp_rank
    report = RankReport(*ranks, [], [], {}, {}, {}, {})
    named = list(named_parameters(wrapped))
    for step in range(num_steps):
        rng_state().begin_step(
            step * layout.samples,
            micro_batch_size=layout.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        iterators = [
            local_micro_batches(
                step % NUM_STEPS, layout, dp_rank, model.packed, model.padded, model.objective
            )
            for _ in wrapped
        ]
        replay: Any = nullcontext()
        if model.replayed:
            given = given_routing(step % NUM_STEPS, layout, config, dp_rank)
            replay = replay_routing(wrapped, given)
        with replay:
            reported = schedule(
                forward_step_func=step_of_objective,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=wrapped if len(wrapped) > 1 else wrapped[0],
                num_microbatches=layout.num_microbatches,
                seq_length=SEQUENCE,
                micro_batch_size=layout.micro_batch_size,
                forward_only=False,
                pg_collection=groups,
            )
        if reported:
            report.losses.append(_mean_loss(reported, groups))
        if step in (0, num_steps - 1):
            report.gradients[step] = {name: whole_gradient(chunk, p) for name, chunk, p in named}
        ok, grad_norm, _ = optimizer.step()
        assert ok
        report.grad_norms.append(float(grad_norm))
        for router in routers_of(wrapped):
            _note_router(report.routers, router)
    note_weights(report, wrapped)
    return report


def note_weights(report, wrapped):
    """Keep the weights that training has ended with, and what is needed to join their shards."""
    for chunk in wrapped:
        with chunk.summon_full_params():
            report.weights |= {n: p.detach().clone() for n, c, p in named_parameters([chunk])}
    metas = {name: get_param_meta(p) for name, _, p in named_parameters(wrapped)}
    report.metas = {n: (m.split_dim, m.stride, m.is_expert) for n, m in metas.items()}


def _note_router(figures: dict[str, list[float]], router) -> None:
    load = router.load
    seen = {
        f"tokens {expert}": count for expert, count in enumerate(load.step_assignments.tolist())
    }
    seen |= load.step_losses | {"dropped": load.step_dropped}
    if router.expert_bias is not None:
        seen["bias"] = router.expert_bias.abs().sum().item()
    for name, value in seen.items():
        figures.setdefault(f"router {load.layer_number} {name}", []).append(value)


def named_parameters(wrapped):
    """Yield (canonical name, chunk, parameter) of wrapped chunks."""
    for chunk in wrapped:
        names = canonical_names(chunk.module)
        for name, parameter in chunk.module.named_parameters():
            yield names[name], chunk, parameter


def whole_gradient(chunk: DistributedDataParallel, parameter: torch.nn.Parameter) -> Tensor:
    """Join the pieces of a reduced gradient; adding zeros changes no bit."""
    whole = torch.zeros(parameter.numel())
    for shard in chunk.shards_of(parameter):
        whole[shard.begin : shard.end] = shard.reduced_gradient().flatten()
    mesh = chunk.mesh(get_param_meta(parameter).is_expert)
    if mesh.shard_size > 1:
        torch.distributed.all_reduce(whole, group=mesh.shard)
    return whole.view(parameter.shape)


def _mean_loss(reported, groups) -> float:
    """Sum (loss, tokens) over micro batches, each micro batch weighing the same, and over DP."""
    pairs = torch.stack([r["lm loss"] for r in reported]).double()
    if groups.cp.size() > 1:
        torch.distributed.all_reduce(pairs, group=groups.cp)
    means = pairs[:, 0] / pairs[:, 1]
    total = torch.tensor([means.sum(), len(means)], dtype=torch.float64)
    if groups.dp.size() > 1:
        torch.distributed.all_reduce(total, group=groups.dp)
    return float(total[0] / total[1])


def assemble(reports: list[RankReport], vocabulary: int = VOCABULARY) -> Run:
    """Join the ranks' pieces to the one-device model, and check that replicas agree bit for bit.

    Raises:
        AssertionError: two holders of the same piece differ, naming the parameter.
    """
    losses = [r.losses for r in reports if r.losses]
    assert all(other == losses[0] for other in losses), "last stages disagree on the loss"
    norms = [r.grad_norms for r in reports]
    assert all(other == norms[0] for other in norms), "ranks disagree on the gradient norm"
    run = Run(losses[0], norms[0])
    run.weights = _join(reports, lambda r: r.weights, "weight", vocabulary)
    for step in reports[0].gradients:
        run.gradients[step] = _join(
            reports, lambda r, s=step: r.gradients[s], "gradient", vocabulary
        )
    for report in reports:
        for name, values in report.routers.items():
            assert run.routers.setdefault(name, values) == values, f"ranks disagree on {name}"
    return run


def _join(reports, choose, what, vocabulary) -> dict[str, Tensor]:
    pieces: dict[str, dict[int, Tensor]] = {}
    metas: dict[str, ParamMeta] = {}
    for report in reports:
        for name, tensor in choose(report).items():
            split_dim, stride, is_expert = report.metas[name]
            rank = report.expt_tp_rank if is_expert else report.tp_rank
            held = pieces.setdefault(name, {}).setdefault(rank, tensor)
            assert torch.equal(held, tensor), f"copies of the {what} of {name} differ"
            metas[name] = ParamMeta(split_dim=split_dim, split_axis="tp", stride=stride)
    joined = {}
    for name, by_rank in pieces.items():
        shards = [by_rank[rank] for rank in sorted(by_rank)]
        if metas[name].split_dim is None:
            for shard in shards[1:]:
                assert torch.equal(shard, shards[0]), f"tp ranks differ in the {what} of {name}"
        full = unshard(shards, metas[name])
        is_vocabulary = "word_embeddings" in name or "output_layer" in name
        joined[name] = full[:vocabulary] if is_vocabulary else full
    return joined
