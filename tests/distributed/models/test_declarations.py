"""The split and the partial axes that each parameter declares are what its gradients show.

`tests.distributed.models.declarations` describes the property. Each check here is itself checked:
wrong declarations, and collectives that are left out, must be found, all of them.
"""

import ast
import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

import megatron.core
from megatron.core.parameters.param_meta import ParamMeta
from tests.distributed.models.declarations import (
    LAYOUTS,
    MODELS,
    Report,
    copies_of,
    problem_of,
    report_models,
)
from tests.harness.distributed import run_distributed
from tests.parity.encoder_case import write_vocabulary

pytestmark = pytest.mark.distributed

_ENGINE = "needs Transformer Engine: `tests/gpu_without_gpu` has a stand-in for it"
_ARGUMENTS = "is a GPTModel that converts its arguments"
_WRAPPER = "wraps a whole model and has no parameters of its own"
MODULES_ELSEWHERE = {
    "distributed.distributed_data_parallel.DistributedDataParallel": _WRAPPER,
    "distributed.torch_fully_sharded_data_parallel.TorchFullyShardedDataParallel": _WRAPPER,
    "transformer.module.Float16Module": _WRAPPER,
    "fusions.fused_softmax.FusedScaleMaskSoftmax": "has no parameters and no collectives",
    "models.hybrid.hybrid_model.HybridModel": _ARGUMENTS,
    "models.hybrid.hybrid_model.MambaModel": _ARGUMENTS,
    "extensions.transformer_engine.TEColumnParallelLinear": _ENGINE,
    "extensions.transformer_engine.TEDotProductAttention": _ENGINE,
    "extensions.transformer_engine.TEGroupedLinear": _ENGINE,
    "extensions.transformer_engine.TELayerNormColumnParallelLinear": _ENGINE,
    "extensions.transformer_engine.TERowParallelLinear": _ENGINE,
    "extensions.transformer_engine.WithEmptyState": _ENGINE,
    "extensions.transformer_engine.WithoutState": _ENGINE,
    "extensions.transformer_engine._Absent": _ENGINE,
    "extensions.transformer_engine._TEParallelLinear": _ENGINE,
}
"""Class of a module in `megatron.core` that no model here has -> why."""
_INTEGERS = "exchanges integers, which have no gradient"
_BITS = "tests/parity/test_same_bits.py compares the bits of its layouts with one process"
_LOG_PROBS = "tests/parity/test_same_log_probs.py compares the bits of its layouts"
SITES_ELSEWHERE = {
    "low_precision.quantized_linear:QuantizedLinear.context": _INTEGERS,
    "context_parallel.attention:_KeysOfUnits.backward": _BITS,
    "context_parallel.attention:_KeysOfUnits.forward": _BITS,
    "tensor_parallel.cross_entropy:_UnitCrossEntropy.forward": _BITS,
    "tensor_parallel.data:broadcast_data": "exchanges samples, which have no gradient",
    "tensor_parallel.unit_products:_Copies.backward": _BITS,
    "tensor_parallel.utils:gather_split_1d_tensor": "no module uses it",
    "tensor_parallel.vocab_parallel_softmax:log_sum_of_units": _LOG_PROBS,
    "transformer.moe.token_dispatcher:StaticPlan.of": _INTEGERS,
    "transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher.dispatch": _INTEGERS,
    "transformer.moe.token_dispatcher:_ExchangePlan.of": _INTEGERS,
    "transformer.moe.unit_dispatcher:_Exchange.exchange": _BITS,
    "transformer.moe.unit_dispatcher:_Exchange.of": _INTEGERS,
}
"""Function in `megatron.core` none of whose collectives a model here runs -> why."""


class Measured:
    """Gradients of all models in their layouts, and in one process."""

    def __init__(self, vocab_file: Path) -> None:
        self.vocab_file = vocab_file
        whole = self.run("one process", [(name, None) for name in MODELS])
        self.whole = {
            name: {held: parameter.grad for held, parameter in report.held.items()}
            for name, (report,) in zip(MODELS, whole, strict=True)
        }
        self.reports: dict[tuple[str, str], list[Report]] = {}
        for layout in LAYOUTS:
            models = [name for name, model in MODELS.items() if layout in model.layouts]
            found = self.run(layout, [(name, None) for name in models])
            self.reports |= {(name, layout): r for name, r in zip(models, found, strict=True)}

    def run(self, layout_name: str, runs: list[tuple[str, str | None]]) -> list[list[Report]]:
        """Return, for each (model, call site to leave out), the reports of all ranks."""
        layout = LAYOUTS[layout_name]
        by_rank = run_distributed(
            report_models, layout.world_size, layout_name, runs, self.vocab_file, timeout_s=240.0,
            tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, expt_tp=layout.expt_tp,
        )  # fmt: skip
        return [list(reports) for reports in zip(*by_rank, strict=True)]

    def problems(self, model: str, reports: list[Report]) -> list[str]:
        """Return which parameters' gradients break their declarations, and how."""
        names = {held.meta.tied_to or n for report in reports for n, held in report.held.items()}
        assert names == self.whole[model].keys()
        found = []
        for name, whole in self.whole[model].items():
            for meta in {held.meta for report in reports for held in copies_of(name, report)}:
                if problem := problem_of(name, reports, whole, meta):
                    found.append(f"{name}: {problem}")
        return found


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return Measured(write_vocabulary(tmp_path_factory.mktemp("vocabulary")))


def test_gradients_summed_over_the_declared_axes_are_the_shards_of_one_process(measured):
    problems = [
        f"{model} in {layout}: {problem}"
        for (model, layout), reports in measured.reports.items()
        for problem in measured.problems(model, reports)
    ]
    assert not problems, "\n".join(problems)


def test_no_gradient_is_zero_in_one_process(measured):
    empty = [
        f"{model}: {name}"
        for model, gradients in measured.whole.items()
        for name, gradient in gradients.items()
        if not gradient.abs().max() > 1e-9
    ]
    assert not empty, empty


def test_every_module_is_in_a_model_or_has_a_reason_not_to_be(measured):
    for module in pkgutil.walk_packages(megatron.core.__path__, "megatron.core."):
        if ".triton_kernels" not in module.name:
            importlib.import_module(module.name)
    prefix = "megatron.core."
    present = {
        f"{kind.__module__}.{kind.__qualname__}".removeprefix(prefix)
        for kind in _subclasses(nn.Module)
        if kind.__module__.startswith(prefix)
    }
    covered = {
        name.removeprefix(prefix)
        for reports in measured.reports.values()
        for report in reports
        for name in report.modules
    }
    assert present - covered == MODULES_ELSEWHERE.keys()


def _subclasses(kind: type) -> Iterator[type]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def test_every_wrong_declaration_is_found(measured):
    planted, found, missed = Counter(), Counter(), []
    for (model, layout), reports in measured.reports.items():
        for name, whole in measured.whole[model].items():
            report = next(report for report in reports if name in report.held)
            held = report.held[name]
            faults = [
                (kind, reports, wrong)
                for kind, wrong in _wrong_declarations(report, held.meta, whole.dim())
            ]
            if any(copy.meta.tied_to for r in reports for copy in copies_of(name, r)):
                faults.append(("is not tied", [_untied(name, r) for r in reports], held.meta))
            for kind, wrong_reports, wrong in faults:
                planted[held.owner, kind] += 1
                if problem_of(name, wrong_reports, whole, wrong) is None:
                    missed.append(f"{kind}: {model} in {layout}, {name}")
                else:
                    found[held.owner, kind] += 1
    print(*(f"{found[fault]:>5}/{planted[fault]:<5}{fault}" for fault in sorted(planted)), sep="\n")
    assert not missed, "\n".join(missed)
    owners = {held.owner for r in measured.reports.values() for held in r[0].held.values()}
    assert owners == {owner for owner, kind in planted if kind.startswith("adds")}
    assert owners == {owner for owner, kind in planted if kind.startswith("splits")}


def _untied(name: str, report: Report) -> Report:
    held = {
        own: replace(h, meta=replace(h.meta, tied_to=None)) if h.meta.tied_to == name else h
        for own, h in report.held.items()
    }
    return replace(report, held=held)


def _wrong_declarations(
    report: Report, meta: ParamMeta, num_dims: int
) -> Iterator[tuple[str, ParamMeta]]:
    size = {axis: len(members) for axis, (_, members) in report.places.items()}
    for axis in ("expt_tp",) if meta.is_expert else ("tp", "cp"):
        if size[axis] > 1:
            is_declared = axis in meta.partial_grad_axes
            axes = set(meta.partial_grad_axes) ^ {axis}
            kind = f"{'lacks' if is_declared else 'adds'} {axis}"
            yield kind, replace(meta, partial_grad_axes=tuple(axes))
    axis = "expt_tp" if meta.is_expert else "tp"
    if size[axis] > 1:
        for dim in {None, *range(num_dims)} - {meta.split_dim}:
            yield "splits another dimension", replace(meta, split_dim=dim, split_axis=axis)
        if meta.split_dim is not None:
            yield "has another stride", replace(meta, stride=2 if meta.stride == 1 else 1)
    if report.places["dp_cp"] != report.places["expt_dp"]:
        yield "is of the other grid", replace(meta, is_expert=not meta.is_expert)


def test_every_collective_that_is_left_out_is_found(measured):
    first: dict[str, tuple[str, str]] = {}
    for case, reports in measured.reports.items():
        for site in sorted(set().union(*(report.sites for report in reports))):
            first.setdefault(site, case)
    missed = []
    for layout in LAYOUTS:
        runs = [(model, site) for site, (model, where) in first.items() if where == layout]
        for (model, site), reports in zip(runs, measured.run(layout, runs), strict=True):
            problems = measured.problems(model, reports)
            print(
                f"{len(problems):>4} of {len(measured.whole[model]):<4} {site}: {model}, {layout}"
            )
            if not problems:
                missed.append(f"{site}: {model} in {layout}")
    assert not missed, "\n".join(missed)
    seen = {site.partition(" in ")[2].partition(" of ")[0] for site in first}
    assert _calling_functions() - seen == {f"megatron.core.{name}" for name in SITES_ELSEWHERE}


def _calling_functions() -> set[str]:
    """Return the functions of `megatron.core` in whose text a collective is called."""
    root, found = Path(megatron.core.__path__[0]), set()
    for file in root.rglob("*.py"):
        module = ".".join(("megatron.core", *file.relative_to(root).with_suffix("").parts))
        if not module.startswith("megatron.core.transport."):
            _collect(ast.parse(file.read_text()), f"{module}:", "", found)
    return found


def _collect(node: ast.AST, module: str, name: str, found: set[str]) -> None:
    if isinstance(node, ast.ClassDef | ast.FunctionDef) and "()" not in name:
        is_class = isinstance(node, ast.ClassDef)
        name = f"{name}{node.name}{'.' if is_class else '()'}"
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "collectives":
        found.add(module + name.removesuffix("()"))
    for child in ast.iter_child_nodes(node):
        _collect(child, module, name, found)
