"""What the documentation says can be done: commands are parsed as the command line does, links and files are there.

Nothing is run. A command that is cut short in the text (with `..` or a placeholder in brackets) is not parsed; there
are few of these, and they are counted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draftline
import draftline.audit.whole  # registers every check
from draftline.audit.report import CHECKS
from draftline.config import RunConfig, load_run_config
from scripts.docs_reference import commands_page, parsed_commands, settings_page, with_codes, with_docstrings
from tests.test_messages import options, settings

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = ("status.md",)
"""Says what was run then, with the words of then."""

_BLOCK = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(draftline [^`\n]+)`")
_CODE = re.compile(r"\b(?:TGT|DRF|DAT|LOS|RUN|ROW|OPT|EVL|PRF|EXP)\d{3}\b")
_FILE = re.compile(r"\b(?:docs|scripts|benchmarks|examples|tests)/[\w./-]+\.(?:py|sh|md|json)\b")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def commands() -> Iterator[tuple[str, str]]:
    """Page and text of every command line of ours that stands in a block; continued lines are joined."""
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith(("draftline ", ".venv/bin/draftline ")):
                    yield page.name, line.strip()


def mentions() -> Iterator[tuple[str, str]]:
    """Page and text of every command inside of a sentence, which need not be whole."""
    for page in PAGES:
        if page.name not in HISTORY:
            outside = _BLOCK.sub("", page.read_text(encoding="utf-8"))
            yield from ((page.name, span) for span in _SPAN.findall(outside))


def is_cut(line: str) -> bool:
    """Whether a command is not one that can be typed."""
    return bool(re.search(r"\.\.(?!/)|\[[A-Za-z ]|COMMAND|^draftline \w+$| FILE\b", line.partition("  #")[0]))


def words_of(line: str) -> list[str]:
    """The words of a command line, without its comment, variables of a loop filled in."""
    return shlex.split(re.sub(r"\$\w+", "12", line), comments=True)[1:]


@pytest.fixture(scope="module")
def parsers() -> dict[str, Any]:
    return parsed_commands()


def test_commands_are_understood_by_the_command_line(
    parsers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what is to be written must not be there yet
    found = [(page, line) for page, line in commands() if not is_cut(line)]
    assert len(found) > 90
    wrong = [f"{page}: {line}: {fault}" for page, line in found if (fault := misunderstood(words_of(line), parsers))]
    assert wrong == []


def misunderstood(words: list[str], parsers: dict[str, Any]) -> str:
    """Why a command line is not one, empty if it is; settings among its words are read, too."""
    name, *rest = words
    if name not in parsers:
        return f"there is no command {name}"
    try:
        given = parsers[name].make_context(name, list(rest), resilient_parsing="--help" in rest).params
    except Exception as error:  # whatever a parser raises is what a user would see
        return " ".join(str(error).split()) or type(error).__name__
    changes = [word for key in ("settings", "words") for word in given.get(key) or () if "." in word.partition("=")[0]]
    if name in ("train", "plan", "audit"):
        try:
            load_run_config(None, [word for word in changes if "=" in word], RunConfig())
        except draftline.DraftlineError as error:
            return str(error) if "does nothing for" not in str(error) else ""  # a recipe comes before the words
    return ""


def test_options_of_commands_inside_of_sentences_exist(parsers: dict[str, Any]) -> None:
    wrong = []
    for page, span in mentions():
        name, *rest = words_of(span)
        known = {"--debug", "--help"}
        for parameter in parsers[name].params if name in parsers else ():
            known |= {*parameter.opts, *parameter.secondary_opts}
        asked = {word for word in rest if word.startswith("--")}
        if name != "COMMAND" and (name not in parsers or asked - known):
            wrong.append(f"{page}: {span}")
    assert wrong == []


def test_commands_that_cannot_be_typed_are_few() -> None:
    cut = [line for page, line in commands() if is_cut(line)]
    assert len(cut) < 6, cut


def test_a_wrong_command_is_seen(parsers: dict[str, Any]) -> None:
    for line in ("draftline trian --out x", "draftline train --output x", "draftline train --out x train.num_anchor=3"):
        assert misunderstood(words_of(line), parsers) != ""
    assert misunderstood(words_of("draftline train --target T --data D --out x train.num_anchors=3"), parsers) == ""


def test_codes_and_files_that_the_pages_name_exist() -> None:
    from draftline.audit.report import UNUSABLE

    codes, files = set(), set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        codes |= {(page.name, code) for code in _CODE.findall(text) if code not in {*CHECKS, UNUSABLE[0]}}
        files |= {(page.name, file) for file in _FILE.findall(text) if not (ROOT / file).exists()}
    assert codes == set()
    assert files == set()


def test_links_lead_somewhere() -> None:
    made = {ROOT / "docs/reference/settings.md", ROOT / "docs/reference/commands.md"}
    dead = {
        (page.name, link)
        for page in PAGES
        for link in _LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in link and not (page.parent / link).exists() and (page.parent / link).resolve() not in made
    }
    assert dead == set()


def test_the_site_has_every_page() -> None:
    listed = set(re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES[2:]}
    assert listed == there | {"reference/settings.md", "reference/commands.md"}


def test_the_reference_has_every_setting_option_name_and_code() -> None:
    said = dict(re.findall(r"^\| `(\w+\.\w+)` \|.*\| (.*) \|$", settings_page(), flags=re.MULTILINE))
    assert said.keys() == settings()
    unexplained = {key for key, meaning in said.items() if not meaning}
    assert unexplained == {
        "drafter.num_attention_heads", "drafter.num_key_value_heads", "drafter.head_dim", "optim.beta1", "optim.beta2"
    }  # fmt: skip
    page = commands_page()
    assert {option for option in options() - {"--help", "--debug"} if option not in page} == set()
    api = with_docstrings((ROOT / "docs/reference/api.md").read_text(encoding="utf-8"))
    blocks = re.findall(r"^### `(\w+)`\n\n```python\n(.+?)```\n\n```text\n(.+?)```", api, re.MULTILINE | re.DOTALL)
    assert [name for name, _, text in blocks if text.strip()] == draftline.__all__
    codes = with_codes((ROOT / "docs/reference/audit.md").read_text(encoding="utf-8"))
    assert {code for code in CHECKS if f"[{code}](#{code.lower()})" not in codes} == set()
