"""The prepared data of a run, while it is still what the run was trained on."""

from __future__ import annotations

import json
from pathlib import Path

from draftline.report.data_summary import read_data_summary
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import write_run

REPORT = {
    "rows_in": 12,
    "rows_out": 10,
    "dropped": {"not_json": {"count": 2, "first_line": 3, "first_file": "a.jsonl"}},
    "flagged": {"answer_cut": {"count": 4, "first_line": 1, "first_file": "a.jsonl"}},
    "tokens": 5000,
    "supervised_tokens": 2500,
    "supervised_share": 0.5,
    "duplicate_share": 0.0,
    "thinking": {"without_reasoning": 10},
    "lengths": {"<= 1024": 1, "<= 256": 9},
}


def prepared(folder: Path, fingerprint: str) -> None:
    folder.mkdir()
    (folder / "report.json").write_text(json.dumps(REPORT))
    (folder / "meta.json").write_text(
        json.dumps({"fingerprint": fingerprint, "sources": ["a.jsonl"], "max_length": 3072})
    )


def test_counts_reasons_and_lengths_are_shown(tmp_path: Path) -> None:
    prepared(tmp_path / "data", "d1-train")
    data = read_data_summary(RunFolder.open(write_run(tmp_path / "run", lines=1)))
    figures = dict(data.figures)
    assert (figures["tokens"], figures["supervised share"], figures["conversations trained on"]) == (
        "5,000",
        "50.0%",
        "410",
    )
    assert figures["reasoning"] == "without reasoning 10"
    assert data.reasons == [
        ["not json", "dropped", "2", "a.jsonl line 3"],
        ["answer cut", "kept, flagged", "4", "a.jsonl line 1"],
    ]
    assert data.lengths is not None
    assert (list(data.lengths.categories), data.lengths.groups[0][2]) == (["<= 256", "<= 1024"], [9, 1])


def test_its_absence_and_other_data_in_its_place_are_said(tmp_path: Path) -> None:
    run = RunFolder.open(write_run(tmp_path / "run", lines=1))
    assert "is not here any more" in read_data_summary(run).absent
    prepared(tmp_path / "data", "d2-train")
    assert "holds other data now" in read_data_summary(run).absent
