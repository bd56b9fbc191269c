"""Faults that only several ranks have: a run of one leaves the same, so they are not among those of `fault.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from draftline.audit import run_audit
from draftline.draft.loss import StepMetrics
from draftline.train import step as step_module
from draftline.train.ranks import Ranks
from draftline.train.step import StepResult
from tests.zoo.pipeline import Recipe, World


def own_count(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by what it has counted itself."""
    patch.setattr(Ranks, "sum_metrics", lambda _ranks, metrics: metrics)


def mean_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Gradients are averaged over ranks, as DDP does, and then divided."""
    clean = Ranks.sum_gradients

    def mean(ranks: Ranks, parameters: Iterable[nn.Parameter]) -> None:
        kept = list(parameters)
        clean(ranks, kept)
        for parameter in kept:
            if parameter.grad is not None:
                parameter.grad /= ranks.count

    patch.setattr(Ranks, "sum_gradients", mean)


def own_gradient(patch: pytest.MonkeyPatch) -> None:
    """No rank hears of the others' rows."""
    patch.setattr(Ranks, "sum_gradients", lambda _ranks, _parameters: None)


def count_twice(patch: pytest.MonkeyPatch) -> None:
    """The count of all ranks is added once more by one that already has it."""
    clean = Ranks.sum_metrics

    def twice(ranks: Ranks, metrics: StepMetrics) -> StepMetrics:
        found = clean(ranks, metrics)
        return found if ranks.count == 1 else found + metrics

    patch.setattr(Ranks, "sum_metrics", twice)


def idle_leaves(patch: pytest.MonkeyPatch) -> None:
    """A rank without a row skips the step, and the others wait for it."""
    clean = step_module.train_step

    def leave(**given: Any) -> StepResult:
        ranks = given.get("ranks")
        if ranks is not None and ranks.count > 1 and not given["rows"]:
            return StepResult(StepMetrics.zero(given["draft_model"].config.block_size), 0.0)
        return clean(**given)

    patch.setattr(step_module, "train_step", leave)


@pytest.mark.parametrize("plant", [own_count, mean_of_ranks, own_gradient, count_twice, idle_leaves])
def test_a_wrong_sum_over_ranks_is_reported(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = World.of(Recipe(), monkeypatch, tmp_path)
    assert codes(world) == []
    plant(monkeypatch)
    assert codes(world) == ["LOS006"]


def codes(world: World) -> list[str]:
    """Of findings, and of checks that could not run, which stop a run as well."""
    report = run_audit(world.subject(), ("LOS006",))
    return [finding.code for finding in report.findings] + report.not_examined
