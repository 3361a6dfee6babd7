"""Constants of the update rule are the command line's, and a change is told."""

from types import SimpleNamespace

from megatron.training.checkpointing.run_state import CheckpointContext, apply_optimizer
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.setup.assemble import changed_settings


class LoadedOptimizer:
    """Takes the settings of a checkpoint's groups over, as optimizers of torch do."""

    def __init__(self, **settings):
        self.param_groups = [{"params": [], **settings}]

    def load_state_dict(self, state):
        self.param_groups[0].update(state)


def test_constants_of_the_update_rule_are_those_of_the_command_line():
    optimizer = LoadedOptimizer(betas=(0.9, 0.5), eps=1e-6, lr=1.0)
    stored = {"betas": (0.9, 0.999), "eps": 1e-8, "lr": 0.5}
    parts = CheckpointContext(model=[], optimizer=optimizer, groups=SimpleNamespace())
    apply_optimizer(parts, {"optimizer": stored}, was_loaded=True)
    assert optimizer.param_groups == [{"params": [], "betas": (0.9, 0.5), "eps": 1e-6, "lr": 0.5}]


def test_changed_settings_of_the_optimizer_are_told():
    run = resolve(parse_command_line(["--adam-beta2", "0.5", "--seed", "7"]).config, world_size=1)
    stored = {**run.values, "adam_beta2": 0.95, "seed": 1234, "num_workers": 9}
    assert changed_settings(run, stored) == [
        "--adam-beta2 0.5 is used; the checkpoint was trained with 0.95",
        "random numbers continue with the checkpoint's --seed 1234; --no-load-rng uses --seed 7",
    ]
    assert changed_settings(run, {}) == []
