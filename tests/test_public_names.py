"""The public interface is short, importable, and the one that the docs describe."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import draftline

API_PAGE = Path(__file__).parents[1] / "docs" / "reference" / "api.md"


def test_every_public_name_can_be_imported() -> None:
    for name in draftline.__all__:
        assert getattr(draftline, name) is not None


def test_docs_describe_exactly_the_public_names() -> None:
    described = re.findall(r"^### `(\w+)", API_PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert described == draftline.__all__


def test_import_does_not_load_torch() -> None:
    code = "import draftline, draftline.cli, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
