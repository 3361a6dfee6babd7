"""Parameters that a function takes and never reads, and which of them are findings.

A method whose signature comes from a base class or a protocol of the package takes what all
implementations take: it is a finding only if none of them reads the parameter. A name that begins
with an underscore says that a callback's argument is not needed.
"""

import ast
from collections.abc import Callable, Iterator
from functools import cache

from tests.architecture.source import Function, modules


def arguments(function: Function) -> list[ast.arg]:
    """Return all parameters, also `*args` and `**kwargs`."""
    a = function.args
    extra = [x for x in (a.vararg, a.kwarg) if x is not None]
    return [*a.posonlyargs, *a.args, *a.kwonlyargs, *extra]


def docstring_of_method(owner: str, method: str) -> str:
    """Return what a class or protocol of the package says of a method."""
    return "".join(ast.get_docstring(found) or "" for found in _implementations(owner, method))


def unread() -> Iterator[tuple[str, str, str]]:
    """Yield (path and line, "module:function" or "module:Class.function", parameter)."""
    for module in modules().values():
        for function, owner in module.functions():
            if _is_declaration(function, owner) or function.name == "__exit__":
                continue
            where = f"{owner.name}." if owner else ""
            for name in sorted(_unread_of(function)):
                if not _is_read_elsewhere(function.name, name, owner):
                    place = f"{module.path}:{function.lineno}"
                    yield place, f"{module.name}:{where}{function.name}", name


def _unread_of(function: Function) -> set[str]:
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name)
    }
    names = {argument.arg for argument in arguments(function) if not argument.arg.startswith("_")}
    return names - read - {"self", "cls", "ctx"}


def _is_read_elsewhere(method: str, name: str, owner: ast.ClassDef | None) -> bool:
    """Return whether another implementation of the same method reads the parameter."""
    if owner is None or method == "__init__":
        return False
    declaring = {each for each in _ancestors(owner.name) if _takes(each, method, name)}
    users = {child for each in declaring | {owner.name} for child in _descendants_of(each)}
    for protocol in _protocols_with(owner):
        if _takes(protocol.name, method, name):
            users |= {
                n for n, nodes in _classes().items() if any(_fits(protocol, c) for c in nodes)
            }
    return any(
        _reads(child, name)
        for each in (users | declaring) - {owner.name}
        for child in _implementations(each, method)
    )


def _reads(function: Function, name: str) -> bool:
    takes = any(argument.arg == name for argument in arguments(function))
    return takes and name not in _unread_of(function) and not _is_empty(function)


def _implementations(name: str, method: str) -> Iterator[Function]:
    for node in _classes().get(name, ()):
        for child in node.body:
            if isinstance(child, Function) and child.name == method:
                yield child


def _takes(owner: str, method: str, name: str) -> bool:
    return any(a.arg == name for f in _implementations(owner, method) for a in arguments(f))


@cache
def _classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


def _bases(name: str) -> set[str]:
    return {
        ast.unparse(base).partition("[")[0].rpartition(".")[2]
        for node in _classes().get(name, ())
        for base in node.bases
    }


@cache
def _children() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name in _classes():
        for base in _bases(name):
            found.setdefault(base, set()).add(name)
    return found


def _closure(name: str, step: Callable[[str], set[str]]) -> set[str]:
    found, pending = set[str](), set(step(name))
    while pending:
        each = pending.pop()
        if each not in found:
            found.add(each)
            pending |= step(each)
    return found


def _ancestors(name: str) -> set[str]:
    return _closure(name, _bases)


def _descendants_of(name: str) -> set[str]:
    return _closure(name, lambda each: _children().get(each, set()))


def _members(node: ast.ClassDef) -> set[str]:
    fields = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    return fields | {child.name for child in node.body if isinstance(child, Function)}


def _is_protocol(node: ast.ClassDef) -> bool:
    return any("Protocol" in ast.unparse(base) for base in node.bases)


def _fits(protocol: ast.ClassDef, node: ast.ClassDef) -> bool:
    return not _is_protocol(node) and _members(protocol) <= _members(node)


def _protocols_with(owner: ast.ClassDef) -> list[ast.ClassDef]:
    """Return the protocols whose members a class has."""
    return [
        node
        for nodes in _classes().values()
        for node in nodes
        if _is_protocol(node) and _members(node) and _fits(node, owner)
    ]


def _is_declaration(function: Function, owner: ast.ClassDef | None) -> bool:
    """Return whether the body says nothing: a protocol, an overload, a hook without effect."""
    decorators = " ".join(ast.unparse(d) for d in function.decorator_list)
    if "abstractmethod" in decorators or "overload" in decorators:
        return True
    return (owner is not None and _is_protocol(owner)) or _is_empty(function)


def _is_empty(function: Function) -> bool:
    body = [s for s in function.body if not _is_docstring(s)]
    return not body or all(isinstance(s, ast.Pass | ast.Raise) for s in body)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
