"""What is examined at full size: the plan, the rates, the first weights, and rows on their way to the drafter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.audit import AuditReport, AuditSubject, run_audit
from draftline.data.sampler import RowPlan, Sampler
from draftline.engine import inline
from draftline.records import CapturedSample, PackedBatch, Sample
from draftline.train import step as step_module
from draftline.transfer.store import StatesStore
from tests.zoo.pipeline import Recipe, subject

FULL_SIZE = ("RUN014", "RUN015", "RUN016")


def audited(one: AuditSubject) -> AuditReport:
    return run_audit(one, FULL_SIZE)


def only_finding(one: AuditSubject, code: str) -> str:
    """Evidence of the one finding, which has this code."""
    report = audited(one)
    assert report.not_examined == []
    assert [finding.code for finding in report.findings] == [code]
    return report.findings[0].evidence


@pytest.mark.parametrize("mode", ["inline", "threads", "processes"])
def test_a_clean_run_has_no_finding_and_a_trained_one_no_plan(tmp_path: Path, mode: str) -> None:
    clean = subject(Recipe(settings={"pipeline": {"mode": mode}}), tmp_path)
    report = audited(clean)
    assert report.findings == []
    assert [(result.code, result.status) for result in report.checks] == [(code, "ok") for code in FULL_SIZE]
    lived = audited(replace(clean, trained=True))
    assert [result.status for result in lived.checks] == ["skipped"] * 3


def test_a_conversation_that_is_not_trained_on_is_named(tmp_path: Path) -> None:
    clean = subject(Recipe(data="rows"), tmp_path)
    ids = clean.run.data.training_ids
    data = replace(clean.run.data, training_ids=ids[ids != ids[2]])
    evidence = only_finding(replace(clean, run=replace(clean.run, data=data)), "RUN014")
    assert evidence == (
        f"{len(ids) - 1} conversations are trained on, by the recipe {len(ids)}; first in which they differ: [{ids[2]}]"
    )


def test_a_row_that_lacks_a_conversation_is_shown_beside_the_whole_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean = Sampler.plans

    def plans(sampler: Sampler, first: int = 0) -> Iterator[RowPlan]:
        for row in clean(sampler, first):
            yield replace(row, sample_ids=row.sample_ids[:-1]) if row.sequence_number == 1 else row

    one = subject(Recipe(settings={"train": {"tokens_per_row": 64}}), tmp_path)
    whole = list(one.run.sampler.plans())[1]
    place = (whole.sequence_number, whole.step, whole.last_of_step, whole.epoch)
    monkeypatch.setattr(Sampler, "plans", plans)
    report = run_audit(one, ["RUN014"])  # the rows that RUN016 sends lose theirs, too
    assert [finding.evidence for finding in report.findings] == [
        f"(row, step, last of it, pass, conversations) is {(*place, whole.sample_ids[:-1])}, "
        f"by the recipe {(*place, whole.sample_ids)}"
    ]


def test_a_rate_of_another_schedule_is_found_at_its_update(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def straight(step: int, total: int, optim: Any) -> float:
        """Down along a line instead of half a cosine."""
        rise = round(optim.warmup_fraction * total)
        if step < rise:
            return optim.learning_rate * (step + 1) / (rise + 1)
        share = (step - rise) / (total - 1 - rise)
        return optim.learning_rate * (1 - (1 - optim.final_fraction) * share)

    settings = {"train": {"max_steps": 11}, "optim": {"warmup_fraction": 0.0, "final_fraction": 0.0}}
    one = subject(Recipe(settings=settings), tmp_path)
    monkeypatch.setattr(step_module, "learning_rate", straight)
    peak = one.config.optim.learning_rate
    wanted = peak * math.cos(math.pi / 20) ** 2  # the first of ten stretches of half a cosine
    assert only_finding(one, "RUN014") == (f"update 1 of 11 has the rate {0.9 * peak:.6g}, by the recipe {wanted:.6g}")


def test_one_changed_number_in_the_first_weights_is_found_in_its_tensor(tmp_path: Path) -> None:
    one = subject(Recipe(), tmp_path)
    name, weight = list(one.draft_model.named_parameters())[5]
    with torch.no_grad():
        weight.view(-1)[-1] += 1e-4
    assert only_finding(one, "RUN015") == f"{name} does not begin with the weights of the seed"


@pytest.mark.parametrize("field", ["input_ids", "loss_mask", "hidden_states_packed"])
def test_a_row_that_changes_on_its_way_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, field: str) -> None:
    clean = inline.make_row

    def changed(*words: Any) -> PackedBatch:
        row = clean(*words)
        if row.sequence_number == 17:  # one element of one row, late
            place = getattr(row, field).view(-1)
            place[-1] = ~place[-1] if field == "loss_mask" else place[-1] + 1
        return row

    monkeypatch.setattr(inline, "make_row", changed)
    evidence = only_finding(subject(Recipe(settings={"pipeline": {"mode": "inline"}}), tmp_path), "RUN016")
    assert evidence.startswith(f"row 17 of 20 that waited: its {field} (")


def test_states_that_come_back_from_the_disk_changed_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean = StatesStore.read

    def read(store: StatesStore, sample: Sample) -> CapturedSample:
        found = clean(store, sample)
        states = found.hidden_states_SLD.clone()
        states[-1, -1] = states[-1, -1].nextafter(torch.tensor(1e9))
        return replace(found, hidden_states_SLD=states)

    monkeypatch.setattr(StatesStore, "read", read)
    evidence = only_finding(subject(Recipe(), tmp_path), "RUN016")
    assert evidence == "hidden_states_SLD of a conversation comes back from the disk as other numbers"
