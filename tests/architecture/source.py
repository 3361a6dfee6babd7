"""The source of the package as syntax trees, and which module imports which."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("megatron", "megatron_lattice")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file of `PACKAGES`."""

    name: str
    """With dots; that of a package without `__init__`."""
    path: str
    """From the root of the repository."""
    is_package: bool
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text, self.path)

    @property
    def num_lines(self) -> int:
        """How many lines the file has."""
        return self.text.count("\n")

    def functions(self) -> Iterator[tuple[Function, ast.ClassDef | None]]:
        """Yield every function with the class whose method it is."""
        owners: dict[ast.AST, ast.ClassDef] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                owners |= dict.fromkeys(node.body, node)
            if isinstance(node, Function):
                yield node, owners.get(node)

    def public_functions(self) -> Iterator[tuple[Function, ast.ClassDef | None]]:
        """Yield functions and methods that have no underscore in their path."""
        for node in self.tree.body:
            if isinstance(node, Function) and not node.name.startswith("_"):
                yield node, None
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for child in node.body:
                    is_public = isinstance(child, Function) and (
                        not child.name.startswith("_") or child.name == "__init__"
                    )
                    if is_public:
                        yield child, node


@cache
def modules() -> dict[str, Module]:
    """Return all modules of both packages by name."""
    found = {}
    for path in sorted(p for top in PACKAGES for p in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        found[name] = Module(name, str(path.relative_to(ROOT)), is_package, path.read_text())
    return found


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return, for each module, those of the package that it imports when it runs, also inside
    functions; what is below TYPE_CHECKING is left out."""
    return {name: frozenset(_imports_of(module)) for name, module in modules().items()}


def _imports_of(module: Module) -> Iterator[str]:
    ignored = {
        child
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    known = modules()
    for node in ast.walk(module.tree):
        if node in ignored:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in known else node.module
                if target in known and target != module.name:
                    yield target


def circles() -> list[list[str]]:
    """Return the groups of modules that import each other (strongly connected components of
    more than one; Tarjan, 1972)."""
    graph = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in graph[name]:
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            circle = [stack.pop()]
            while circle[-1] != name:
                circle.append(stack.pop())
            if len(circle) > 1:
                found.append(sorted(circle))

    for name in graph:
        if name not in index:
            visit(name)
    return found
