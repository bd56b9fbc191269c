"""The run as a whole: what a life shows, what the run raises, and what only the comparison raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftline.audit import run_audit
from draftline.audit.comparison import Judge
from draftline.engine import inline
from draftline.records import PackedBatch
from draftline.train import step as step_module
from draftline.train.log import RunLog
from tests.zoo.pipeline import Recipe, subject


def codes(report: Any) -> list[str]:
    return [finding.code for finding in report.findings]


def test_a_clean_run_differs_in_nothing_and_says_what_was_reduced(tmp_path: Path) -> None:
    report = run_audit(subject(Recipe(), tmp_path), ["RUN"])
    assert report.findings == []
    assert {result.status for result in report.checks if result.code not in ("RUN012", "RUN013")} == {"ok"}
    assert report.notes[0].startswith("lived beside the reference run: 5 steps of 2 rows over ")


def test_what_the_run_raises_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def torn(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(RunLog, "write", torn)
    report = run_audit(subject(Recipe(), tmp_path), ["RUN"])
    assert codes(report) == ["RUN001"]
    assert "it raised OSError: no space" in report.findings[0].evidence
    assert {result.status for result in report.checks if "RUN001" < result.code < "RUN012"} == {"skipped"}


def test_what_only_the_comparison_raises_is_not_the_runs_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(*_: object) -> None:
        raise KeyError("an odd target")

    monkeypatch.setattr(Judge, "_update", lost)
    report = run_audit(subject(Recipe(), tmp_path), ["RUN"])
    assert report.findings == []
    assert report.not_examined == ["RUN001"]
    assert report.exit_status == 2


def test_a_difference_names_the_row_and_the_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean = inline.make_row

    def cut(*words: Any) -> PackedBatch:
        row = clean(*words)
        if row.sequence_number == 3:
            row.input_ids[0, 5] = 7 if row.input_ids[0, 5] != 7 else 8
        return row

    monkeypatch.setattr(inline, "make_row", cut)
    report = run_audit(subject(Recipe(), tmp_path), ["RUN"])
    assert codes(report) == ["RUN002", "RUN016"]
    assert report.findings[0].evidence.startswith("row 3: input_ids is ")
    assert " at position 5, by the recipe " in report.findings[0].evidence


def test_a_code_that_another_check_explains_is_left_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(step_module, "draw_anchors", lambda row, _budget, _seed: row.input_ids.new_tensor([9, 10]))
    report = run_audit(subject(Recipe(), tmp_path), ["DRF011", "RUN004"])
    assert codes(report) == ["DRF011"]
    assert report.checks[-1].reason == "DRF011 would show here again"
