"""Every code that lcplan can print, with its message, read from the source: what stands in a message's holes is named.

An error is ``SomeError("code", message)``; a few helpers take a code as their first argument as well. A warning is
``warn("code", message, fix)`` or ``PlanWarning(code=..., message=..., fix=...)``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "lcplan"
ERRORS = {
    "InputError": "value",
    "ModelError": "model",
    "PlanError": "plan",
    "DataError": "data",
    "EnvironmentProblem": "machine",
}
HELPERS = {"refuse": "plan", "error": "model", "_wrong": "model", "_red": "machine", "_yellow": "machine"}
WARNINGS = ("warn", "PlanWarning")
INTERNAL = "internal"
CODE = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)+")


class Message(NamedTuple):
    """One message: the code it is printed with, what it is about, and its text."""

    code: str
    about: str
    text: str


def every_message() -> list[Message]:
    """All messages, by code, each text once."""
    found = {message for file in sorted(PACKAGE.rglob("*.py")) for message in _messages(file)}
    return sorted(found)


def _messages(file: Path) -> Iterator[Message]:
    if file.parent.name == "templates":
        return  # the job's own scripts do not know lcplan's errors
    tree = ast.parse(file.read_text("utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for function in functions:
        for node in ast.walk(function):
            if isinstance(node, ast.Call):
                yield from _message(node, function)


def _message(call: ast.Call, function: ast.FunctionDef) -> Iterator[Message]:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    parts = list(call.args)
    if name in WARNINGS:
        about = "warning"
        parts += [keyword.value for keyword in call.keywords]
    elif name in ERRORS or name in HELPERS:
        about = (ERRORS | HELPERS)[name]
    else:
        return
    if not parts:
        return
    text = " ".join(_text(part, function) for part in parts[1:])
    if name == "_wrong":
        key, rule = (_text(part, function) for part in parts[1:])
        text = f"{key} is <value>. It must be {rule}: correct config.json."
    for code in _codes(parts[0]):
        yield Message(code, about, text)


def _codes(node: ast.expr) -> Iterator[str]:
    """The codes that an expression can be; nothing where it is a helper's own argument."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from _codes(node.body)
        yield from _codes(node.orelse)
    elif isinstance(node, ast.JoinedStr) and isinstance(node.values[-1], ast.Constant):
        # f"{name[:2]}-backend": one of two parallelisms
        yield from (f"{kind}{node.values[-1].value}" for kind in ("cp", "sp"))


def _text(node: ast.expr, function: ast.FunctionDef) -> str:
    """A message with the names of what is put into it in angle brackets."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, function) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, function) + _text(node.right, function)
    if isinstance(node, ast.Name):
        assigned = [
            each.value
            for each in ast.walk(function)
            if isinstance(each, ast.Assign) and each.lineno < node.lineno
            if any(isinstance(target, ast.Name) and target.id == node.id for target in each.targets)
        ]
        last = max(assigned, key=lambda value: value.lineno, default=None)
        if isinstance(last, ast.Constant | ast.JoinedStr):
            return _text(last, function)
    return f"<{_hole(node)}>"


def _hole(node: ast.expr) -> str:
    """What one would call a value: the last name in its expression."""
    if isinstance(node, ast.FormattedValue):
        return _hole(node.value)
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Subscript):
        key = node.slice
        return _hole(key if isinstance(key, ast.Constant) and isinstance(key.value, str) else node.value)
    if isinstance(node, ast.Call):
        if node.args:
            return _hole(node.args[0])
        return _hole(node.func)
    if isinstance(node, ast.BinOp):
        return _hole(node.left)
    if isinstance(node, ast.BoolOp):
        return _hole(node.values[0])
    if isinstance(node, ast.IfExp):
        return _hole(node.body)
    return "..."
