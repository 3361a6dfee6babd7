"""Flags of mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.expressions import layer_pattern
from megatron.training.config.flag import flag

BALANCE_METHODS = (
    "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "quantile_balancing", "none",
)  # fmt: skip


_NO_PADDING = "products of 16 and 32 bits take any number of tokens"


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Routed experts, their router, dispatcher and balance."""

    num_experts: int | None = None
    """Routed experts of each expert layer."""
    moe_layer_freq: int | list[int] = flag(
        1, parse=layer_pattern, type_text="int or list expr", part_of="num_experts"
    )
    """Which layers have experts: every N-th, beginning with the first, or a 0/1 list."""
    moe_ffn_hidden_size: int | None = flag(None, part_of="num_experts")
    """Width of one expert."""
    moe_router_topk: int = flag(2, part_of="num_experts")
    """Experts that each token visits."""
    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss",
        nargs="+",
        choices=BALANCE_METHODS,
        part_of="num_experts",
        refuse_values={"quantile_balancing": "use --moe-router-enable-expert-bias"},
    )
    """How the load of experts is evened out."""
    moe_aux_loss_coeff: float | list[float] = flag(0.0, nargs="+", part_of="num_experts")
    """Weight of the balance loss, one per method."""
    moe_z_loss_coeff: float | None = flag(None, part_of="num_experts")
    """Weight of the router's z-loss (arXiv 2202.08906)."""
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid", "sqrtsoftplus"), part_of="num_experts"
    )
    """Nonlinearity of router scores."""
    moe_router_pre_softmax: bool = flag(False, part_of="num_experts")
    """Take the softmax before choosing experts."""
    moe_router_topk_scaling_factor: float | None = flag(None, part_of="num_experts")
    """Factor on the routed output."""
    moe_router_num_groups: int | None = flag(None, part_of="num_experts")
    """Groups of experts for group-limited routing."""
    moe_router_group_topk: int | None = flag(None, part_of="num_experts")
    """Groups that a token may visit."""
    moe_router_group_score_topk: int | None = flag(None, part_of="num_experts")
    """Experts of a group whose scores, summed, are the group's; 1 as in DeepSeek-V2. Default
    moe-router-topk / moe-router-group-topk."""
    moe_router_enable_expert_bias: bool = flag(False, part_of="num_experts")
    """Balance by a bias on the scores instead of a loss (arXiv 2408.15664)."""
    moe_router_bias_update_rate: float = flag(1e-3, part_of="num_experts")
    """Step of that bias."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), part_of="num_experts")
    """Precision of the router."""
    moe_router_force_load_balancing: bool = flag(False, part_of="num_experts")
    """Route at random, for benchmarks."""
    moe_token_dispatcher_type: str = flag(
        "allgather",
        choices=("allgather", "alltoall", "flex"),
        part_of="num_experts",
        refuse_values={"flex": "use --moe-token-dispatcher-type alltoall"},
    )
    """How tokens travel to experts."""
    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        choices=("deepep", "hybridep", "ncclep"),
        part_of="num_experts",
        refuse="use --moe-token-dispatcher-type alltoall",
    )
    """Library behind the flex dispatcher."""
    moe_enable_deepep: bool = flag(
        False, part_of="num_experts", refuse="use --moe-token-dispatcher-type alltoall"
    )
    """Older spelling of the DeepEP backend."""
    moe_grouped_gemm: bool = flag(False, part_of="num_experts")
    """Compute all experts of a rank in one grouped matrix product."""
    moe_router_padding_for_fp8: bool = flag(False, part_of="num_experts", note=_NO_PADDING)
    """Give every expert a number of tokens that FP8 products take."""
    moe_router_padding_for_quantization: bool = flag(False, part_of="num_experts", note=_NO_PADDING)
    """The same for all number formats below 16 bits."""
    moe_permute_fusion: bool = flag(
        False, part_of="num_experts", note="there is one way to permute tokens"
    )
    """Fuse the permutation of tokens."""
    moe_router_fusion: bool = flag(
        False, part_of="num_experts", note="there is one implementation of the router"
    )
    """Fuse the router."""
    moe_shared_expert_intermediate_size: int | None = flag(None, part_of="num_experts")
    """Width of the expert that every token visits."""
    moe_shared_expert_gate: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Weigh the shared expert by a sigmoid gate of the token."""
    moe_shared_expert_overlap: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Compute the shared expert while tokens travel to the routed ones (alltoall dispatcher)."""
    moe_expert_capacity_factor: float | None = flag(None, part_of="num_experts")
    """Tokens of one sequence that an expert takes, over the even share; None drops nothing."""
    moe_pad_expert_input_to_capacity: bool = flag(False, part_of="num_experts")
    """Give every expert an input of equal length."""
    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"), part_of="num_experts")
    """Which tokens are dropped first."""
    moe_input_jitter_eps: float | None = flag(None, part_of="num_experts")
    """Noise on the router's input."""
    moe_layer_recompute: bool = flag(False, part_of="num_experts")
    """Recompute expert layers in backward."""
    moe_use_upcycling: bool = flag(False, part_of="num_experts")
    """Where a checkpoint to load is that of a dense model, start every expert as its MLP."""
    moe_per_layer_logging: bool = flag(False, part_of="num_experts")
    """Log the balance of each layer."""
    overlap_moe_expert_parallel_comm: bool = flag(False, part_of="num_experts")
    """Compute one micro batch's backward while another's tokens travel, and the other way round."""
    delay_wgrad_compute: bool = flag(
        False,
        part_of="overlap_moe_expert_parallel_comm",
        refuse="drop it, or use --pipeline-schedule dualpipe-v: it puts weight gradients off",
    )
    """Split the backward so that weight gradients hide communication."""
