"""Every code has a section in the reference, with the words that the audit uses."""

from __future__ import annotations

import re
from pathlib import Path

from draftline.audit import CHECKS
from draftline.audit.report import UNUSABLE

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "audit.md"


def test_the_page_has_a_section_for_each_code_and_no_other() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    sections = dict(re.findall(r"### ([A-Z]{3}\d{3}) \*\*(.+?)\.\*\*", text))
    titles = {code: check.title for code, check in CHECKS.items()}
    assert sections == {**titles, UNUSABLE[0]: UNUSABLE[1]}
