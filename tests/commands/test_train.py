"""What words become the settings of a run, and the gate before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import yaml

from draftline import cli
from draftline.audit.report import AuditReport, CheckResult, Finding
from draftline.commands.train import check_codes, examine
from draftline.config import RunConfig, find_recipe, load_run_config
from draftline.errors import AuditRefusal, ConfigError
from draftline.run import Examination, Run, RunResult
from draftline.train.ranks import ALONE, Ranks
from draftline.train.run_folder import RunFolder
from tests.commands.test_prepare import prepared
from tests.run.small_run import small_run

RUN = cast(Run, None)
"""Nothing looks at it: what the audit finds is given."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Settings with which `draftline train` starts a run, which ends at once."""
    seen: list[RunConfig] = []

    def open_run(config: RunConfig, out: Path, *, resume: bool, ranks: Ranks) -> Run:
        assert ranks is ALONE
        RunFolder(out).check_usable(config, resume)
        seen.append(config)
        return RUN

    def train(run: Run, out: Path, *, resume: bool, examination: Examination | None, ranks: Ranks) -> RunResult:
        assert run is RUN
        assert ranks is ALONE
        assert resume == (examination is None)
        return RunResult(out, 0, 0, 0.0, None, {})

    monkeypatch.setattr("draftline.run.open_run", open_run)
    monkeypatch.setattr("draftline.run.train", train)
    monkeypatch.setattr("draftline.commands.train.check_places", lambda _config: None)  # they are only named
    monkeypatch.setattr("draftline.commands.train.examine", lambda _run, _allow: Examination([], {}))
    return seen


def train(out: Path, *words: str) -> int:
    return cli.run(["train", "--out", str(out), *words])


def test_flags_that_are_not_given_leave_the_file_alone(tmp_path: Path, started: list[RunConfig]) -> None:
    target = {"name": "nö", "dtype": "bfloat16", "device": "cpu", "trust_remote_code": True}
    tree = {"target": target, "data": {"path": "somewhere"}, "train": {"device": "cpu"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    words = ("--config", str(tmp_path / "c.yaml"))
    assert train(tmp_path / "run", *words) == 0
    assert started[0] == load_run_config(tmp_path / "c.yaml", (), find_recipe("default"))
    assert train(tmp_path / "run", *words, "--target", "näher", "--target-dtype", "float32") == 0
    assert (started[1].target.name, started[1].target.dtype) == ("näher", "float32")
    assert started[1].target.trust_remote_code


def test_a_drafter_to_train_further_is_a_setting(tmp_path: Path, started: list[RunConfig]) -> None:
    assert train(tmp_path / "run", "--target", "tiny", "--init-from", "theirs") == 0
    assert started[0].drafter.init_from == Path("theirs")


def test_one_flag_places_both_halves_unless_a_setting_does(tmp_path: Path, started: list[RunConfig]) -> None:
    words = ("--target", "tiny", "--data", "d", "--device", "cpu")
    assert train(tmp_path / "run", *words) == train(tmp_path / "run", *words, "train.device=cuda:1") == 0
    assert [(c.target.device, c.train.device) for c in started] == [("cpu", "cpu"), ("cpu", "cuda:1")]


def test_a_run_must_be_told_its_target(
    tmp_path: Path, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--data", "d") == 2
    assert "give --target" in capsys.readouterr().err
    assert not started


def test_resume_starts_from_the_settings_of_the_run(
    tmp_path: Path, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["target.name=tiny", "data.path=d", "train.max_steps=7", "optim.learning_rate=0.5"]
    saved = load_run_config(None, words)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved.model_dump(mode="json")))
    assert train(tmp_path, "--resume") == 0
    assert train(tmp_path, "--resume", "--target", "moved", "train.save_every=3") == 0
    assert started[0] == saved
    assert (started[1].target.name, started[1].train.save_every, started[1].train.max_steps) == ("moved", 3, 7)
    assert train(tmp_path, "--resume", "train.max_steps=8") == 2
    assert "train.max_steps is 7" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = prepared(tmp_path)
    words = ["--target", "tiny", "--data", str(data), "--recipe", "quickstart", "train.max_steps=1"]
    assert train(tmp_path / "run", *words) == 0
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps({**meta, "tokenizer_hash": "other"}))
    assert train(tmp_path / "other", *words) == 2
    assert "another tokenizer or chat template" in capsys.readouterr().err


def audit_finds(monkeypatch: pytest.MonkeyPatch, report: AuditReport) -> None:
    monkeypatch.setattr("draftline.audit.subject.subject_of_run", lambda run: run)
    monkeypatch.setattr("draftline.audit.run_audit", lambda _subject, _select: report)


@pytest.fixture
def two_errors_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("TGT002", "error", "targets", "evidence", "fix"),
        Finding("DRF001", "error", "fc", "evidence", "fix"),
        Finding("LOS003", "warning", "gamma", "evidence", "fix"),
    ]
    audit_finds(monkeypatch, AuditReport(findings, []))


@pytest.mark.usefixtures("two_errors_and_a_warning")
def test_the_gate_stops_a_run_for_each_error_that_is_not_allowed() -> None:
    for allow, left in ([], "TGT002, DRF001"), (["TGT002"], "DRF001"), (["LOS003"], "TGT002, DRF001"):
        with pytest.raises(AuditRefusal, match=f"found {left}: ") as refusal:
            examine(RUN, allow)
        assert refusal.value.exit_status == 1
    examination = examine(RUN, ["DRF001", "TGT002"])
    assert examination.allowed == ["TGT002", "DRF001"]
    assert [finding["code"] for finding in examination.report["findings"]] == ["TGT002", "DRF001", "LOS003"]
    everything = examine(RUN, ["LOS003", "DRF001", "TGT002"])
    assert everything.allowed == ["TGT002", "DRF001", "LOS003"]  # the run says of itself that a warning was allowed


def test_a_check_that_could_not_run_stops_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [CheckResult("DRF011", "crashed", 0.1, "IndexError: of no use")]
    audit_finds(monkeypatch, AuditReport([], checks))
    with pytest.raises(AuditRefusal, match="found DRF011: "):
        examine(RUN, [])
    assert examine(RUN, ["DRF011"]).allowed == ["DRF011"]


def test_only_codes_of_checks_can_be_allowed() -> None:
    with pytest.raises(ConfigError, match="--allow DRF999: there is no such check"):
        check_codes(["DRF001", "DRF999"])


def test_a_finished_run_is_extended_and_nothing_else_is(
    tmp_path: Path, started: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    small_run(out, "train.epochs=1")
    assert train(out, "--extend", "2") == 0
    assert started[-1].train.extensions == (2,)
    assert started[-1].train.epochs == 1
    capsys.readouterr()
    for words, said in (
        ((str(tmp_path / "none"), "1"), "holds no run"),
        ((str(out), "0"), "--extend"),
        ((str(out), "1", "train.seed=7"), "train.seed is 0 in the run of"),
    ):
        assert train(Path(words[0]), "--extend", *words[1:]) == 2
        line = capsys.readouterr().err
        assert said in line
        assert line.count("\n") == 1
    (out / "checkpoints" / "step-000006").rename(out / "checkpoints" / "step-000004")
    assert train(out, "--extend", "1") == 2
    assert "has done 5 of 6 steps: finish it with --resume first" in capsys.readouterr().err
