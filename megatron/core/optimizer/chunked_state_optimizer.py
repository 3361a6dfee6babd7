"""An optimizer that updates its state chunk by chunk: in few bytes, in host memory or in files.

Optimizer states in host memory: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model
Training", section 4, arXiv 2101.06840. State stays where it is and the update is computed there;
what travels is the gradient and the new weight. On a device that is the host, nothing travels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.optimizer.chunked_state import MAIN, ChunkedState
from megatron.core.optimizer.definition import ElementwiseUpdate
from megatron.core.optimizer.main_param_shard import MainParamShard


class ChunkedStateOptimizer:
    """The interface of a `torch.optim.Optimizer`, as far as `MegatronOptimizer` uses it.

    Gradients come through `set_gradient`, because they need not have the dtype of the tensors
    that they belong to: those are the model's own weights.
    """

    def __init__(
        self,
        update: ElementwiseUpdate,
        param_groups: Sequence[dict[str, Any]],
        parts: Sequence[ChunkedState],
    ) -> None:
        """
        Args:
            param_groups: "params" are the `main` tensors of the parts' shards. They are given the
                optimizer's constants, as the groups of torch's optimizers have them: a schedule may
                change them.
        """
        for group in param_groups:
            for name, value in update.constants.items():
                group.setdefault(name, value)
        self.update, self.param_groups, self.parts = update, list(param_groups), list(parts)
        self.num_steps = 0
        """Updates so far."""
        self._gradients: dict[int, Tensor] = {}
        self._part_of = {id(item.main_param): part for part in parts for item in part.shards}

    @property
    def main_params(self) -> set[int]:
        """Ids of the tensors that this optimizer updates."""
        return set(self._part_of)

    def set_gradient(self, main: Tensor, gradient: Tensor) -> None:
        """Keep a gradient for the next update."""
        self._gradients[id(main)] = gradient

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Update with `factor` times the gradients taken, and forget them."""
        settings_of = {id(main): group for group in self.param_groups for main in group["params"]}
        for part in self.parts:
            part.update(self.update, self._gradients, settings_of, self.num_steps, factor)
        self._gradients.clear()
        self.num_steps += 1

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """State tensors of each shard, by its `main`, decoded; a snapshot where that copies."""
        return {item.main_param: values for item, values in self._states()}

    def _states(self) -> Iterator[tuple[MainParamShard, dict[str, Any]]]:
        for part in self.parts:
            yield from part.states()

    def set_state(self, item: MainParamShard, values: Mapping[str, Tensor]) -> None:
        """Store state tensors of one shard."""
        self._part_of[id(item.main_param)].set_state(item, values)

    def scale_main(self, item: MainParamShard, factors: Tensor) -> None:
        """Multiply the main weight of a shard by factors of its shape."""
        part = self._part_of[id(item.main_param)]
        if part.has_main:
            main = part.state_of(item, MAIN)
            part.set_state(item, {MAIN: main * factors.to(main.device)})
        else:
            item.main_param.mul_(factors)

    def reload_main(self) -> None:
        """Take the main weights from the model."""
        for part in self.parts:
            if part.has_main:
                part.reload_main()

    @property
    def stored_bytes(self) -> int:
        """Bytes of all state, wherever it is."""
        return sum(
            field.codec.block_bytes * part.store.chunks[-1][1]
            for part in self.parts
            for field in part.fields
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the columns of all parts, and the number of updates."""
        columns = [
            [part.store.column(i).clone() for i, _ in enumerate(part.fields)] for part in self.parts
        ]
        return {"columns": columns, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, of the same settings; the model is loaded already."""
        self.num_steps = int(state_dict["num_steps"])
        for part, columns in zip(self.parts, state_dict["columns"], strict=True):
            for number, column in enumerate(columns):
                part.store.column(number).copy_(column)
            if part.has_main:
                for item, values in part.states():
                    part.set_state(item, {MAIN: values[MAIN]})
