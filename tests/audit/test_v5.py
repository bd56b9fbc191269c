"""The case that Draftline starts from: two faults in the code and one in the settings give exactly three findings."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from draftline.audit import AuditReport, run_audit
from draftline.audit.subject import AuditSubject
from tests.zoo.fault import capturing, layer_part, with_states
from tests.zoo.pipeline import Recipe, qwen3, subject

FIVE = Recipe(
    target=qwen3(num_hidden_layers=8),
    settings={
        "drafter": {"num_captured_layers": 5, "target_layer_ids": (0, 1, 2, 4, 6)},
        "loss": {"decay_gamma": 7.0},
        "pipeline": {"send": "last_hidden"},
    },
)
CODES = {"DRF001": "error", "TGT002": "error", "LOS003": "warning"}


def version_5() -> AuditSubject:
    """One captured layer is split off for the training targets, and fc reads the other four."""
    faulty = subject(FIVE)
    faulty.draft_model.fc = nn.Linear(4 * 32, 32, bias=False)
    return capturing(
        faulty,
        lambda item: replace(
            with_states(item, item.hidden_states_SLD[:, : 4 * 32]),
            verifier_last_hidden_SD=layer_part(item.hidden_states_SLD, 4),
        ),
    )


def test_version_5_gives_two_errors_and_a_warning() -> None:
    report = run_audit(version_5())
    assert {finding.code: finding.severity for finding in report.findings} == CODES
    assert report.exit_status == 1
    evidence = {finding.code: finding.evidence for finding in report.findings}
    assert "layer 6 of [0, 1, 2, 4, 6]" in evidence["DRF001"]
    assert "layer 6 of 7" in evidence["TGT002"]
    assert "gamma 7 with blocks of 8" in evidence["LOS003"]


def test_allowed_findings_are_no_errors() -> None:
    report = run_audit(version_5(), select=("DRF001", "TGT002", "LOS003"))
    assert [finding.code for finding in report.errors(allow=("TGT002",))] == ["DRF001"]
    assert report.errors(allow=tuple(CODES)) == []


def test_masked_columns_are_found_as_well_as_a_narrow_fc() -> None:
    faulty = subject(FIVE)
    mask = torch.ones(5 * 32)
    mask[4 * 32 :] = 0.0
    faulty.draft_model.fc.register_forward_pre_hook(lambda _module, args: (args[0] * mask,))
    report = run_audit(faulty, select=("DRF001",))
    assert report.findings[0].evidence.startswith("layer 6 of [0, 1, 2, 4, 6] changes nothing: max |delta| 0.0")
    assert isinstance(report, AuditReport)
