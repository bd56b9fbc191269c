"""Selection, JSON, exit status, printing, and that an audit leaves no trace."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftline.audit import CHECKS, run_audit
from draftline.audit.report import AREAS, chosen_checks
from draftline.audit.subject import AuditSubject
from draftline.errors import ConfigError
from draftline.train import step as step_module
from tests.zoo.fault import shaped
from tests.zoo.pipeline import Recipe, World, subject

NO_DATA = Recipe(data="none")


def _with_eos_as_mask(patch: pytest.MonkeyPatch) -> AuditSubject:
    world = World.of(NO_DATA, patch, Path())
    shaped(world, mask_token_id=2)
    return world.subject()


def test_codes_and_areas_are_selected_and_ignored() -> None:
    assert [one.code for one in chosen_checks(["LOS003", "DAT"], ["DAT005"])] == [
        *(code for code in CHECKS if code.startswith("DAT") and code != "DAT005"),
        "LOS003",
    ]
    areas = [one.code[:3] for one in chosen_checks([], [])]
    assert list(dict.fromkeys(areas)) == list(AREAS)


def test_an_unknown_code_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"'TGT999' is not a check: known are the areas TGT"):
        chosen_checks(["TGT999"], [])


def test_every_check_needs_only_what_runs_before_it() -> None:
    order = [one.code for one in chosen_checks([], [])]
    for one in CHECKS.values():
        assert all(order.index(code) < order.index(one.code) for code in one.needs), one.code


def test_the_json_has_the_fixed_shape_and_the_status_follows_the_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    faulty = _with_eos_as_mask(monkeypatch)
    report = run_audit(faulty, select=["DRF009", "DRF012"])
    tree = report.to_json()
    assert list(tree) == ["findings", "checks"]
    assert [list(finding) for finding in tree["findings"]] == [["code", "severity", "title", "evidence", "fix"]]
    assert [(c["code"], c["status"]) for c in tree["checks"]] == [("DRF009", "found"), ("DRF012", "ok")]
    assert all(c["seconds"] >= 0 for c in tree["checks"])
    assert report.exit_status == 1
    assert run_audit(faulty, select=["DRF012"]).exit_status == 0


def test_code_that_raises_cannot_be_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("of no use")

    monkeypatch.setattr(step_module, "draw_anchors", broken)
    report = run_audit(subject(NO_DATA, Path()), select=["DRF011", "DRF012"])
    first = report.checks[0]
    assert (first.code, first.status, first.reason) == ("DRF011", "crashed", "IndexError: of no use")
    assert report.exit_status == 2


def test_the_report_is_readable_without_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_audit(_with_eos_as_mask(monkeypatch), select=["DRF009", "OPT009"])
    out = io.StringIO()
    report.render(Console(file=out, width=200, no_color=True))
    text = out.getvalue()
    assert "ERROR   DRF009  the mask token is a token that text can contain" in text
    assert "found: mask_token_id 2 is the eos token" in text
    assert "fix:   drafter.mask_token_id" in text
    assert "audit: 1 errors, 0 warnings; 1 checks passed" in text


def test_lines_are_whole_in_a_pipe_and_hang_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_audit(_with_eos_as_mask(monkeypatch), select=["DRF009", "OPT009", "DAT002"])
    piped, shown = io.StringIO(), io.StringIO()
    report.render(Console(file=piped, width=60))
    report.render(Console(file=shown, width=60, force_terminal=True, no_color=True))
    fix = report.findings[0].fix
    assert f"fix:   {fix}\n" in piped.getvalue()
    assert f"skipped DAT002: {report.checks[0].reason}\n" in piped.getvalue()
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.getvalue().splitlines()]
    findings = lines[: next(i for i, line in enumerate(lines) if line.startswith("note"))]
    assert len(findings) > 3
    assert all(len(line) <= 60 for line in findings)
    assert all(line.startswith("        ") for line in findings[2:])


def test_nothing_left_to_check_is_refused() -> None:
    with pytest.raises(ConfigError, match="no check is left: TGT001 without TGT"):
        chosen_checks(["TGT001"], ["TGT"])


def test_an_audit_leaves_the_run_as_it_was() -> None:
    audited = subject(NO_DATA, Path())
    before = {name: tensor.clone() for name, tensor in audited.draft_model.state_dict().items()}
    target_before = {name: tensor.clone() for name, tensor in audited.target.model.state_dict().items()}
    torch.manual_seed(4)
    wanted = torch.rand(3)
    torch.manual_seed(4)
    run_audit(audited, ignore=["EVL"])
    assert torch.equal(torch.rand(3), wanted)
    assert all(torch.equal(tensor, before[name]) for name, tensor in audited.draft_model.state_dict().items())
    assert all(torch.equal(t, target_before[name]) for name, t in audited.target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in audited.draft_model.parameters())
