"""Runs that were trained by faulty code, audited by the code that is here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftline.audit import AuditReport, run_audit
from draftline.audit.subject import subject_of_run
from draftline.config import load_run_config
from draftline.draft.attention import BlockLayout
from draftline.draft.model import DFlashAttention, DFlashDraftModel, Rotation
from draftline.run import assemble
from draftline.train import step as step_module
from draftline.train.checkpoint import load_draft_model
from tests.engine.tiny_target import tiny_target
from tests.run.small_run import SETTINGS, small_data, small_run

WORDS = ("train.epochs=8", "optim.learning_rate=0.03")
"""Long enough that the drafter depends on what it is given."""


def audited(out: Path) -> AuditReport:
    config = load_run_config(None, [*SETTINGS, *WORDS])
    run = assemble(config, tiny_target(), small_data(words=WORDS), load_draft_model(out))
    return run_audit(subject_of_run(run, trained=True, run_folder=out), ["RUN"])


def _block_inputs(change: Callable[..., tuple[Tensor, Tensor, BlockLayout]]) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        clean = DFlashDraftModel.forward
        patch.setattr(
            DFlashDraftModel,
            "forward",
            lambda self, states, embeddings, layout, *rest: clean(self, *change(states, embeddings, layout), *rest),
        )

    return plant


def _later(layout: BlockLayout) -> BlockLayout:
    last = len(layout.position_ids_S) - 1
    return replace(layout, anchor_positions_A=(layout.anchor_positions_A + 1).clamp(max=last))


def _no_rope(patch: pytest.MonkeyPatch) -> None:
    clean = DFlashAttention.keys_values
    still = Rotation(torch.ones(1, 1, 1), torch.zeros(1, 1, 1))
    patch.setattr(DFlashAttention, "keys_values", lambda self, states, _rotate: clean(self, states, still))


def _no_hidden_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DFlashDraftModel, "_context", lambda self, states: self.fc(states) + 0 * self.hidden_norm.weight)


def _labels(by: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        clean = step_module.slot_labels
        # where nothing may be asked there is -1, which would end the run
        patch.setattr(step_module, "slot_labels", lambda *args, shift: clean(*args, shift=shift + by).clamp_min(0))

    return plant


def _scale(patch: pytest.MonkeyPatch) -> None:
    clean = DFlashAttention.forward

    def scaled(self: Any, block: Tensor, context: Any, rotate: Rotation, attend: Any) -> Tensor:
        return clean(self, block, context, lambda states: 4.0 * rotate(states), attend)

    patch.setattr(DFlashAttention, "forward", scaled)


def _clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.nn.utils, "clip_grad_norm_", lambda _parameters, _limit: torch.tensor(1.0))


def _rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step_module, "set_learning_rate", lambda _optimizer, _rate: None)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "blocks one place later": _block_inputs(lambda states, embeddings, layout: (states, embeddings, _later(layout))),
    "keys without rope": _no_rope,
    "hidden norm skipped": _no_hidden_norm,
    "labels turned the other way": _labels(1),
    "attention scaled otherwise": _scale,
    "states of the next token": _block_inputs(lambda s, e, layout: (s.roll(-1, dims=1), e, layout)),
    "mask slots filled with the anchor's token": _block_inputs(
        lambda s, e, layout: (s, e[:, :: layout.block_size].repeat_interleave(layout.block_size, dim=1), layout)
    ),
    "the gradient norm is not what is clipped": _clipping,
    "the rate of the schedule never set": _rate,
}


def test_a_run_of_this_code_measures_as_it_logged(tmp_path: Path) -> None:
    small_run(tmp_path / "run", *WORDS)
    report = audited(tmp_path / "run")
    assert report.findings == []
    assert {result.code: result.status for result in report.checks}["RUN012"] == "ok"
    assert {result.code: result.status for result in report.checks}["RUN013"] == "ok"
    assert any("teacher_forced_acceptance_length logged" in note for note in report.notes)


@pytest.mark.parametrize("name", FAULTS)
def test_a_run_that_learned_otherwise_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        FAULTS[name](patch)
        small_run(tmp_path / "run", *WORDS)
    codes = {finding.code for finding in audited(tmp_path / "run").findings}
    assert codes & {"RUN012", "RUN013"}
