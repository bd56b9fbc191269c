"""The case that Draftline starts from: two faults in the code and one in the settings give exactly three findings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from draftline.audit import AuditReport, run_audit
from draftline.audit.subject import AuditSubject
from draftline.records import HiddenStates
from draftline.targets import loop as loop_module
from draftline.targets.capture import HookCapture
from tests.zoo.fault import layer_part, on_model
from tests.zoo.pipeline import Recipe, World, qwen3

FIVE = Recipe(
    target=qwen3(num_hidden_layers=8),
    settings={
        "drafter": {"num_captured_layers": 5, "target_layer_ids": (0, 1, 2, 4, 6)},
        "loss": {"decay_gamma": 7.0},
        "pipeline": {"send": "last_hidden"},
    },
)
CODES = {"DRF001": "error", "TGT002": "error", "LOS003": "warning"}


def version_5(patch: pytest.MonkeyPatch) -> AuditSubject:
    """One captured layer is split off for the training targets, and fc reads the other four."""
    world = World.of(FIVE, patch, Path())
    on_model(world, lambda model: setattr(model, "fc", nn.Linear(4 * 32, 32, bias=False)))
    clean = HookCapture.get_hidden_states_packed

    def split(capture: HookCapture, mask: Tensor) -> HiddenStates:
        states = clean(capture, mask).hidden_states_packed
        return HiddenStates(states[..., : 4 * 32], layer_part(states, 4))

    patch.setattr(HookCapture, "get_hidden_states_packed", split)
    patch.setattr(loop_module, "check_features", lambda _captured, _ids: None)  # which would refuse four for five
    return world.subject()


def test_version_5_gives_two_errors_and_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_audit(version_5(monkeypatch))
    assert {finding.code: finding.severity for finding in report.findings} == CODES
    assert report.exit_status == 1
    evidence = {finding.code: finding.evidence for finding in report.findings}
    assert "layer 6 of [0, 1, 2, 4, 6]" in evidence["DRF001"]
    assert "layer 6 of 7" in evidence["TGT002"]
    assert "gamma 7 with blocks of 8" in evidence["LOS003"]


def test_allowed_findings_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run_audit(version_5(monkeypatch), select=("DRF001", "TGT002", "LOS003"))
    assert [finding.code for finding in report.errors(allow=("TGT002",))] == ["DRF001"]
    assert report.errors(allow=tuple(CODES)) == []


def test_masked_columns_are_found_as_well_as_a_narrow_fc(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World.of(FIVE, monkeypatch, Path())
    mask = torch.ones(5 * 32)
    mask[4 * 32 :] = 0.0
    on_model(world, lambda model: model.fc.register_forward_pre_hook(lambda _module, args: (args[0] * mask,)))
    report = run_audit(world.subject(), select=("DRF001",))
    assert report.findings[0].evidence.startswith("layer 6 of [0, 1, 2, 4, 6] changes nothing: max |delta| 0.0")
    assert isinstance(report, AuditReport)
