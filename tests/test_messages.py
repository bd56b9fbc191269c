"""What a message tells the user to use exists: options, settings, codes of the audit, files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import typer

import draftline
import draftline.audit.whole  # registers every check
from draftline.audit.report import CHECKS
from draftline.cli import COMMANDS, command
from draftline.commands.options import from_words
from draftline.config import RunConfig

PACKAGE, ROOT = Path(draftline.__file__).parent, Path(__file__).parents[1]

OTHER_PROGRAMS = {
    "--attention-backend", "--dtype", "--generation-config", "--model-path", "--num-speculative-tokens", "--outfile",
    "--outtype", "--spec-draft-n-max", "--spec-draft-p-min", "--spec-type", "--speculative-algorithm",
    "--speculative-config", "--speculative-draft-model-path", "--speculative-num-draft-tokens", "--target-model-dir",
    "--metrics", "--no-deps", "--nproc-per-node", "--rdzv-endpoint", "--show-toplevel",
}  # fmt: skip
"""Options of servers, pip, git and torchrun that commands and messages print."""
STYLE_SHEET = ("--hue-", "--shade-")

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_CODE = re.compile(r"\b(?:TGT|DRF|DAT|LOS|RUN|ROW|OPT|EVL|PRF)\d{3}\b")
_FILE = re.compile(r"\b(?:docs|scripts|benchmarks|examples|tests)/[\w./-]+\.\w+")


def literals() -> Iterator[tuple[str, str]]:
    """File and text of every string of the package that is no docstring."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
                yield str(path.relative_to(PACKAGE)), node.value


def named(pattern: re.Pattern[str]) -> set[tuple[str, str]]:
    """File and word of everything that looks like this."""
    return {(name, word) for name, text in literals() for word in pattern.findall(text)}


def options() -> set[str]:
    """Every option of every command."""
    app = typer.Typer()
    app.callback()(lambda: None)
    for name in COMMANDS:
        app.command(name)(from_words(command(name)))
    words: set[str] = {"--help", "--debug"}
    for each in vars(typer.main.get_command(app))["commands"].values():
        words |= {word for parameter in each.params for word in [*parameter.opts, *parameter.secondary_opts]}
    return words


def settings() -> set[str]:
    """Every setting of a run, as `section.key`."""
    return {
        f"{section}.{key}"
        for section, field in RunConfig.model_fields.items()
        for key in getattr(field.annotation, "model_fields", ())
    }


def test_options_exist() -> None:
    known = options() | OTHER_PROGRAMS
    assert {"--regenerate", "--template-option", "--patience"} <= known
    unknown = {(name, word) for name, word in named(_OPTION) if not word.startswith(STYLE_SHEET)}
    assert {(name, word) for name, word in unknown if word not in known and word != "--no-"} == set()


def test_settings_exist() -> None:
    sections = "|".join(RunConfig.model_fields)
    known = settings()
    assert "train.num_anchors" in known
    words = named(re.compile(rf"(?<![\w./])((?:{sections})\.[a-z_]+)="))
    assert {(name, word) for name, word in words if word not in known} == set()


def test_codes_of_the_audit_exist() -> None:
    assert {(name, code) for name, code in named(_CODE) if code not in CHECKS} == set()


def test_files_exist() -> None:
    assert {(name, file) for name, file in named(_FILE) if not (ROOT / file).exists()} == set()
