"""A small GPT run in any layout, saved and loaded as the training loop does it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
)
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.config.layer_kinds import hybrid_pattern
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import (
    CheckpointContext,
    Checkpointer,
    CheckpointSettings,
    Restored,
)
from megatron.training.run.state import TrainState
from tests.harness.distributed import run_distributed
from tests.parity.training_case import masked_loss

NUM_LAYERS = 4
SEQUENCE = 16
VOCABULARY = 70  # padded to 72, 80 or 96 under tensor-parallel size 1, 2 or 4
GLOBAL_BATCH = 4


@dataclass(frozen=True)
class Layout:
    """One way to spread the run over ranks."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    zero: int = 0
    """ZeRO stage of optimizer state and, from 2 on, gradients."""
    sp: bool = False
    cp: int = 1
    ep: int = 1
    expt_tp: int = 1
    fsdp2: bool = False
    """Let torch shard the parameters."""
    engine: bool = False
    """Build the layers of Transformer Engine's classes."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        text = f"tp{self.tp}{'+sp' if self.sp else ''}-pp{self.pp}-dp{self.dp}"
        return (
            text
            + (f"-ep{self.ep}-etp{self.expt_tp}" if self.ep * self.expt_tp > 1 else "")
            + (f"-vp{self.vp}" if self.vp > 1 else "")
            + (f"-cp{self.cp}" if self.cp > 1 else "")
            + (f"-zero{self.zero}" * (self.zero > 0) + "-fsdp2" * self.fsdp2)
            + "-engine" * self.engine
        )

    def axes(self) -> dict[str, int]:
        """Keywords of `run_distributed`."""
        sizes = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
        sizes |= {"ep": self.ep, "expt_tp": self.expt_tp}
        return sizes | ({"vp": self.vp} if self.vp > 1 else {})


@dataclass(frozen=True)
class Model:
    """What is trained."""

    is_llama: bool = True
    is_tied: bool = True
    dropout: float = 0.1
    dtype: str = "fp32"
    experts: int = 0
    """Routed experts of every second layer; computed together where ranks share them."""
    fp8: str | None = None
    """Format of products of 8 bits."""
    recipe: str = "delayed"
    """How their operands are scaled."""
    pattern: str | None = None
    """The layers of a hybrid model, as letters."""


class Run:
    """Model, optimizer, schedule and checkpointer of one rank."""

    def __init__(
        self,
        groups: ProcessGroupCollection,
        layout: Layout,
        model: Model,
        *,
        seed: int = 4321,
        optimizer: Mapping[str, Any] | None = None,
        ddp: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        rng_state().set_seed(seed)
        self.groups, self.layout = groups, layout
        config = self.config = _config(layout, model)
        chunks = [_chunk(config, layout, model, groups, vp_stage) for vp_stage in range(layout.vp)]
        is_half = model.dtype in ("bf16", "fp16")
        if is_half:
            chunks = [Float16Module(config, chunk) for chunk in chunks]
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            bucket_size=3000,
            data_parallel_sharding_strategy=SHARDING_STRATEGIES[layout.zero],
            **{"grad_reduce_in_fp32": is_half} | dict(ddp or {}),
        )
        wrapper = TorchFullyShardedDataParallel if layout.fsdp2 else DistributedDataParallel
        self.chunks = [wrapper(config, ddp_config, c, pg_collection=groups) for c in chunks]
        chosen: dict[str, Any] = dict(
            lr=1e-2,
            adam_eps=1e-5,
            weight_decay=0.1,
            clip_grad=0.5,
            fp16=model.dtype == "fp16",
            bf16=model.dtype == "bf16",
            initial_loss_scale=2.0**24,  # overflows at first: skipped steps are part of the run
            use_distributed_optimizer=layout.zero > 0,
        )
        optimizer_config = OptimizerConfig(**chosen | dict(optimizer or {}))
        self.optimizer = get_megatron_optimizer(optimizer_config, self.chunks, pg_collection=groups)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, init_lr=0.0, max_lr=1e-2, min_lr=1e-3, lr_warmup_steps=8,
            lr_decay_steps=80, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
            wd_incr_steps=80, wd_incr_style="constant",
        )  # fmt: skip
        config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
        config.grad_scale_func = self.optimizer.scale_loss
        is_single = layout.vp == 1
        no_sync = [chunk.no_sync for chunk in self.chunks]
        grad_sync = [chunk.start_grad_sync for chunk in self.chunks]
        config.no_sync_func = no_sync[0] if is_single else no_sync
        config.grad_sync_func = grad_sync[0] if is_single else grad_sync
        self.schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp)
        self.train_state = TrainState()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.scales: list[float] = []
        """Loss scale after each step."""
        parts = CheckpointContext(
            model=self.chunks,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            groups=groups,
            args={
                "unpadded_vocab_size": VOCABULARY,
                "lr": 1e-2,
                "hybrid_layer_pattern": model.pattern,
            },
        )
        self.checkpointer = Checkpointer(CheckpointSettings(**settings), parts)

    def load(self) -> Restored | None:
        """Load, and continue from there."""
        restored = self.checkpointer.load()
        if restored is not None:
            self.train_state = restored.train_state
        return restored

    def save(self) -> None:
        """Save where the run stands."""
        self.checkpointer.save(self.train_state)

    def train(self, num_steps: int) -> None:
        """Run optimizer steps; the loss of each is kept on the last stage."""
        dp_rank, dp_size = self.groups.dp.rank(), self.groups.dp.size()
        for _ in range(num_steps):
            consumed = self.train_state.consumed_train_samples
            rng_state().begin_step(consumed, micro_batch_size=1, dp_rank=dp_rank, dp_size=dp_size)
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            data = [_samples(consumed, dp_rank, dp_size) for _ in self.chunks]
            is_single = len(self.chunks) == 1
            reported = self.schedule(
                forward_step_func=_forward_step,
                data_iterator=data[0] if is_single else data,
                model=self.chunks[0] if is_single else self.chunks,
                num_microbatches=GLOBAL_BATCH // dp_size,
                seq_length=SEQUENCE,
                micro_batch_size=1,
                forward_only=False,
                pg_collection=self.groups,
            )
            is_updated, norm, _ = self.optimizer.step()
            self.norms.append(norm)
            self.scales.append(float(self.optimizer.get_loss_scale()))
            if is_updated:
                self.scheduler.step(increment=GLOBAL_BATCH)
            self.losses += [self._loss_of(r["lm loss"]) for r in reported]
            self.train_state = TrainState(
                iteration=self.train_state.iteration + 1,
                consumed_train_samples=consumed + GLOBAL_BATCH,
                skipped_train_samples=self.train_state.skipped_train_samples,
            )
            self.checkpointer.after_step()

    def _loss_of(self, sum_and_tokens: torch.Tensor) -> float:
        """Return the mean loss of a micro batch; ranks that share a sequence add up."""
        if self.layout.cp > 1:
            torch.distributed.all_reduce(sum_and_tokens, group=self.groups.cp)
        return float(sum_and_tokens[0] / sum_and_tokens[1])


def _config(layout: Layout, model: Model) -> TransformerConfig:
    family: dict[str, Any] = (
        {
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "num_query_groups": 2,
        }
        if model.is_llama
        else {}
    )
    if model.experts:
        family |= {
            "num_moe_experts": model.experts,
            "moe_layer_freq": 2,
            "moe_grouped_gemm": layout.ep > 1,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expt_tp,
        }
    num_layers = NUM_LAYERS
    if model.pattern:
        num_layers = len(hybrid_pattern(model.pattern).kinds)
        sizes = {"mamba_num_groups": 2, "mamba_num_heads": 4, "mamba_head_dim": 8}
        family |= {"hybrid_layer_pattern": model.pattern, "mamba_state_dim": 8, **sizes}
    dtype = {
        "fp64": {"params_dtype": torch.float64},
        "fp32": {},
        "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
        "fp16": {"fp16": True, "params_dtype": torch.float16},
    }[model.dtype]
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        unpadded_vocab_size=VOCABULARY,
        tensor_model_parallel_size=layout.tp,
        sequence_parallel=layout.sp,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        pipeline_dtype=dtype.get("params_dtype", torch.float32),
        init_method_std=0.1,
        fp8=model.fp8,
        fp8_recipe=model.recipe,
        fp8_amax_history_len=3,
        **dtype,
        **family,
    )


def _chunk(
    config: TransformerConfig,
    layout: Layout,
    model: Model,
    groups: ProcessGroupCollection,
    vp_stage: int,
) -> GPTModel:
    stage, last = groups.pp.rank(), groups.pp.size() - 1
    multiple = 8 * layout.tp if layout.tp < 4 else 32
    kind: Any = GPTModel
    spec: Any = get_gpt_decoder_block_spec(
        config, layout.engine, vp_stage=vp_stage if layout.vp > 1 else None, pp_rank=stage
    )
    if model.pattern:
        kind, spec = HybridModel, hybrid_stack_spec
    return kind(
        config,
        spec,
        vocab_size=-(-VOCABULARY // multiple) * multiple,
        max_sequence_length=SEQUENCE,
        pre_process=stage == 0 and vp_stage == 0,
        post_process=stage == last and vp_stage == layout.vp - 1,
        share_embeddings_and_output_weights=model.is_tied,
        position_embedding_type="rope" if model.is_llama else "learned_absolute",
        pg_collection=groups,
        vp_stage=vp_stage if layout.vp > 1 else None,
    )


def _samples(consumed: int, dp_rank: int, dp_size: int):
    """Yield this rank's micro batches of one step: a function of the sample number alone."""
    for sample in range(consumed + dp_rank, consumed + GLOBAL_BATCH, dp_size):
        generator = torch.Generator().manual_seed(9000 + sample)
        text = torch.randint(VOCABULARY, (1, SEQUENCE + 1), generator=generator)
        batch = {
            "tokens": text[:, :-1].contiguous(),
            "labels": text[:, 1:].contiguous(),
            "mask": torch.ones(1, SEQUENCE),
            "position_ids": torch.arange(SEQUENCE).unsqueeze(0),
        }
        yield get_batch_on_this_cp_rank(batch)


def _forward_step(iterator, model):
    batch = next(iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(masked_loss, batch["mask"])


def run_in_layout(job: Any, layout: Layout, *arguments: Any) -> list[Any]:
    """Run a job in a layout and return the results of its ranks."""
    return run_distributed(job, layout.size, layout, *arguments, **layout.axes())


# Jobs: functions of a rank -------------------------------------------------------------------


def train_and_save(groups, layout: Layout, model: Model, directory: Path, num_steps: int) -> list:
    """Train from the beginning and save."""
    run = Run(groups, layout, model, save=str(directory))
    run.train(num_steps)
    run.save()
    run.checkpointer.close()
    return run.losses


def upcycle_and_save(groups, layout: Layout, model: Model, source: Path, target: Path) -> None:
    """Begin a model with experts from a dense checkpoint, and save it."""
    settings = {"pretrained_checkpoint": str(source), "moe_use_upcycling": True}
    run = Run(groups, layout, model, save=str(target), no_save_optim=True, **settings)
    assert run.load()
    run.save()
    run.checkpointer.close()


def first_loss_after_loading(groups, layout: Layout, model: Model, source: Path) -> float:
    """Load weights and train a step: the loss that it began with."""
    settings = {"pretrained_checkpoint": str(source), "moe_use_upcycling": model.experts > 0}
    run = Run(groups, layout, model, **settings)
    assert run.load()
    run.train(1)
    return run.losses[0]


def load_each_and_save_again(
    groups,
    layout: Layout,
    model: Model,
    sources: list[tuple[Path, Path]],
    optimizer: Mapping[str, Any] | None = None,
) -> None:
    """Load checkpoints of other layouts into one run, one after another, and save each again."""
    for source, target in sources:
        # Another seed: nothing of the model may be left from its own initialisation.
        settings: dict[str, Any] = {"load": str(source), "save": str(target)}
        run = Run(groups, layout, model, seed=1, optimizer=optimizer, **settings)
        assert run.load() is not None
        run.save()
        run.checkpointer.close()


def resume_and_train(
    groups,
    layout: Layout,
    model: Model,
    directory: Path,
    stops: list[int],
    is_async: bool = False,
    optimizer: Mapping[str, Any] | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> list[float]:
    """Train in pieces of `stops` steps, each in new objects that load what the last one saved."""
    losses: list[float] = []
    for num_steps in stops:
        where = str(directory)
        settings = {"load": where, "save": where, "async_save": is_async}
        run = Run(groups, layout, model, optimizer=optimizer, ddp=ddp, **settings)
        run.load()
        run.train(num_steps)
        losses += run.losses
        run.save()
        if is_async:
            run.train(1)  # what happens after the snapshot is not in the checkpoint
        run.checkpointer.close()
    return losses


def loss_of_each_step(results: list[list[float]], num_steps: int) -> torch.Tensor:
    """Return the mean loss of each step from what `resume_and_train` returned on all ranks."""
    of_ranks = [torch.tensor(losses, dtype=torch.float64) for losses in results if losses]
    return torch.stack([losses.view(num_steps, -1).mean(dim=1) for losses in of_ranks]).mean(dim=0)


def weights_after_loading(groups, layout: Layout, model: Model, directory: Path) -> dict:
    """Load and return this rank's parameters and main weights by name."""
    run = Run(groups, layout, model, seed=1, load=str(directory))
    assert run.load() is not None
    main = {item.shard.name: item.main_param.detach().clone() for item in run.optimizer.shards}
    model_weights = {
        name: parameter.detach().clone()
        for chunk in run.chunks
        for name, parameter in unwrap_model(chunk).named_parameters()
    }
    return {"main": main, "model": model_weights}
