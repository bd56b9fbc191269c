"""The page as a whole, from the command line: what is asked for is there, what is wrong is one line and no file;
its rows about settings, environment and data.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftline import cli
from draftline.report.document import configuration, duration, environment, read_data_summary, report_page, sessions
from draftline.train.run_folder import RunFolder
from tests.report.synthetic_run import AUDIT, evaluation, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run with an audit, and an evaluation beside it."""
    run = write_run(tmp_path / "run", lines=100)
    (run / "audit.json").write_text(json.dumps(AUDIT))
    (tmp_path / "evaluate.json").write_text(json.dumps(evaluation()))
    return run


def report(*words: str | Path) -> int:
    return cli.run(["report", *map(str, words)])


def test_the_page_lies_in_the_run_unless_it_is_told_where(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report(folder) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert report(folder, "--out", folder.parent / "new" / "page.html") == 0
    assert (folder.parent / "new" / "page.html").stat().st_size > 10_000


def test_every_part_of_the_run_is_on_the_page(folder: Path) -> None:
    assert report(folder, "--evaluation", folder.parent / "evaluate.json") == 0
    html = (folder / "report.html").read_text(encoding="utf-8").replace("<wbr>", "")
    ids = re.findall(r'<section id="([a-z]+)"', html)
    assert ids == re.findall(r'<a href="#([a-z]+)">', html.partition("</nav>")[0])
    assert len(ids) == 9
    for text in ("Finished", "TGT002", "use the last", "Question &lt;8&gt;?", "optim.clip_norm", "0123abcd"):
        assert text in html, text
    assert '<i class="s7">' in html
    assert "is not here any more" in html


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path: Path) -> None:
    assert report(write_run(tmp_path / "run", lines=3, total=9)) == 0
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "Still going on" in html
    assert "<code>draftline evaluate --json evaluate.json</code>" in html
    assert "<code>draftline audit RUN --target T --json audit.json</code>" in html
    assert "Nothing was evaluated on held-out data yet." in html


def test_a_run_without_metrics_and_identity_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lines=0, total=9)
    (run / "metrics.jsonl").unlink()
    (run / "run.json").unlink()
    assert report(run) == 0
    html = (run / "report.html").read_text(encoding="utf-8")
    assert "metrics.jsonl is missing or empty" in html
    assert "The run has no run.json" in html


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "train: {seed: 1}\n"),
        ("config.yaml", "data: {path: 5}\n"),
        ("run.json", '{"machine": {"devices": null}, "sessions": [{"command": null}, {"command": [1]}]}'),
    ],
)
def test_what_settings_leave_out_is_left_out(tmp_path: Path, name: str, text: str) -> None:
    run = write_run(tmp_path / "run", lines=2)
    (run / name).write_text(text)
    assert report(run) == 0


@pytest.mark.parametrize(
    ("name", "content"), [("report.json", []), ("meta.json", [3]), ("report.json", {"lengths": 1})]
)
def test_a_damaged_data_folder_is_said(tmp_path: Path, name: str, content: Any) -> None:
    run = write_run(tmp_path / "run", lines=2)
    (tmp_path / "data").mkdir()
    for file in ("report.json", "meta.json"):
        (tmp_path / "data" / file).write_text(json.dumps(content if file == name else {}))
    (run / "config.yaml").write_text(f"data: {{path: '{tmp_path / 'data'}'}}\n")
    assert report(run) == 0
    assert "is not here any more, damaged" in (run / "report.html").read_text()


def test_the_page_says_what_a_check_looks_for_and_which_drafter_was_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", lines=2)
    (run / "audit.json").write_text(json.dumps(AUDIT))
    (tmp_path / "e.json").write_text(json.dumps(evaluation()))
    html = report_page(run, [tmp_path / "e.json"])
    for words in ("target and captured states", "fault TGT001", "there is no data yet", "d4af" * 16):
        assert words in html
    assert "<wbr>step-000100" in html


def test_a_page_does_not_wait_for_torch() -> None:
    code = "import draftline.report.watch, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def refused(words: list[str | Path], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert report(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_bad_input_is_one_line_and_leaves_no_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    above, page = folder.parent, folder.parent / "page.html"
    (above / "other.json").write_text(json.dumps(evaluation(slots=3)))
    (above / "torn.json").write_text(json.dumps(evaluation())[:-50])
    assert "is not a run" in refused([above, "--out", page], capsys)
    assert "3 drafted tokens" in refused([folder, "--out", page, "--evaluation", above / "other.json"], capsys)
    assert "is not an evaluation" in refused([folder, "--out", page, "--evaluation", above / "torn.json"], capsys)
    assert "is not a result of an audit" in refused([folder, "--out", page, "--audit", above / "torn.json"], capsys)
    assert "cannot be written" in refused([folder, "--out", above], capsys)
    assert "cannot be written" in refused([folder, "--out", folder / "run.json" / "page.html"], capsys)
    assert "--watch" in refused([folder, "--out", page, "--watch"], capsys)
    assert "--port" in refused([folder, "--port", "8000"], capsys)
    assert not page.exists()
    assert not list(above.rglob(".unfinished-*"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.chmod(0o500)
    try:
        assert "report.html cannot be written" in refused([folder], capsys)
    finally:
        folder.chmod(0o700)


def test_settings_that_differ_from_the_published_recipe_are_shown_beside_it(tmp_path: Path) -> None:
    changed, settings = configuration(RunFolder.open(write_run(tmp_path / "run", lines=1)))
    assert ["optim.clip_norm", "0.5", "1.0"] in changed
    assert ["optim.clip_norm", "0.5"] in settings
    assert not {"optim.learning_rate", "target.name"} & {row[0] for row in changed}


def test_environment_names_code_versions_and_machine(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", lines=1)
    rows = dict(environment(RunFolder.open(folder)))
    assert rows["code"] == "0123abcd, with changes ffeeddccbbaa"
    assert rows["versions"] == "draftline 0.1.0\ntorch 2.13.0"
    assert sessions(RunFolder.open(folder)) == [["2026-01-01T00:00:00+00:00", "0", "? / ?", "draftline train"]]
    (folder / "run.json").write_text(json.dumps({}))
    assert environment(RunFolder.open(folder)) == []


def test_durations_have_two_units() -> None:
    assert [duration(s) for s in (0.5, 59.7, 61, 3600, 93784)] == [
        "0.5 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 h 0 min",
        "1 d 2 h",
    ]


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
