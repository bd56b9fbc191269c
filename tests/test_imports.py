"""Who may import whom, read from the source without running it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import draftline

PACKAGE = Path(draftline.__file__).parent
BASE = {"records", "config", "options", "errors", "storage", "progress"}
"""Modules that anyone may import, and that import nothing but each other."""

ALLOWED = {
    **dict.fromkeys(BASE, BASE),
    "data": BASE | {"draft"},
    "targets": BASE | {"data"},
    "transfer": BASE | {"data", "targets"},
    "draft": BASE,
    "train": BASE | {"data", "draft", "transfer"},
    "evaluate": BASE | {"data", "targets", "draft"},
    "formats": BASE | {"data", "targets", "draft", "train", "evaluate"},
    "page": BASE,
    "report": BASE | {"page", "data", "train", "evaluate"},
}
"""Area -> areas it may import besides itself. Areas that are not listed may read anything, but see below."""

MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}


def imports_of(module: str, *, at_load: bool) -> set[str]:
    """Modules of this package that a module imports: when it is loaded, or anywhere in it."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    nodes = _nodes_run_at_load(tree) if at_load else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys() or {node.module}
    return {name for name in found if name in MODULES and name != module}


def _nodes_run_at_load(tree: ast.Module) -> list[ast.AST]:
    """All nodes outside of functions and of `if TYPE_CHECKING`."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        found.append(node)
        waiting += list(ast.iter_child_nodes(node))
    return found


def area(module: str) -> str:
    """First name below the package."""
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_only_what_its_area_may(module: str) -> None:
    here = area(module)
    imported = {area(name) for name in imports_of(module, at_load=False)} - {here, ""}
    if here in ALLOWED:
        assert imported <= ALLOWED[here]
    if here not in {"commands", "audit"}:
        assert "audit" not in imported
    if here not in {"cli", "__main__", ""}:
        assert "cli" not in imported


def test_only_run_and_engine_know_both_loops() -> None:
    both = {"draftline.targets.loop", "draftline.train.loop"}
    knowing = {area(module) for module in MODULES if both <= imports_of(module, at_load=False)}
    assert knowing <= {"run", "engine"}


def _reached(module: str) -> set[str]:
    """All that a module imports, and what that imports."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports_of(waiting.pop(), at_load=False) - found
        found |= new
        waiting += new
    return found


ORACLES = sorted(name for name in MODULES if name.startswith(("draftline.audit.oracle", "draftline.audit.drafter_ref")))


@pytest.mark.parametrize("module", ["draftline.formats.programs", *ORACLES])
def test_what_exports_are_held_against_does_not_know_what_writes_them(module: str) -> None:
    """An oracle that shared code with the writers would share their faults."""
    assert ORACLES
    writers = {f"draftline.formats.{name}" for name in ("write", "check", "files", "exporting", "card", "dialects")}
    assert writers <= MODULES.keys()
    assert not _reached(module) & writers


def test_there_is_no_import_cycle() -> None:
    graph = {module: imports_of(module, at_load=True) for module in MODULES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_file_has_a_name_that_says_nothing() -> None:
    empty_names = {"utils", "util", "common", "core", "base", "manager", "helpers", "misc"}
    assert not {module for module in MODULES if module.split(".")[-1] in empty_names}
