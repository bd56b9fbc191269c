"""Rules of the house, read from the source: where settings have their defaults, and how large things may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftline
from draftline import config, options
from draftline.config import Settings

PACKAGE = Path(draftline.__file__).parent
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
TREES = {name: ast.parse(text) for name, text in SOURCES.items()}

SETTINGS = {"config.py", "options.py"}
"""Where settings are, and their defaults."""

TELLS_NOTHING = {0, 1, 2}
"""Defaults that say no more than none, one or a pair, whatever they are defaults of."""

OTHERS = {("draft/attention.py", "anchors_per_group", 8)}
"""Defaults that are the number of a setting by chance."""

LONGEST_FILE, LONGEST_FUNCTION, MOST_PARAMETERS = 600, 60, 8

Function = ast.FunctionDef | ast.AsyncFunctionDef


def numbers_of_settings() -> set[float]:
    """The numbers that are defaults of settings and tell which one."""
    found: set[float] = set()
    for module in (config, options):
        for record in vars(module).values():
            if isinstance(record, type) and issubclass(record, Settings):
                found |= {field.default for field in record.model_fields.values() if _is_number(field.default)}
    return found - TELLS_NOTHING


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def functions(tree: ast.Module) -> Iterator[Function]:
    """All functions and methods of a file."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def defaults(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Name and default of every parameter, and of every field of a class."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.Lambda):
            places = [*node.args.posonlyargs, *node.args.args]
            yield from zip((arg.arg for arg in places[::-1]), node.args.defaults[::-1], strict=False)
            for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                if default is not None:
                    yield arg.arg, default
        elif isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                    yield line.target.id, line.value


def written_number(default: ast.expr, tree: ast.Module) -> float | None:
    """The number that a default is written as: itself, in a call such as `Field(8)`, or as a constant of the file."""
    if isinstance(default, ast.Call) and default.args:
        default = default.args[0]
    if isinstance(default, ast.Name):
        named = {to.id: line.value for line in tree.body if isinstance(line, ast.Assign) for to in _names(line)}
        default = named.get(default.id, default)
    try:
        value = eval(compile(ast.Expression(default), "", "eval"), {"__builtins__": {}})
    except (NameError, TypeError, AttributeError):
        return None
    return value if _is_number(value) else None


def _names(line: ast.Assign) -> list[ast.Name]:
    return [to for to in line.targets if isinstance(to, ast.Name)]


def test_a_number_that_is_written_as_a_default_is_seen() -> None:
    tree = ast.parse(
        "N = 3072\nclass A:\n    a: int = 5\n    b: int = field(6)\ndef f(x, y=1 << 30, *, z: int = N, w=other): ..."
    )
    assert [(name, written_number(default, tree)) for name, default in defaults(tree)] == [
        ("a", 5),
        ("b", 6),
        ("y", 1 << 30),
        ("z", 3072),
        ("w", None),
    ]


def test_a_default_of_a_setting_is_written_once() -> None:
    numbers = numbers_of_settings()
    assert {3072, 8192, 1024, 256, 0.03} <= numbers
    second = {
        (name, parameter, number)
        for name, tree in TREES.items()
        for parameter, default in defaults(tree)
        if name not in SETTINGS and (number := written_number(default, tree)) in numbers
    }
    assert second == OTHERS


def test_no_record_of_settings_is_anywhere_else() -> None:
    """A record whose name says that it holds options or settings is in the two files for these."""
    found = {
        (name, node.name)
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Options", "Settings", "Command", "Flags"))
    }
    assert {name for name, _ in found} == SETTINGS


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_nothing_is_too_large(name: str) -> None:
    assert SOURCES[name].count("\n") <= LONGEST_FILE
    for function in functions(TREES[name]):
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        assert function.end_lineno is not None
        assert function.end_lineno - first < LONGEST_FUNCTION, function.name
        parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        assert len(parameters) <= MOST_PARAMETERS, function.name
