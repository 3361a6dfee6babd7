"""Mixture-of-experts layers: experts, routing, load balancing, capacity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flag_expressions import layer_pattern
from megatron.core.settings.flags import flag
from megatron.core.transformer.config.field_values import BELOW_ONE, NOT_NEGATIVE, POSITIVE
from megatron.core.utils import best_divisor

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

BALANCE_METHODS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none")
_EQUALLY_MANY = "ranks route equally many tokens"


@dataclass
class ExpertExchangeConfig:
    """Dispatcher of tokens, and the library that it may use. Names and defaults are Megatron's."""

    moe_token_dispatcher_type: str = flag(
        "allgather", choices=("allgather", "alltoall", "flex"), part_of="num_experts"
    )
    """How tokens are sent to experts on other ranks. flex uses the library that
    `moe_flex_dispatcher_backend` names; if the library cannot be used, it works like alltoall."""
    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        choices=("deepep", "hybridep", "ncclep"),
        part_of="moe_token_dispatcher_type",
        note_values={"ncclep": "tokens are sent by all-to-all"},
    )
    """Library of the flex dispatcher: deepep or hybridep (both in the package deep_ep). The log
    names the library in use, and the reason if it is another one."""
    moe_enable_deepep: bool = flag(False, part_of="moe_token_dispatcher_type")
    """Megatron's earlier name of moe-flex-dispatcher-backend deepep; for the flex dispatcher."""
    moe_flex_dispatcher_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """Multiprocessors that the library of the flex dispatcher may occupy; None is its default."""
    moe_deepep_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """The same for deepep alone."""
    moe_hybridep_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """The same for hybridep alone."""

    @property
    def exchange_library(self) -> str:
        """The library chosen for the flex dispatcher."""
        return "deepep" if self.moe_enable_deepep else self.moe_flex_dispatcher_backend

    @property
    def exchange_num_sms(self) -> int | None:
        """Number of multiprocessors that the library may occupy; None is its default."""
        of_library = {"deepep": self.moe_deepep_num_sms, "hybridep": self.moe_hybridep_num_sms}
        own = of_library.get(self.exchange_library)
        return self.moe_flex_dispatcher_num_sms if own is None else own


@dataclass
class ExpertConfig(ExpertExchangeConfig):
    """Routed experts, their router and dispatcher. Names and defaults are Megatron's."""

    num_moe_experts: int | None = flag(None, name="num_experts", within=POSITIVE)
    """Routed experts of each expert layer; None is a dense model."""
    moe_layer_freq: int | list[int] = flag(
        1, parse=layer_pattern, type_text="int or list expr", part_of="num_experts", within=POSITIVE
    )
    """Layers with experts: every N-th, beginning with the first, or 0/1 for each layer."""
    moe_ffn_hidden_size: int | None = flag(None, part_of="num_experts")
    """Width of one expert; None means ffn_hidden_size."""
    moe_activation_func_clamp_value: float | None = flag(
        None, part_of="num_experts", within=POSITIVE
    )
    """Replaces --activation-func-clamp-value in routed experts (GLM-5.3, Hunyuan 4)."""
    moe_latent_size: int | None = flag(None, part_of="num_experts", within=POSITIVE)
    """Input and output width of routed experts: tokens are projected down to it before they are
    sent to their experts, and up again afterwards. The router and shared experts read tokens in the
    hidden size (LatentMoE, arXiv 2601.18089). None is the hidden size."""
    moe_grouped_gemm: bool = flag(False, part_of="num_experts")
    """Compute all experts of a rank in grouped GEMMs instead of one module after the other."""
    moe_layer_recompute: bool = flag(False, part_of="num_experts")
    """Drop the activations of expert layers and recompute them in backward."""

    moe_router_topk: int = flag(2, part_of="num_experts")
    """Experts per token."""
    moe_router_score_function: str = flag(
        "softmax", choices=("softmax", "sigmoid", "sqrtsoftplus"), part_of="num_experts"
    )
    """Function that maps the router's logits to scores: softmax, sigmoid or sqrtsoftplus."""
    moe_router_pre_softmax: bool = flag(False, part_of="num_experts")
    """Compute the softmax over all experts instead of over the chosen experts only."""
    moe_router_topk_scaling_factor: float | None = flag(None, part_of="num_experts")
    """Factor on the weights of the chosen experts."""
    moe_router_num_groups: int | None = flag(None, part_of="num_experts")
    """Number of groups of experts; a token may use `moe_router_group_topk` groups (arXiv
    2412.19437)."""
    moe_router_group_topk: int | None = flag(None, part_of="num_experts")
    """Number of groups that a token may be routed to."""
    moe_router_group_score_topk: int | None = flag(None, part_of="num_experts")
    """The score of a group is the sum of the scores of this number of its best experts; 1 in
    DeepSeek-V2. Default moe-router-topk / moe-router-group-topk."""
    moe_n_hash_layers: int = flag(0, part_of="num_experts", within=NOT_NEGATIVE)
    """Number of first layers of the model where a table of token ids chooses the experts, and the
    router computes their weights alone (hash layers, arXiv 2106.04426; DeepSeek-V4)."""
    moe_apply_probs_on_input: bool = flag(False, part_of="num_experts")
    """Multiply the input of an expert by the token's weight, not its activation (Llama 4)."""
    moe_router_dtype: str | None = flag(None, choices=("fp32", "fp64"), part_of="num_experts")
    """Dtype of the router's matrix product: fp32, fp64, or None for the model's dtype. Scores are
    at least fp32."""
    moe_router_scales: bool = flag(False, part_of="num_experts")
    """Divide the router's input by the root of its mean square and of the hidden size, multiply it
    by a learned number for each channel, and the weights of the chosen experts by a learned number
    for each expert (Gemma 4)."""
    moe_router_enable_expert_bias: bool = flag(False, part_of="num_experts")
    """Balance the load with a bias on the scores that choose experts (arXiv 2408.15664)."""
    moe_router_bias_update_rate: float = flag(0.001, part_of="num_experts")
    """Change of the expert bias in a step."""
    moe_router_load_balancing_type: str | list[str] = flag(
        "aux_loss",
        nargs="+",
        choices=(
            "aux_loss",
            "seq_aux_loss",
            "global_aux_loss",
            "sinkhorn",
            "quantile_balancing",
            "none",
        ),
        part_of="num_experts",
        refuse_values={"quantile_balancing": "use --moe-router-enable-expert-bias"},
        per_micro_batch={"sinkhorn": "the tokens of a micro batch are assigned together"},
    )
    """One or several of aux_loss, seq_aux_loss, global_aux_loss; or sinkhorn, or none."""
    moe_aux_loss_coeff: float | list[float] = flag(0.0, nargs="+", part_of="num_experts")
    """Weight of the balance loss; one for each method where there are several."""
    moe_z_loss_coeff: float | None = flag(None, part_of="num_experts", within=BELOW_ONE)
    """Weight of the mean square of the logits' log-sum-exp (arXiv 2202.08906, section 3.1)."""
    moe_input_jitter_eps: float | None = flag(None, part_of="num_experts", within=BELOW_ONE)
    """Multiply the router's input by uniform noise in [1 - eps, 1 + eps] (arXiv 2101.03961)."""
    moe_router_force_load_balancing: bool = flag(False, part_of="num_experts")
    """Route at random, for measuring speed."""

    moe_expert_capacity_factor: float | None = flag(None, part_of="num_experts", within=POSITIVE)
    """Capacity of an expert: the number of tokens of a sequence that it accepts, relative to an
    even share. None drops no token."""
    moe_token_drop_policy: str = flag("probs", choices=("probs", "position"), part_of="num_experts")
    """Tokens that a full expert keeps: the tokens with the largest weights, or the first tokens."""
    moe_pad_expert_input_to_capacity: bool = flag(
        False, part_of="num_experts", per_micro_batch=_EQUALLY_MANY
    )
    """Pad the input of every expert to the same length: its capacity in each sequence."""
    moe_expert_rank_capacity_factor: float | None = flag(
        None, part_of="num_experts", per_micro_batch=_EQUALLY_MANY, within=POSITIVE
    )
    """Number of tokens that a rank sends to each expert-parallel rank, relative to an even share of
    its choices. With it the host never waits for the router; choices beyond it are dropped and
    counted in the log. At the expert-parallel size none is dropped. With None the host reads the
    router's counts and sends every token."""
    moe_shared_expert_intermediate_size: int | None = flag(
        None, part_of="num_experts", within=POSITIVE
    )
    """Width of the shared expert, which every token uses; None adds no shared expert."""
    moe_average_shared_expert: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Halve the sum of the routed experts and the shared expert (Command A with experts)."""
    moe_shared_expert_gate: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Multiply the shared expert's output by a sigmoid gate computed from the token."""
    moe_branch_norms: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Norm the input and the output of the routed experts, and of the shared expert, each with
    weights of its own, in place of one norm before both; the router reads tokens without a norm
    (Gemma 4)."""
    moe_output_norm: bool = flag(False, part_of="num_experts")
    """Norm the sum of the routed experts and the shared expert (A.X K1)."""
    moe_shared_expert_overlap: bool = flag(False, part_of="moe_shared_expert_intermediate_size")
    """Compute the shared expert while tokens are sent to routed experts (alltoall dispatcher)."""
    moe_per_layer_logging: bool = flag(False, part_of="num_experts")
    """Log the balance of each layer."""

    def layers_with_experts(self, num_layers: int) -> list[bool]:
        """Return for each layer of the model whether it has experts."""
        if self.num_moe_experts is None:
            return [False] * num_layers
        freq = self.moe_layer_freq
        if isinstance(freq, int):
            return [layer % freq == 0 for layer in range(num_layers)]
        return [bool(value) for value in freq]

    def balance_losses(self) -> dict[str, float]:
        """Return method -> coefficient of the balance losses that are on."""
        methods, coefficients = _as_list(self.moe_router_load_balancing_type), self._coefficients()
        chosen = zip(methods, coefficients, strict=True)
        return {m: c for m, c in chosen if m.endswith("aux_loss") and c > 0}

    @property
    def counts_by_sequence(self) -> bool:
        """Whether the result of a router depends on where a sequence begins and ends."""
        has_capacity = self.moe_expert_capacity_factor is not None
        return has_capacity or "seq_aux_loss" in self.balance_losses()

    @property
    def routes_by_sinkhorn(self) -> bool:
        """Whether experts are chosen by balanced assignment."""
        return "sinkhorn" in _as_list(self.moe_router_load_balancing_type)

    def _coefficients(self) -> list[float]:
        given = self.moe_aux_loss_coeff
        if isinstance(given, (int, float)):
            return [float(given)] * len(_as_list(self.moe_router_load_balancing_type))
        return [float(value) for value in given]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _problem(found: str, rule: str, *flags: str, fix: str) -> ConfigError:
    return ConfigError(found, rule=rule, flags=list(flags), fix=fix)


def derive_experts(config: TransformerConfig) -> None:
    """Fill the width of an expert, and whether expert layers are recomputed."""
    if "moe" in (config.recompute_modules or []):
        config.moe_layer_recompute = True
    if config.num_moe_experts is not None and config.moe_ffn_hidden_size is None:
        config.moe_ffn_hidden_size = config.ffn_hidden_size


def expert_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of the experts, their router and their split over ranks."""
    expert_parallel = config.expert_model_parallel_size
    if config.num_moe_experts is None:
        if expert_parallel > 1:
            yield _problem(
                f"expert_model_parallel_size={expert_parallel} in a model without experts.",
                "expert parallelism distributes routed experts",
                "--expert-model-parallel-size",
                "--num-experts",
                fix="drop --expert-model-parallel-size, or set --num-experts",
            )
        return
    if config.mlp_chunks_for_training > 1:
        yield _problem(
            f"mlp_chunks_for_training={config.mlp_chunks_for_training} in a model with experts.",
            "a router sees whole sequences",
            "--mlp-chunks-for-training",
            "--num-experts",
            fix="use --moe-layer-recompute instead of --mlp-chunks-for-training",
        )
    yield from _sizes_problems(config)
    yield from _router_problems(config)
    yield from _capacity_problems(config)


def _sizes_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    experts, num_layers = config.num_moe_experts or 0, config.num_layers
    expert_parallel = config.expert_model_parallel_size
    expert_tp = config.expert_tensor_parallel_size or 1
    if experts % expert_parallel:
        yield _problem(
            f"{experts} experts cannot be split over expert-parallel size {expert_parallel}.",
            "each expert-parallel rank owns a whole number of experts",
            "--num-experts",
            "--expert-model-parallel-size",
            fix=f"use --expert-model-parallel-size {best_divisor(experts, expert_parallel)}",
        )
    width = config.moe_ffn_hidden_size or 0
    if width < 1 or width % expert_tp:
        yield _problem(
            f"moe_ffn_hidden_size={width} cannot be split over expert-tensor-parallel size"
            f" {expert_tp}.",
            "each rank owns an equal part of an expert",
            "--moe-ffn-hidden-size",
            "--expert-tensor-parallel-size",
            fix=f"use --moe-ffn-hidden-size {max(1, -(-width // expert_tp)) * expert_tp}",
        )
    exchanging, tp = expert_parallel * expert_tp, config.tensor_model_parallel_size
    if config.layout_invariant_mode and (
        config.tensor_units % expert_tp or max(exchanging, tp) % min(exchanging, tp)
    ):
        yield _problem(
            f"expert-parallel size {expert_parallel} and expert-tensor-parallel size {expert_tp}"
            f" with tensor-parallel size {tp}.",
            "in layout-invariant mode an expert is split into a power of two of parts, and ranks"
            " that exchange tokens hold whole micro batches",
            "--layout-invariant-mode",
            "--expert-model-parallel-size",
            "--expert-tensor-parallel-size",
            fix=f"use --expert-tensor-parallel-size 1 --expert-model-parallel-size {tp}",
        )
    freq = config.moe_layer_freq
    if isinstance(freq, list) and (len(freq) != num_layers or set(freq) - {0, 1}):
        yield _problem(
            f"moe_layer_freq={freq} for {num_layers} layers.",
            "a list has 0 or 1 for every layer",
            "--moe-layer-freq",
            "--num-layers",
            fix=f'use --moe-layer-freq "[1]*{num_layers}"',
        )
    shared = config.moe_shared_expert_intermediate_size
    for name, rule in (
        ("moe_shared_expert_gate", "the gate multiplies the output of a shared expert"),
        ("moe_branch_norms", "the shared expert is a branch beside the routed experts"),
    ):
        if getattr(config, name) and shared is None:
            yield _problem(
                f"{name}=True without moe_shared_expert_intermediate_size.",
                rule,
                "--moe-shared-expert-intermediate-size",
                fix=f"use --moe-shared-expert-intermediate-size {max(width, 1)}",
            )
    if config.activation_sparsity:
        found = f"activation_sparsity={config.activation_sparsity} with experts."
        rule = "experts keep all activations"
        yield _problem(found, rule, "--activation-sparsity", fix="drop --activation-sparsity")
    if config.moe_shared_expert_overlap and (
        shared is None or config.moe_token_dispatcher_type == "allgather"
    ):
        yield _problem(
            f"moe_shared_expert_overlap with moe_shared_expert_intermediate_size={shared}"
            f" and moe_token_dispatcher_type={config.moe_token_dispatcher_type!r}.",
            "a shared expert is computed while an all-to-all is in flight",
            "--moe-shared-expert-overlap",
            "--moe-shared-expert-intermediate-size",
            "--moe-token-dispatcher-type",
            fix="use --moe-token-dispatcher-type alltoall with a shared expert, or drop"
            " --moe-shared-expert-overlap",
        )


def _router_problems(config: ExpertConfig) -> Iterator[MegatronError]:
    experts, topk = config.num_moe_experts or 0, config.moe_router_topk
    if not 1 <= topk <= experts:
        yield _problem(
            f"moe_router_topk={topk} of {experts} experts.",
            "a token is routed to at least one expert, and to each expert at most once",
            "--moe-router-topk",
            "--num-experts",
            fix=f"use --moe-router-topk {min(2, experts)}",
        )
    is_softmax = config.moe_router_score_function == "softmax"
    if (
        topk == 1
        and is_softmax
        and not (config.moe_router_pre_softmax or config.routes_by_sinkhorn)
    ):
        yield _problem(
            "moe_router_topk=1 with a softmax over the chosen expert.",
            "the weight of a single chosen expert would always be 1, and the router would not"
            " learn",
            "--moe-router-topk",
            "--moe-router-pre-softmax",
            fix="add --moe-router-pre-softmax",
        )
    groups, kept = config.moe_router_num_groups, config.moe_router_group_topk
    if (groups is None) != (kept is None):
        yield _problem(
            f"moe_router_num_groups={groups} with moe_router_group_topk={kept}.",
            "group-limited routing needs both",
            "--moe-router-num-groups",
            "--moe-router-group-topk",
            fix="set both, or neither",
        )
    elif groups is not None and kept is not None:
        per_group = experts // groups if groups > 0 else 0
        if per_group < 1 or experts % groups or not 1 <= kept <= groups:
            yield _problem(
                f"{experts} experts in {groups} groups, and a token is routed to {kept} groups.",
                "groups are equal, and a token is routed to some of them",
                "--moe-router-num-groups",
                "--moe-router-group-topk",
                "--num-experts",
                fix=f"use --moe-router-num-groups {best_divisor(experts, max(groups, 1))}"
                " --moe-router-group-topk 1",
            )
        elif config.moe_router_group_score_topk is not None:
            judges = config.moe_router_group_score_topk
            if not 1 <= judges <= per_group or topk > kept * per_group:
                yield _problem(
                    f"moe_router_topk={topk} from {kept} groups of {per_group} experts, scored"
                    f" by {judges} of them.",
                    "the score of a group is the sum over some of its experts, and the groups that"
                    " a token is routed to contain all of its experts",
                    "--moe-router-group-score-topk",
                    "--moe-router-group-topk",
                    fix=f"use --moe-router-group-score-topk 1 --moe-router-group-topk {groups}",
                )
        elif topk % kept or topk // kept > per_group:
            yield _problem(
                f"moe_router_topk={topk} from {kept} groups of {per_group} experts.",
                "the score of a group is the sum over its topk / group_topk best experts, a whole"
                " number of at most all its experts",
                "--moe-router-topk",
                "--moe-router-group-topk",
                fix=f"use --moe-router-topk {kept * max(1, min(topk // kept, per_group))}",
            )
    yield from _balance_problems(config)


def _balance_problems(config: ExpertConfig) -> Iterator[MegatronError]:
    methods = _as_list(config.moe_router_load_balancing_type)
    unknown = [method for method in methods if method not in BALANCE_METHODS]
    if unknown or len(set(methods)) != len(methods):
        yield _problem(
            f"moe_router_load_balancing_type={methods}.",
            f"methods are {', '.join(BALANCE_METHODS)}, each at most once",
            "--moe-router-load-balancing-type",
            fix="use --moe-router-load-balancing-type aux_loss",
        )
    if len(config._coefficients()) != len(methods) or min(config._coefficients()) < 0:
        yield _problem(
            f"moe_aux_loss_coeff={config.moe_aux_loss_coeff} for {len(methods)} methods.",
            "each method has one coefficient, not negative",
            "--moe-aux-loss-coeff",
            "--moe-router-load-balancing-type",
            fix="use --moe-aux-loss-coeff" + " 0.01" * len(methods),
        )
    if config.routes_by_sinkhorn and (len(methods) > 1 or config.moe_router_num_groups):
        yield _problem(
            "sinkhorn together with another way to choose or to balance.",
            "a balanced assignment chooses the experts by itself",
            "--moe-router-load-balancing-type",
            fix="use --moe-router-load-balancing-type sinkhorn alone",
        )


def _capacity_problems(config: ExpertConfig) -> Iterator[MegatronError]:
    factor = config.moe_expert_rank_capacity_factor
    if factor is not None and config.moe_token_dispatcher_type == "allgather":
        found = "moe_expert_rank_capacity_factor with the allgather dispatcher."
        rule = "it bounds the messages between ranks, and an allgather always sends every token"
        flags = "--moe-expert-rank-capacity-factor", "--moe-token-dispatcher-type"
        yield _problem(found, rule, *flags, fix=f"use {flags[1]} alltoall")
    if config.moe_expert_capacity_factor is None and config.moe_pad_expert_input_to_capacity:
        found = "moe_pad_expert_input_to_capacity without a capacity."
        rule = "inputs are padded to the capacity of an expert"
        flags = "--moe-pad-expert-input-to-capacity", "--moe-expert-capacity-factor"
        yield _problem(found, rule, *flags, fix=f"add {flags[1]} 1.25")
    sms = config.exchange_num_sms
    if sms is not None and (sms < 2 or sms % 2):
        yield _problem(
            f"{sms} multiprocessors for the exchange of tokens.",
            "half of the multiprocessors send and half receive",
            "--moe-flex-dispatcher-num-sms",
            "--moe-deepep-num-sms",
            "--moe-hybridep-num-sms",
            fix="give an even number, for example 20",
        )
