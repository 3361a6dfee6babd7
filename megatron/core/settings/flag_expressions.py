"""Parse flag values that are small expressions: layer patterns and pairs of numbers."""

from __future__ import annotations

import ast


def layer_pattern(text: str) -> int | list[int]:
    """Read an int, or a list of ints built with `+` and `*`."""
    try:
        value = _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        raise ValueError("is not a number or a list expression such as ([0]*3+[1])*8") from None
    if isinstance(value, int) and not 1 <= value < 2**31:
        raise ValueError("is not every first, second, ... layer: a number from 1")
    return value


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluate ints, lists of ints, `list + list` and `list * int`; refuse everything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        items = [_evaluate(item) for item in node.elts]
        if all(isinstance(item, int) for item in items):
            return items  # type: ignore[return-value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult):
            if isinstance(left, int) and isinstance(right, list):
                left, right = right, left
            if isinstance(left, list) and isinstance(right, int) and len(left) * right <= 100_000:
                return left * right
    raise ValueError(ast.dump(node))


def expand_layer_pattern(pattern: int | list[int], num_layers: int) -> list[int]:
    """Return one 0/1 per layer: a list unchanged, an int N as 1 on every N-th layer."""
    if isinstance(pattern, list):
        return pattern
    return [int((layer + 1) % pattern == 0) for layer in range(num_layers)]


def int_pair(text: str) -> tuple[int, int]:
    """Read two ints, `4096,0`."""
    parts = text.strip("() ").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        raise ValueError("is not two numbers such as 4096,0") from None
    if not all(-1 <= part < 2**31 for part in (left, right)):
        raise ValueError("is not two numbers of tokens, or -1 for all")
    return left, right


def float_pair(text: str) -> tuple[float, float]:
    """Read two numbers, `0.001,inf`."""
    try:
        low, high = (float(part) for part in text.strip("() ").split(","))
    except ValueError:
        raise ValueError("is not two numbers such as 0.001,0.1") from None
    if not 0 <= low < high:
        raise ValueError("is not two numbers LOW,HIGH with 0 <= LOW < HIGH")
    return low, high
