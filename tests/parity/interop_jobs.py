"""What this program does in an exchange of checkpoints: jobs of its ranks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpointing import CheckpointContext, Checkpointer, CheckpointSettings
from megatron.training.run.state import TrainState
from tests.parity import interop_case as case


@dataclass(frozen=True)
class Exchange:
    """One checkpoint from there to here, or from here to there."""

    family: str
    tp: int = 1
    pp: int = 1
    optimizer: str = ""
    own_tp: int = 1

    def __str__(self) -> str:
        stored = f", optimizer {self.optimizer}" if self.optimizer else ""
        return f"{self.family}, there tp {self.tp} pp {self.pp}, here tp {self.own_tp}{stored}"


def build(family: str, groups: ProcessGroupCollection, *, seed: int) -> CheckpointContext:
    """Return this program's model of a family, with an optimizer."""
    rng_state().set_seed(seed)
    kind, values = case.FAMILIES[family], case.config_values(family)
    if kind["is_llama"]:
        values["activation_func"] = F.silu
    config = TransformerConfig(
        **values,
        unpadded_vocab_size=case.VOCABULARY,
        tensor_model_parallel_size=groups.tp.size(),
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=case.VOCABULARY,
        max_sequence_length=case.SEQUENCE,
        share_embeddings_and_output_weights=kind["is_tied"],
        position_embedding_type="rope" if kind["is_llama"] else "learned_absolute",
        pg_collection=groups,
    )
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3), [model], pg_collection=groups)
    return CheckpointContext(model=[model], optimizer=optimizer, groups=groups, args={"lr": 1e-3})


def logits_of(model: Any, groups: ProcessGroupCollection) -> Tensor:
    """Return the logits [b, s, v]."""
    tokens = torch.tensor(case.token_rows())
    positions = torch.arange(case.SEQUENCE).expand(case.BATCH, -1)
    with torch.no_grad():
        part = model(tokens, positions, None)
    if groups.tp is None or groups.tp.size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(groups.tp.size())]
    torch.distributed.all_gather(parts, part.contiguous(), group=groups.tp)
    return torch.cat(parts, -1)


def load_here(groups: ProcessGroupCollection, exchange: Exchange, directory: str) -> dict:
    """Load a checkpoint of the other program into a model of another seed; a job of one rank."""
    parts = build(exchange.family, groups, seed=5)
    settings = CheckpointSettings(load=directory, no_load_optim=not exchange.optimizer)
    restored = Checkpointer(settings, parts).load()
    assert restored is not None
    assert restored.train_state.iteration == 3
    assert restored.train_state.consumed_train_samples == 24
    return state_of(parts, exchange)


def state_of(parts: CheckpointContext, exchange: Exchange) -> dict:
    """Return the logits and, where they are exchanged, moments by name and number of updates."""
    found = {"logits": logits_of(parts.model[0], parts.groups)}
    for item in parts.optimizer.shards if exchange.optimizer else ():
        state = parts.optimizer.state[item.main_param]
        found["num_updates"] = torch.tensor(int(state["step"]))
        for kind in ("exp_avg", "exp_avg_sq"):
            found[f"{kind}.{item.shard.name}"] = state[kind].view(item.shard.parameter.shape)
    return found


def save_here(groups: ProcessGroupCollection, exchange: Exchange, directory: str) -> dict:
    """Save this program's checkpoint; a job of one rank."""
    parts = build(exchange.family, groups, seed=11)
    generator = torch.Generator().manual_seed(3)
    for parameter in parts.model[0].parameters():
        drawn = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
        parameter.grad = drawn
    parts.optimizer.step()
    checkpointer = Checkpointer(CheckpointSettings(save=directory), parts)
    checkpointer.save(TrainState(iteration=3, consumed_train_samples=24))
    checkpointer.close()
    return state_of(parts, exchange)
