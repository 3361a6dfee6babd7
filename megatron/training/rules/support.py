"""Support of each flag: it acts, acts on GPUs only, has no effect, or is refused."""

from __future__ import annotations

import enum
from collections.abc import Iterator

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import RunConfig, all_flags, plain


class Support(enum.Enum):
    """Effect of a given flag."""

    ACTS = "acts"
    ONLY_ON_GPU = "acts on a GPU alone"
    NO_EFFECT = "no effect"
    REFUSED = "refused"


def support_of(spec: FlagSpec) -> tuple[Support, str]:
    """Return the support of a flag, and the reason why it does not act or an alternative."""
    metadata = spec.metadata
    if metadata.refuse:
        return Support.REFUSED, metadata.refuse
    if metadata.note:
        return Support.NO_EFFECT, metadata.note
    if metadata.only_on_gpu:
        return Support.ONLY_ON_GPU, metadata.only_on_gpu
    owners = owners_of(spec)
    found = [support_of(owner) for owner in owners]
    if found and all(support is Support.REFUSED for support, _ in found):
        return Support.NO_EFFECT, f"it tunes {_named(owners)}, which is refused"
    if found and all(support is Support.NO_EFFECT for support, _ in found):
        return found[0]
    return Support.ACTS, ""


def owners_of(spec: FlagSpec) -> list[FlagSpec]:
    """Return the flags that this flag tunes; it has no effect unless one of them is given."""
    return [all_flags()[name] for name in spec.metadata.part_of if name != spec.name]


def is_without_owner(spec: FlagSpec, config: RunConfig) -> bool:
    """Return whether a flag tunes other flags and none of them is given."""
    owners = owners_of(spec)
    return bool(owners) and all(config.value_of(o.name) == o.default for o in owners)


def _named(owners: list[FlagSpec]) -> str:
    return " or ".join(owner.flag for owner in owners)


def _changed(config: RunConfig) -> Iterator[tuple[FlagSpec, object]]:
    for spec in all_flags().values():
        value = config.value_of(spec.name)
        if value != spec.default:
            yield spec, value


def _as_typed(spec: FlagSpec, value: object) -> str:
    if spec.is_switch:
        return spec.flag
    shown = plain(value)
    text = " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
    return f"{spec.flag} {text}"


def refusals(config: RunConfig) -> list[MegatronError]:
    """Return one problem per given flag of an unsupported mechanism."""
    problems: list[MegatronError] = []
    for spec, value in _changed(config):
        hashable = value if not isinstance(value, list) else None
        instead = spec.metadata.refuse or spec.metadata.refuse_values.get(hashable, "")
        if instead:
            takes_another_flag = "--" in instead and spec.flag not in instead
            if takes_another_flag and not instead.startswith(("drop it", "leave it out")):
                instead = f"drop {spec.flag}; {instead}"
            problems.append(
                ConfigError(
                    f"{_as_typed(spec, value)} is not supported yet.",
                    rule="a flag that would change the model or the data acts or is refused",
                    flags=[spec.flag],
                    fix=instead,
                )
            )
    return problems


def notes(config: RunConfig) -> list[str]:
    """Return one line per accepted flag without effect."""
    lines = []
    for spec, value in _changed(config):
        metadata = spec.metadata
        hashable = value if not isinstance(value, list) else None
        why = metadata.note or metadata.note_values.get(hashable, "")
        if not why and device.device_type() == "cpu":
            why = metadata.only_on_gpu
        owners = owners_of(spec)
        if not why and owners:
            if all(owner.metadata.note for owner in owners):
                why = owners[0].metadata.note
            elif is_without_owner(spec, config):
                why = f"has no effect without {_named(owners)}"
        if not why and spec.name == "fp8_param_gather":
            why = why_no_fp8_param_gather(config)
        if why:
            lines.append(f"{_as_typed(spec, value)}: {why}.")
    return lines


def why_no_fp8_param_gather(config: RunConfig) -> str:
    """Return why --fp8-param-gather has no effect in a run with FP8 products, or ""."""
    recipe, value = config.value_of("fp8_recipe"), config.value_of
    if recipe not in ("delayed", "tensorwise"):
        why = f"{recipe} quantizes an unrounded weight by blocks along each dimension"
    elif not value("bf16"):
        why = "only weights of --bf16 can be replaced by FP8 weights"
    elif (
        value("use_precision_aware_optimizer")
        or value("optimizer_cpu_offload")
        or value("optimizer_offload_path")
    ):
        why = "the optimizer state contains the remainders of unquantized weights"
    elif value("data_parallel_sharding_strategy") == "optim_grads_params":
        why = "a layer's weights are gathered when it computes"
    elif value("data_parallel_sharding_strategy") in (None, "no_shard") and not value(
        "use_distributed_optimizer"
    ):
        why = "no weights are gathered without --use-distributed-optimizer"
    else:
        return ""
    return f"{why}; parameters are gathered in the dtype of the model"
