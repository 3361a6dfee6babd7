"""The layouts and models that parity is shown for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any


@dataclass(frozen=True)
class LayoutCase:
    """One way to spread a model over ranks."""

    tp: int = 1
    sp: bool = False
    pp: int = 1
    vp: int = 1
    schedule: str = "1f1b"
    dp: int = 1
    stage: int = 0
    """Rung of the sharding ladder: 0 nothing, 1 optimizer state, 2 gradients, 3 parameters."""
    instances: int = 1
    """Copies of the sharded state."""
    fsdp2: bool = False
    """Let torch shard the parameters."""
    samples: int = 8
    """Samples of a step."""
    micro_batch_size: int = 1
    cp: int = 1
    cp_kind: str | list[str] = "p2p"
    levels: tuple[int, ...] = ()
    """Sizes of the levels of hierarchical context parallelism."""
    tiled: bool = False
    """Compute MLP and loss for a few tokens at a time."""
    recomputes: bool = False
    """Form all activations again in backward."""
    recomputed: tuple[str, ...] = ()
    """Compute again in backward what these modules keep."""
    offloaded: tuple[str, ...] = ()
    """Keep in host memory what these modules save for backward; "layers": one whole layer."""
    ep: int = 1
    expt_tp: int = 1
    """Expert-parallel size, and tensor-parallel size inside experts."""
    dispatcher: str = "alltoall"
    grouped: bool = True
    capacity: float = 0.0
    """Rows that a rank sends to each other, over the even share; 0: as many as there are."""
    """Compute experts together instead of one after the other."""
    group: int | None = None
    """Micro batches per turn of a chunk, where stages are interleaved."""
    letters: str = ""
    """Which layers each stage holds, as `--pipeline-model-parallel-layout`; none: evenly."""
    combined: bool = False
    """Let forwards and backwards take turns while tokens travel."""
    engine: bool = False
    """Build the layers of Transformer Engine's classes."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_microbatches(self) -> int:
        """Micro batches of each replica in a step."""
        return self.samples // (self.dp * self.micro_batch_size)

    @property
    def serial(self) -> LayoutCase:
        """One process that computes the same step."""
        return LayoutCase(samples=self.samples, micro_batch_size=self.micro_batch_size)

    def __str__(self) -> str:
        parts = [f"tp{self.tp}{'+sp' if self.sp else ''}", f"pp{self.pp}"]
        if self.pp > 1:
            parts.append(f"vp{self.vp}" if self.schedule == "1f1b" else self.schedule)
            parts += [self.letters] * bool(self.letters)
            parts += [f"groups of {self.group}"] * (self.group is not None)
        if self.cp > 1:
            kind = "mixed" if isinstance(self.cp_kind, list) else self.cp_kind
            parts.append(f"cp{self.cp} {kind}")
        if self.ep * self.expt_tp > 1:
            parts.append(f"ep{self.ep} etp{self.expt_tp} {self.dispatcher}")
        parts += [f"capacity {self.capacity:g}"] * bool(self.capacity)
        parts += ["one by one"] * (not self.grouped) + ["in turns"] * self.combined
        parts += ["engine"] * self.engine
        parts += ["tiled"] * self.tiled + ["recompute"] * self.recomputes
        parts += [f"recompute {' '.join(self.recomputed)}"] * bool(self.recomputed)
        parts += [f"offload {' '.join(self.offloaded)}"] * bool(self.offloaded)
        parts.append(f"dp{self.dp}{f'+zero{self.stage}' if self.stage else ''}")
        parts += ["fsdp2"] * self.fsdp2
        if self.instances > 1:
            parts.append(f"x{self.instances}")
        if (self.samples, self.micro_batch_size) != (8, 1):
            parts.append(f"m{self.num_microbatches}")
        return " ".join(parts)


EXPERTS: dict[str, dict[str, Any]] = {
    "dropless": dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.1, 0.05, 0.2],
        moe_z_loss_coeff=0.01,
    ),
    "capacity": dict(
        moe_expert_capacity_factor=0.75, moe_aux_loss_coeff=0.1, calculate_per_token_loss=True
    ),
    "deepseek": dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.05,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_topk_scaling_factor=2.5,
        moe_shared_expert_intermediate_size=16,
        moe_layer_freq=[0, 1, 1, 1],
    ),
    "sinkhorn": dict(
        moe_router_load_balancing_type="sinkhorn",
        moe_router_topk=1,
        moe_input_jitter_eps=0.1,
        moe_expert_capacity_factor=1.0,
        moe_token_drop_policy="position",
        moe_pad_expert_input_to_capacity=True,
        moe_shared_expert_intermediate_size=16,
        moe_shared_expert_gate=True,
        moe_layer_freq=2,
    ),
}
"""Kinds of mixture-of-experts models -> fields of the config, beside four experts of width 24."""


@dataclass(frozen=True)
class ModelCase:
    """One model family, with its options."""

    family: str
    """"gpt2" (LayerNorm, GELU, biases, learned positions) or "llama" (RMSNorm, SwiGLU, RoPE,
    two key/value heads, no biases), or "latent" (the same with multi-latent attention and YaRN)."""
    tied: bool
    dropout: float
    packed: bool = False
    """Attention, and what positions are counted from, end with each document."""
    window: int | None = None
    """Keys to the left that a query sees."""
    sink: bool = False
    """Each head learns the score of a key without value."""
    draws_by_counter: bool = False
    """Drop what accelerators drop: each number is a function of its place."""
    later_tokens: int = 0
    """Tokens after the next one that are predicted too."""
    experts: str = ""
    """A kind of `EXPERTS`, or none."""
    letters: str = ""
    """The layers as letters, and after each / those of a later token."""
    padded: bool = False
    """The ends of sequences are padding, which is routed to no expert."""
    gated: bool = False
    """A sigmoid gate multiplies the output of attention."""
    largest_logit: float | None = None
    """Attention logit above which the weights of a head are scaled down."""
    replayed: bool = False
    """Tokens go to experts that are given, not to those that the routers would choose."""
    objective: str = ""
    """A loss of `tests.parity.objectives`, or that of the next token."""
    base_width: int | None = None
    """Width at which it was tuned, under muP."""
    layers: int = 12
    """12 divides by every pp * vp but 4 * 2, which gets an uneven layout."""

    @property
    def num_layers(self) -> int:
        """Number of layers; models with experts have fewer."""
        if self.letters:
            return len(self.letters.split("/")[0])
        return 4 if self.experts else self.layers

    def __str__(self) -> str:
        name = f"{self.family} {'tied' if self.tied else 'untied'} dropout {self.dropout:g}"
        name += f" {self.layers} layers" * (self.layers != 12)
        window = "" if self.window is None else f" window {self.window}"
        later = f" +{self.later_tokens} tokens" if self.later_tokens else ""
        name += f" {self.letters}" * bool(self.letters)
        name += f" {self.experts}" * bool(self.experts) + " padded" * self.padded
        name += " gated" * self.gated
        name += f" muP from {self.base_width}" * (self.base_width is not None)
        name += f" clipped at {self.largest_logit}" * (self.largest_logit is not None)
        name += " by counter" * self.draws_by_counter
        name += " replayed" * self.replayed + f" {self.objective}" * bool(self.objective)
        return name + " packed" * self.packed + window + " sink" * self.sink + later


def all_layouts(max_ranks: int = 8) -> list[LayoutCase]:
    """TP {1,2,4} x SP x PP {1,2,4} x VPP {1,2,3} x DP {1,2}: every product of up to 8 ranks."""
    cases = []
    for tp, pp, dp in product((1, 2, 4), (1, 2, 4), (1, 2)):
        if tp * pp * dp > max_ranks:
            continue
        for sp in (False, True) if tp > 1 else (False,):
            for vp in (1, 2, 3) if pp > 1 else (1,):
                cases.append(LayoutCase(tp=tp, sp=sp, pp=pp, vp=vp, dp=dp))
    return cases


def zero_bubble_layouts(max_ranks: int = 8) -> list[LayoutCase]:
    """Every schedule with split backwards x TP, SP x PP {2,4} x DP {1,2}, ZeRO {0,1,2,3}."""
    cases = []
    for schedule, tp, pp, dp in product(("zb-h1", "zb-v", "dualpipe-v"), (1, 2), (2, 4), (1, 2)):
        if tp * pp * dp > max_ranks or 8 // dp < 2 * pp:
            continue
        vp = 1 if schedule == "zb-h1" else 2
        for sp in (False, True) if tp > 1 else (False,):
            for stage in range(4 if dp > 1 else 1):
                cases.append(
                    LayoutCase(tp=tp, sp=sp, pp=pp, vp=vp, schedule=schedule, dp=dp, stage=stage)
                )
    return cases


def all_models() -> list[ModelCase]:
    """GPT-2-like and Llama-like, tied and untied, without and with dropout."""
    return [
        ModelCase(family, tied, dropout)
        for family, tied, dropout in product(("gpt2", "llama"), (False, True), (0.0, 0.1))
    ]
