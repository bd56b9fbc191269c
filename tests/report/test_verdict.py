"""What the audit found, from the run's folder or from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.errors import DataError
from draftline.report.run_folder import read_run
from draftline.report.verdict import read_verdict
from tests.report.synthetic_run import AUDIT, write_run


def test_the_audit_before_the_run_is_found_and_a_given_one_goes_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    assert read_verdict(read_run(folder), None) is None
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    verdict = read_verdict(read_run(folder), None)
    assert verdict is not None
    assert verdict.sentence == "1 errors, 1 warnings; 1 checks passed."
    assert verdict.areas == [
        ["TGT", "1", "TGT002", "–", "–", "0.750"],
        ["LOS", "0", "LOS003", "LOS004", "–", "0"],
        ["EXP", "0", "–", "–", "EXP001", "1"],
    ]
    (tmp_path / "later.json").write_text(json.dumps({"findings": [], "checks": []}))
    later = read_verdict(read_run(folder), tmp_path / "later.json")
    assert later is not None
    assert later.findings == []


def test_allowed_codes_come_from_all_sessions(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    identity = json.loads((folder / "run.json").read_text())
    identity["sessions"] = [{"allowed": ["TGT002"]}, {}]
    (folder / "run.json").write_text(json.dumps(identity))
    verdict = read_verdict(read_run(folder), None)
    assert verdict is not None
    assert verdict.allowed == ["TGT002"]


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"findings": [{}], "checks": []}'])
def test_what_is_no_audit_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a.json is no result of an audit: give what `draftline audit --json` wrote"):
        read_verdict(read_run(write_run(tmp_path / "run", lines=1)), tmp_path / "a.json")
