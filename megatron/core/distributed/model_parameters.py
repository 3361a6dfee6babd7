"""Properties of a model chunk for replication: names of parameters, tied copies, units."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from megatron.core.parameters.initialization import canonical_names
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.utils import unwrap_model


def names_in_model(module: nn.Module) -> dict[str, str]:
    """Map each local parameter name to its name in the whole model, without wrappers."""
    names = canonical_names(module)
    prefix, inner = "", module
    while isinstance(getattr(inner, "module", None), nn.Module):
        inner, prefix = inner.get_submodule("module"), prefix + "module."
    return {local: name.removeprefix(prefix) for local, name in names.items()}


def tied_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a chunk that another pipeline stage holds too: the embedding.

    The metadata of the copy contain `tied_to`; the original has the attribute `shared_embedding`,
    or the model returns it by `shared_embedding_or_output_weight()`.
    """
    found = [
        p
        for p in module.parameters()
        if not get_param_meta(p).is_on_all_stages
        and (get_param_meta(p).tied_to is not None or getattr(p, "shared_embedding", False))
    ]
    model = unwrap_model(module)
    if not found and getattr(model, "share_embeddings_and_output_weights", False):
        holds_copy = getattr(model, "pre_process", False) or getattr(model, "post_process", False)
        weight = model.shared_embedding_or_output_weight() if holds_copy else None
        found = [] if weight is None else [weight]
    return [p for p in found if p.requires_grad]


def copied_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a chunk that all chunks of the pipeline hold."""
    held = [p for p in module.parameters() if get_param_meta(p).is_on_all_stages]
    return [p for p in held if p.requires_grad]


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that are gathered together, because one module computes with them."""

    entry: nn.Module
    """The module whose forward pass uses them."""
    parameters: tuple[nn.Parameter, ...]
    """Parameters of the module that no earlier unit contains."""
    is_layer: bool = False
    """One of many equal layers; not an embedding, and not the remaining parameters."""


def units_of(module: nn.Module) -> list[Unit]:
    """Cut a model chunk into units, in the order of the forward pass.

    A unit is a child of an outermost `nn.ModuleList` or `nn.Sequential` (a layer of the model), or
    a module that owns an embedding or output weight. The remaining parameters (norms, positions)
    are the first unit, which belongs to the module itself and is whole during its passes.
    """
    seen: set[nn.Parameter] = set()

    def claim(entry: nn.Module, *, is_layer: bool = False) -> Unit:
        own = [p for p in entry.parameters() if p.requires_grad and p not in seen]
        seen.update(own)
        return Unit(entry, tuple(own), is_layer)

    units = [claim(entry, is_layer=is_layer) for entry, is_layer in _entries(module)]
    return [claim(module), *(unit for unit in units if unit.parameters)]


def _entries(module: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return (module, whether it is a layer) of all units but the remaining parameters."""
    found: list[tuple[nn.Module, bool]] = []
    for child in module.children():
        is_layer = isinstance(module, (nn.ModuleList, nn.Sequential))
        own = child.parameters(recurse=False)
        if is_layer or any(get_param_meta(p).is_embedding_or_output for p in own):
            found.append((child, is_layer))
        else:
            found += _entries(child)
    return found
