"""Known flags whose mechanism does not exist here: refused with the nearest that works, or,
where they change no result, accepted with a line that says so."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.deepspeed.reading import ReadSettings, read_settings
from megatron.training.config.run import RunConfig, all_flags, plain


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
    """Return one problem per flag that asks for a mechanism that does not exist."""
    problems: list[MegatronError] = []
    for spec, value in _changed(config):
        hashable = value if not isinstance(value, list) else None
        instead = spec.metadata.refuse or spec.metadata.refuse_values.get(hashable, "")
        if instead:
            problems.append(
                ConfigError(
                    f"{_as_typed(spec, value)} is not supported yet.",
                    rule="a known flag either acts or is refused; it is never ignored",
                    flags=[spec.flag],
                    fix=instead,
                )
            )
    return problems


def notes(config: RunConfig) -> list[str]:
    """Return one line per accepted flag that has no effect here."""
    lines = []
    table = all_flags()
    for spec, value in _changed(config):
        if spec.metadata.note:
            lines.append(f"{_as_typed(spec, value)}: {spec.metadata.note}.")
        owner = table.get(spec.metadata.part_of)
        if owner is not None and config.value_of(owner.name) == owner.default:
            lines.append(f"{_as_typed(spec, value)}: has no effect without {owner.flag}.")
    if config.launch.deepspeed_config is not None:
        read = read_settings(config.launch.deepspeed_config)
        ignored = dict(read.without_effect) | _unused_monitors(read)
        if "warmup_type" not in read.sections.get("scheduler", {"params": "warmup_type"})["params"]:
            ignored["scheduler"] = "warm-up is linear; DeepSpeed's default is logarithmic"
        lines += [f"{key} of the DeepSpeed configuration: {why}." for key, why in ignored.items()]
    if config.checkpoint.ckpt_format in ("torch", "torch_dcp"):
        lines.append(
            f"--ckpt-format {config.checkpoint.ckpt_format}: checkpoints are written in the native"
            " sharded format."
        )
    return lines


def _unused_monitors(read: ReadSettings) -> dict[str, str]:
    """Return the keys of monitors that the loop of pretrain_gpt.py does not follow, and why."""
    unused = {}
    if read["csv_monitor.enabled"]:
        unused["csv_monitor.enabled"] = "--metrics-jsonl FILE writes every logged step"
    if read["flops_profiler.enabled"]:
        unused["flops_profiler.enabled"] = (
            "--log-throughput prints rates, and --dry-run the operations of each part of the model"
        )
    if read["wandb.group"]:
        unused["wandb.group"] = "a run is named by --wandb-exp-name"
    return unused
