"""The gate before a run, and what the target says of given answers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from draftline import jobs
from draftline.audit.finding import CheckResult, Finding
from draftline.audit.report import AuditReport
from draftline.config import RunConfig, TargetConfig
from draftline.data.pipeline import PrepareOptions
from draftline.data.regenerate import GenerationSettings
from draftline.errors import AuditRefusal, ConfigError
from draftline.targets.model import load_target


@dataclass(frozen=True)
class Measured:
    """As much of a result as `evaluate_drafter` looks at."""

    drafter: str | None = None
    warnings: tuple[str, ...] = ()


def test_a_result_names_the_checkpoint_that_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "evaluate_prompts", lambda *_, **__: Measured())
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    (tmp_path / "run" / "best").symlink_to("checkpoints/step-000002")
    given: list[tuple[Path | None, str | None]] = [
        (Path("run"), "run/checkpoints/step-000002"),
        (Path("run/best"), "run/checkpoints/step-000002"),
        (tmp_path / "run", str(step)),
        (Path("exported"), "exported"),
        (None, None),
    ]
    for folder, expected in given:
        found: Any = jobs.evaluate_drafter(*cast(Any, (None, None, [], None, None)), folder)
        assert found.drafter == expected


@pytest.fixture
def two_errors_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = [
        Finding("TGT002", "error", "targets", "evidence", "fix"),
        Finding("DRF001", "error", "fc", "evidence", "fix"),
        Finding("LOS003", "warning", "gamma", "evidence", "fix"),
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
    everything = jobs.audit_gate(["LOS003", "DRF001", "TGT002"])(RunConfig(), target)
    assert everything.allowed == ["TGT002", "DRF001", "LOS003"]  # the run says of itself that a warning was allowed


def test_a_check_that_could_not_run_stops_a_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [CheckResult("DRF011", "crashed", 0.1, "IndexError: of no use")]
    monkeypatch.setattr(jobs, "audit_run_config", lambda *_: AuditReport([], checks))
    target = load_target(TargetConfig(name="tiny"))
    with pytest.raises(AuditRefusal, match="found DRF011: "):
        jobs.audit_gate([])(RunConfig(), target)
    assert jobs.audit_gate(["DRF011"])(RunConfig(), target).allowed == ["DRF011"]


def test_only_codes_of_checks_can_be_allowed() -> None:
    with pytest.raises(ConfigError, match="--allow DRF999: there is no such check"):
        jobs.audit_gate(["DRF001", "DRF999"])


def _audit_words(*words: str, flags: Sequence[str] = (), recipe: str | None = None) -> AuditReport:
    return jobs.audit_words(
        words, flags, recipe=recipe, config=None, sample_from_anchor=None, select=["LOS003"], ignore=[]
    )


def test_words_are_settings_of_a_run_to_come() -> None:
    report = _audit_words("loss.decay_gamma=7", flags=["target.name=tiny"], recipe="quickstart")
    assert [finding.code for finding in report.findings] == ["LOS003"]


@pytest.mark.parametrize(
    ("words", "flags", "said"),
    [
        (["{folder}", "loss.decay_gamma=7"], [], "leave out loss.decay_gamma=7, or the folder"),
        (["{folder}", "other"], [], "leave out other"),
        (["{folder}"], ["data.path=d"], "leave out data.path=d"),
        (["{folder}"], [], "does not say where its target is: give --target"),
        (["loss.decay_gamma=7"], [], "nothing says what to train for"),
    ],
)
def test_words_that_do_not_belong_together_are_refused(
    tmp_path: Path, words: list[str], flags: list[str], said: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=re.escape(said)):
        _audit_words(*(word.format(folder=tmp_path) for word in words), flags=flags)


def test_a_run_is_audited_on_its_own_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(jobs, "audit_run_folder", lambda _place, target, *_: asked.append(target))
    (tmp_path / "state.json").write_text("{}")
    _audit_words(str(tmp_path))
    assert asked == [None]


def test_given_answers_are_compared_with_the_targets_own_before_it_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [{"role": "user", "content": "Say hello"}, {"role": "assistant", "content": "qzx vkj wpf"}]}
    (tmp_path / "given.jsonl").write_text(json.dumps(row) + "\n")
    target = load_target(TargetConfig(name="tiny"))
    settings = GenerationSettings(max_new_tokens=4)
    jobs.answer_and_prepare(target, [str(tmp_path / "given.jsonl")], tmp_path / "out", PrepareOptions(), settings)
    assert "regenerate" in capsys.readouterr().err
