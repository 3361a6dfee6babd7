"""Figures of the code, counted from its syntax trees.

    python -m tests.architecture            # the table
    python -m tests.architecture NAME       # what one figure counts, line by line

Each figure is a list of places, so that a number can always be looked at. `test_figures.py` holds
the bounds.
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.architecture.ignored_arguments import ignored_arguments
from tests.architecture.parameters import arguments, docstring_of_method, unread
from tests.architecture.source import Function, Module, circles, imports, modules

COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all",
    "all_to_all_single", "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "irecv", "isend", "monitored_barrier", "P2POp", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "_all_gather_base", "_reduce_scatter_base",
}  # fmt: skip
"""What of torch.distributed talks to other ranks."""

MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem",
    "popleft", "remove", "set", "reset", "setdefault", "update",
}  # fmt: skip

FLAGS = Path(__file__).parents[1] / "unit" / "training" / "frozen_flags.json"

REDEFINING = ("MLATransformerConfig",)
"""Dataclasses that only give other defaults to what they inherit."""

NOT_SETTINGS = {
    "iteration", "consumed_train_samples", "consumed_valid_samples",
    "items", "get", "remember", "unchanged_run",
}  # fmt: skip
"""Attributes of `args`: what a script with its own loop counts in it, and methods."""

DEVICE_MODULES = (
    "megatron.core.foundation.device",
    "megatron.core.kernels",
    "megatron.core.transport",
)
"""Where a device may be asked for."""


def declared_twice() -> Iterator[str]:
    """Flags that are fields of two dataclasses, of which neither is built on the other."""
    fields: dict[str, list[str]] = {}
    for module in modules().values():
        is_training = module.name.startswith("megatron.training.config.") and not (
            module.name.endswith(".run")  # its fields are groups
        )
        is_user = module.name.startswith(
            ("megatron.core.transformer.config", "megatron.core.transformer.transformer_config",
             "megatron.core.model_parallel_config", "megatron.core.optimizer.optimizer_config",
             "megatron.core.distributed.distributed_data_parallel_config")
        )  # fmt: skip
        if is_training or is_user:
            for name, line in _dataclass_fields(module):
                fields.setdefault(name, []).append(f"{module.path}:{line}")
    flags = {flag["name"] for flag in json.loads(FLAGS.read_text()).values()}
    for name, places in sorted(fields.items()):
        if name in flags and len({place.rpartition(":")[0] for place in places}) > 1:
            yield f"{name}: {', '.join(places)}"


def _dataclass_fields(module: Module) -> Iterator[tuple[str, int]]:
    for node in module.tree.body:
        is_dataclass = isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(d) or "config" in ast.unparse(d).lower()
            for d in node.decorator_list
        )
        # A config built on another gives some of its fields another default.
        if not is_dataclass or (isinstance(node, ast.ClassDef) and node.name in REDEFINING):
            continue
        for child in node.body:
            is_field = isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
            if is_field and "ClassVar" not in ast.unparse(child.annotation):
                yield child.target.id, child.lineno


def untyped_reads() -> Iterator[str]:
    """Reads of settings that the type checker cannot see: by a string key of `settings`, `values`
    or `v`, or as an attribute of the flat `args`, outside of core and compatibility.

    Not counted: the keys of DeepSpeed's JSON, which are declared in the schema of
    `megatron_lattice.deepspeed` (a test compares `deepspeed_keys` with it), and what a script
    counts in its `args`.
    """
    answers_all = any(
        isinstance(child, Function) and child.name == "__getattr__"
        for module in modules().values()
        if module.name == "megatron.training.config.resolve" or ".training.config" in module.name
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
        for child in node.body
    )
    groups = {"values", "config", "namespace"}
    for module in modules().values():
        if module.name.startswith(("megatron.compatibility", "megatron.core")):
            continue
        for node in ast.walk(module.tree):
            if isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                base = ast.unparse(node.value).rpartition(".")[2]
                is_of_deepspeed = module.name.startswith("megatron_lattice.deepspeed")
                is_key = isinstance(node.slice.value, str) and base in {"settings", "v", "values"}
                if is_key and not is_of_deepspeed:
                    yield f"{module.path}:{node.lineno} {ast.unparse(node)}"
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                is_args = node.value.id == "args" and node.attr not in NOT_SETTINGS
                is_run = node.value.id == "run" and answers_all and node.attr not in groups
                if (is_args or is_run) and not node.attr.startswith("__"):
                    yield f"{module.path}:{node.lineno} {ast.unparse(node)}"


def deepspeed_keys() -> Iterator[str]:
    """Keys of DeepSpeed's JSON that its package reads."""
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                key, base = node.slice.value, ast.unparse(node.value).rpartition(".")[2]
                is_read = (
                    module.name.startswith("megatron_lattice.deepspeed") and base == "settings"
                )
                if is_read and isinstance(key, str):
                    yield key


def module_state() -> Iterator[str]:
    """Names of modules that functions set or change: whoever reads them depends on when."""
    for module in modules().values():
        names = {
            target.id
            for node in module.tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
        changed = {
            name: line
            for function, _ in module.functions()
            for name, line in _changes(function)
            if name in names
        }
        for name, line in sorted(changed.items()):
            yield f"{module.path}:{line} {name}"


def _changes(function: Function) -> Iterator[tuple[str, int]]:
    own = {a.arg for a in arguments(function)} | {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        for target in (node,)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from ((name, node.lineno) for name in node.names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            base = node.func.value
            if isinstance(base, ast.Name) and node.func.attr in MUTATORS and base.id not in own:
                yield base.id, node.lineno
        if isinstance(node, ast.Subscript | ast.Attribute) and isinstance(
            node.ctx, ast.Store | ast.Del
        ):
            base = node.value
            if isinstance(base, ast.Name) and base.id not in own:
                yield base.id, node.lineno


def files_with_collectives() -> Iterator[str]:
    """Files that call torch.distributed, or a process group, to talk to other ranks."""
    for module in modules().values():
        found = Counter(
            node.attr
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Attribute)
            and node.attr in COLLECTIVES
            and ast.unparse(node.value) in {"dist", "torch.distributed", "distributed", "group"}
        )
        if found:
            yield f"{module.path}: {', '.join(sorted(found))}"


def device_branches() -> Iterator[str]:
    """Questions about the kind of a device, outside what is chosen by device."""
    for module in modules().values():
        if module.name.startswith(DEVICE_MODULES) or not module.name.startswith("megatron.core"):
            continue
        for node in ast.walk(module.tree):
            text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Compare) else ""
            is_type = isinstance(node, ast.Compare) and (
                "device" in text or ".type" in text
            ) and ("'cpu'" in text or "'cuda'" in text)  # fmt: skip
            asks = isinstance(node, ast.Attribute) and node.attr in {"is_cpu", "is_cuda"}
            if is_type or asks:
                yield f"{module.path}:{node.lineno} {text}"
            if isinstance(node, ast.Name) and node.id == "is_cpu":
                yield f"{module.path}:{node.lineno} is_cpu"


def unread_parameters() -> Iterator[str]:
    """Parameters that a function takes and never reads, and that are not in the table of what is
    accepted for compatibility."""
    table = ignored_arguments()
    for place, function, name in unread():
        if (function, name) not in table:
            yield f"{place} {function.partition(':')[2]}({name})"


def public_parameters() -> Iterator[str]:
    """All annotated parameters of public functions."""
    for module in modules().values():
        for function, _ in module.public_functions():
            for argument in arguments(function):
                if argument.annotation is not None:
                    where = f"{module.path}:{function.lineno} {function.name}"
                    yield f"{where}({argument.arg}: {ast.unparse(argument.annotation)})"


def any_parameters() -> Iterator[str]:
    """Those whose type is, or has inside, Any."""
    return (p for p in public_parameters() if re.search(r"\bAny\b", p.partition(": ")[2]))


def tensor_functions() -> Iterator[tuple[str, bool]]:
    """Public functions of core that take and return tensors, and whether a shape is in the
    docstring."""
    for module in modules().values():
        if not module.name.startswith("megatron.core"):
            continue
        for function, owner in module.public_functions():
            types = [ast.unparse(a.annotation) for a in arguments(function) if a.annotation]
            returns = ast.unparse(function.returns) if function.returns else ""
            if not any(_names_tensor(t) for t in types) or not _names_tensor(returns):
                continue
            text = ast.get_docstring(function) or ""
            if owner is not None and function.name == "forward":
                text += ast.get_docstring(owner) or ""
            if see := re.fullmatch(r"See `(\w+)`\.", text):
                text += docstring_of_method(see[1], function.name)
            where = f"{module.path}:{function.lineno} {function.name}"
            yield where, "[" in text and "]" in text


def _names_tensor(annotation: str) -> bool:
    return re.search(r"\bTensor\b", annotation) is not None


def without_shapes() -> Iterator[str]:
    """Tensor functions whose docstring has no shape."""
    return (where for where, has_shape in tensor_functions() if not has_shape)


ASSERTS_WITH_REASON = {
    "flat_params.span": "the caller walks the parameters of a bucket in their order",
    "sharding_arithmetic.plan_buffer": "sizes come from parameters and from checked settings",
    "param_meta.local_ranges": "the layers refuse sizes that are not divisible, by their flags",
    "layout.stage": "positions come from the groups of the run and the chunks of the layout",
    "shared_buffer.publish_progress": "the address of memory that the buffer itself gave out",
}
"""Function -> why its assert is no check of what a user or a third party gives."""


def asserts_on_arguments() -> Iterator[str]:
    """Asserts of public functions that compare an argument: users and third parties get errors.
    What only tells the type checker that a value is not None is no check of input, and
    `ASSERTS_WITH_REASON` holds what only our own code can break."""
    for module in modules().values():
        for function, _ in module.public_functions():
            names = {argument.arg for argument in arguments(function)} - {"self", "cls"}
            for node in ast.walk(function):
                if not isinstance(node, ast.Assert):
                    continue
                compares = any(
                    isinstance(part, ast.Not)
                    or (isinstance(part, ast.Compare) and not isinstance(part.ops[0], ast.IsNot))
                    for part in ast.walk(node.test)
                )
                read = {part.id for part in ast.walk(node.test) if isinstance(part, ast.Name)}
                where = f"{module.name.rpartition('.')[2]}.{function.name}"
                if compares and read & names and where not in ASSERTS_WITH_REASON:
                    yield f"{module.path}:{node.lineno} {function.name}: {ast.unparse(node.test)}"


def import_circles() -> Iterator[str]:
    """Groups of modules that import each other, also inside functions."""
    return (" <-> ".join(circle) for circle in circles())


def long_files() -> Iterator[str]:
    """Files of more than 450 lines."""
    return (f"{m.path}: {m.num_lines}" for m in modules().values() if m.num_lines > 450)


MEGATRON_PATH = "code written against Megatron-LM imports this path"
DEEPSPEED_PATH = "code written against DeepSpeed imports this path"
ENTRY = "one entry of a table, whose entries have a file each"

SMALL_WITH_REASON = {
    "megatron/core/models/bert/bert_lm_head.py": MEGATRON_PATH,
    "megatron/core/models/bert/pooler.py": MEGATRON_PATH,
    "megatron/core/fusions/fused_bias_gelu.py": MEGATRON_PATH,
    "megatron/core/fusions/fused_bias_swiglu.py": MEGATRON_PATH,
    "megatron_lattice/deepspeed/accelerator.py": DEEPSPEED_PATH,
    "megatron/core/optimizer/definitions/lion.py": ENTRY,
    "megatron/core/pipeline_parallel/schedule_definitions/forward_only.py": ENTRY,
}
"""Small modules with one importer that stay: path -> why."""


def crumbs() -> Iterator[str]:
    """Modules of at most 60 lines with one importer that could be a part of it."""
    return (f"{path} {rest}" for path, rest in small_modules() if path not in SMALL_WITH_REASON)


def small_modules() -> Iterator[tuple[str, str]]:
    """Yield (path, lines and importer) of all modules of at most 60 lines with one importer."""
    importers: dict[str, set[str]] = {}
    for source, targets in imports().items():
        for target in targets:
            importers.setdefault(target, set()).add(source)
    for module in modules().values():
        users = importers.get(module.name, set())
        if not module.is_package and module.num_lines <= 60 and len(users) == 1:
            yield str(module.path), f"({module.num_lines} lines) for {min(users)}"


FIGURES: Mapping[str, Callable[[], Iterator[str]]] = {
    "settings declared twice": declared_twice,
    "untyped reads of settings": untyped_reads,
    "module state": module_state,
    "files with collectives": files_with_collectives,
    "device branches": device_branches,
    "unread parameters": unread_parameters,
    "asserts on arguments": asserts_on_arguments,
    "public parameters": public_parameters,
    "Any in public parameters": any_parameters,
    "tensor functions without shapes": without_shapes,
    "import circles": import_circles,
    "long files": long_files,
    "crumbs": crumbs,
}
