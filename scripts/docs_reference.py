"""MkDocs hook: the pages of the reference that are made from the source, so that nothing is written twice.

    reference/settings.md   every field of `draftline/config.py`, and every recipe as what differs from the defaults
    reference/commands.md   every option of every command, from `draftline/options.py`
    reference/api.md        as it is in `docs/`, with the signature and docstring of each public name behind it
    reference/audit.md      as it is, with a table of all codes before it

`make docs` runs it; `tests/test_docs.py` reads the same pages.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import typer
from pydantic_core import PydanticUndefined

import draftline
from draftline.cli import COMMANDS, command
from draftline.commands.options import from_words
from draftline.config import RECIPES, RunConfig, flatten

SETTINGS, OPTIONS = "reference/settings.md", "reference/commands.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in `docs/`."""
    from mkdocs.structure.files import File

    for place, content in ((SETTINGS, settings_page()), (OPTIONS, commands_page())):
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001  # as MkDocs calls it
    """Put what is generated into pages that are in `docs/`."""
    if page.file.src_uri == "reference/api.md":
        return with_docstrings(markdown)
    if page.file.src_uri == "reference/audit.md":
        return with_codes(markdown)
    return markdown


def settings_page() -> str:
    """Every setting of a run with its type, default and meaning, section by section."""
    lines = [
        "# Settings of a run",
        "",
        "Made from `draftline/config.py`. A setting is a word, `section.key=value`, whose value is YAML; or a line of",
        "the file that `--config` reads. An unknown one is an error that names the nearest known one.",
        "",
    ]
    for section, field in RunConfig.model_fields.items():
        record: Any = field.annotation
        lines += [f"## {section}", "", inspect.getdoc(record) or "", ""]
        lines += ["| setting | kind | default | meaning |", "|---|---|---|---|"]
        for name, one in record.model_fields.items():
            kind = get_type_hints(record)[name]
            lines.append(_row(f"`{section}.{name}`", _kind(kind), f"`{_plain(one.default)}`", one.description or ""))
        lines.append("")
    lines += ["## Recipes", "", "What differs from the defaults.", ""]
    usual = flatten(RunConfig().model_dump(mode="json"))
    for name, recipe in RECIPES.items():
        changed = {k: v for k, v in flatten(recipe().model_dump(mode="json")).items() if usual[k] != v}
        words = ", ".join(f"`{key}={value}`" for key, value in changed.items()) or "nothing"
        lines += [f"**{name}**: {' '.join((inspect.getdoc(recipe) or '').split())} Differs in: {words}.", ""]
    return "\n".join(lines)


def commands_page() -> str:
    """Every option of every command."""
    lines = ["# Commands", "", "Made from `draftline/options.py`; `draftline COMMAND --help` says the same.", ""]
    for name, parsed in parsed_commands().items():
        context = parsed.make_context(name, [], resilient_parsing=True)
        records = [parameter.get_help_record(context) for parameter in parsed.get_params(context)]
        lines += [f"## {name}", "", " ".join((parsed.help or "").split()), "", "| option | meaning |", "|---|---|"]
        lines += [_row(f"`{option.strip()}`", said) for option, said in filter(None, records) if "--help" not in option]
        lines.append("")
    return "\n".join(lines)


def parsed_commands() -> dict[str, Any]:
    """The parser of each command, as the command line builds it."""
    app = typer.Typer()
    app.callback()(lambda: None)
    for name in COMMANDS:
        app.command(name)(from_words(command(name)))
    found: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
    return found


def with_docstrings(markdown: str) -> str:
    """The page of the Python interface, with what the source says of each name in its section."""

    def said(match: re.Match[str]) -> str:
        return f"{match[0]}\n\n{''.join(_described(match[1]))}"

    return re.sub(r"^### `(\w+)`$", said, markdown, flags=re.MULTILINE)


def _described(name: str) -> Iterator[str]:
    item = getattr(draftline, name)
    text = inspect.getdoc(item) or ""
    try:
        signature = f"{name}{inspect.signature(item)}" if inspect.isfunction(item) else f"class {name}"
    except (TypeError, ValueError):
        signature = name
    yield f"```python\n{signature}\n```\n\n"
    yield f"```text\n{text}\n```\n"


def with_codes(markdown: str) -> str:
    """The page of the audit, with one table of all its codes behind the first paragraph."""
    import draftline.audit.whole  # noqa: F401  # registers every check
    from draftline.audit.report import AREAS, CHECKS

    rows = [_row(f"[{code}](#{code.lower()})", AREAS[code[:3]], check.title) for code, check in CHECKS.items()]
    table = "\n".join(["## All codes", "", "| code | area | finding |", "|---|---|---|", *rows])
    first = "\n## Target and captured states"
    return markdown.replace(first, f"\n{table}\n{first}", 1)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _kind(kind: Any) -> str:
    text = str(kind) if not isinstance(kind, type) else kind.__name__
    for part in ("typing.", "pathlib.", "draftline.config."):
        text = text.replace(part, "")
    return text.replace("Literal", "one of ").replace(" | None", "")


def _plain(value: Any) -> str:
    if value is PydanticUndefined:
        return "..."
    return "none" if value is None else str(value)
