"""The gate before a run, and what the target says of given answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline import jobs
from draftline.audit.finding import Finding
from draftline.audit.report import AuditReport
from draftline.config import RunConfig, TargetConfig
from draftline.data.pipeline import PrepareOptions
from draftline.data.regenerate import GenerationSettings
from draftline.errors import AuditRefusal
from draftline.target.model import load_target


@pytest.fixture
def two_errors_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("TGT002", "error", "targets", "evidence", "mend"),
        Finding("DRF001", "error", "fc", "evidence", "mend"),
        Finding("LOS003", "warning", "gamma", "evidence", "mend"),
    ]
    monkeypatch.setattr(jobs, "audit_run_config", lambda *_: AuditReport(findings, []))


@pytest.mark.usefixtures("two_errors_and_a_warning")
def test_the_gate_stops_a_run_for_each_error_that_is_not_allowed() -> None:
    target = load_target(TargetConfig(name="tiny"))
    for allow, left in ([], "TGT002, DRF001"), (["TGT002"], "DRF001"), (["LOS003"], "TGT002, DRF001"):
        with pytest.raises(AuditRefusal, match=f"found {left}: ") as refusal:
            jobs.audit_gate(allow)(RunConfig(), target)
        assert refusal.value.exit_status == 1
    examination = jobs.audit_gate(["DRF001", "TGT002"])(RunConfig(), target)
    assert examination.allowed == ["TGT002", "DRF001"]
    assert [finding["code"] for finding in examination.report["findings"]] == ["TGT002", "DRF001", "LOS003"]


def test_given_answers_are_compared_with_the_targets_own_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "Say hello"}, {"role": "assistant", "content": "qzx vkj wpf"}]}
    (tmp_path / "given.jsonl").write_text(json.dumps(row) + "\n")
    target = load_target(TargetConfig(name="tiny"))
    settings = GenerationSettings(max_new_tokens=4)
    jobs.answer_and_prepare(target, [str(tmp_path / "given.jsonl")], tmp_path / "out", PrepareOptions(), settings)
    assert "regenerate" in capsys.readouterr().err
