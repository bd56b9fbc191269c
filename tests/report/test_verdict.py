"""What the audit found, from the run's folder or from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.errors import DataError
from draftline.report.verdict import read_verdict
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import AUDIT, write_run


def test_the_audit_before_the_run_is_found_and_a_given_one_goes_before_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    assert read_verdict(RunFolder.open(folder), None) is None
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.sentence == "1 errors, 1 warnings; 1 checks passed."
    assert verdict.areas == [
        ["target and captured states", "1", "1", "0", "0", "0.750"],
        ["labels and loss", "0", "1", "1", "0", "0"],
        ["exported drafter", "0", "0", "0", "1", "1"],
    ]
    assert verdict.open == [
        ["LOS004", "fault LOS004", "skipped", "there is no data yet"],
        ["EXP001", "fault EXP001", "could not run", "KeyError: x"],
    ]
    assert verdict.checks[:2] == [
        ["TGT001", "fault TGT001", "not found", "0.250"],
        ["TGT002", "fault TGT002", "found", "0.500"],
    ]
    (tmp_path / "later.json").write_text(json.dumps({"findings": [], "checks": []}))
    later = read_verdict(RunFolder.open(folder), tmp_path / "later.json")
    assert later is not None
    assert later.findings == []


def test_allowed_codes_come_from_all_sessions(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    (folder / "audit.json").write_text(json.dumps(AUDIT))
    identity = json.loads((folder / "run.json").read_text())
    identity["sessions"] = [{"allowed": ["TGT002"]}, {}]
    (folder / "run.json").write_text(json.dumps(identity))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.allowed == ["TGT002"]


def test_an_audit_of_an_earlier_version_is_shown_by_its_codes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    checks = [{"code": "TGT001", "status": "ok", "seconds": 1}, {"code": "TGT002", "status": "skipped", "seconds": 1}]
    (folder / "audit.json").write_text(json.dumps({"findings": [], "checks": checks}))
    verdict = read_verdict(RunFolder.open(folder), None)
    assert verdict is not None
    assert verdict.areas == [["TGT", "1", "0", "1", "0", "2"]]
    assert verdict.open == [["TGT002", "", "skipped", ""]]


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        "{",
        '{"findings": [{}], "checks": []}',
        '{"findings": [], "checks": [3]}',
        '{"findings": [], "checks": [{"code": "TGT001", "status": "ok", "seconds": null}]}',
    ],
)
def test_what_is_no_audit_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(
        DataError, match=r"a.json is not a result of an audit: give what `draftline audit --json` wrote"
    ):
        read_verdict(RunFolder.open(write_run(tmp_path / "run", lines=1)), tmp_path / "a.json")
