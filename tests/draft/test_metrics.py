"""Metrics count blocks and add up in any order."""

from __future__ import annotations

import itertools

import pytest
import torch

from draftline.draft.loss import StepMetrics


def metrics_of(*blocks: str, anchor_predicts: bool = False) -> StepMetrics:
    """One block per word: 1 right, 0 wrong, - not supervised; without the anchor's slot unless it predicts."""
    words = [word if anchor_predicts else "-" + word for word in blocks]
    right = torch.tensor([[letter == "1" for letter in word] for word in words])
    supervised = torch.tensor([[letter != "-" for letter in word] for word in words])
    return StepMetrics.of_blocks(
        correct_target_AP=right,
        correct_data_AP=right,
        supervised_AP=supervised,
        loss_sum=float(len(blocks)),
        weight_sum=1.0,
        tokens=10,
    )


def test_marginal_and_conditional_accuracy_are_two_numbers() -> None:
    metrics = metrics_of("110", "100", "111", "000")
    assert metrics.accuracy_by_position[1:] == [0.75, 0.5, 0.25]
    assert metrics.conditional_accuracy_by_position[1:] == pytest.approx([0.75, 2 / 3, 0.5])
    assert metrics.streak == 1.5
    assert metrics.accuracy == 0.5


@pytest.mark.parametrize("split", [((0, 1), (2, 3)), ((0, 3), (1, 2)), ((0,), (1, 2, 3)), ((0,), (1,), (2,), (3,))])
def test_streak_does_not_depend_on_micro_batches(split: tuple[tuple[int, ...], ...]) -> None:
    """Runs of 3, 1, 2 and 0: the mean is 1.5, whatever shares a micro-batch."""
    blocks = ["111", "100", "110", "000"]
    parts = [metrics_of(*(blocks[i] for i in part)) for part in split]
    whole = metrics_of(*blocks)
    for order in itertools.permutations(parts):
        total = StepMetrics.total(order, block_size=4)
        assert total.streak == 1.5
        assert total.loss_sum / total.blocks == 1.0
        assert total.accuracy_by_position[1:] == whole.accuracy_by_position[1:]
        assert total.conditional_accuracy_by_position[1:] == whole.conditional_accuracy_by_position[1:]
        assert total.tokens == 10 * len(parts)


def test_wrong_slot_ends_the_run_though_later_ones_are_right() -> None:
    metrics = metrics_of("101", "011")
    assert metrics.streak == 0.5
    assert metrics.run_slots_P.tolist() == [0, 2, 1, 0]
    assert metrics.correct_target_P.tolist() == [0, 1, 1, 2]


def test_unsupervised_slots_count_for_nothing() -> None:
    metrics = metrics_of("11-", "1--", "---")
    assert metrics.slots == 3
    assert metrics.blocks == 2
    assert metrics.streak == 1.5
    assert metrics.conditional_accuracy_by_position[1:3] == [1.0, 1.0]
    assert metrics.accuracy_by_position[3] != metrics.accuracy_by_position[3]  # NaN: nothing was asked there


def test_anchor_slot_counts_where_it_predicts() -> None:
    metrics = metrics_of("1101", "0111", anchor_predicts=True)
    assert metrics.accuracy_by_position == [0.5, 1.0, 0.5, 1.0]
    assert metrics.conditional_accuracy_by_position[:3] == [0.5, 1.0, 0.0]
    assert metrics.streak == 1.0


def test_agreement_with_target_and_data_are_kept_apart() -> None:
    yes, no = torch.tensor([[True, True]]), torch.tensor([[False, False]])
    metrics = StepMetrics.of_blocks(
        correct_target_AP=no,
        correct_data_AP=yes,
        supervised_AP=torch.tensor([[False, True]]),
        loss_sum=0.0,
        weight_sum=1.0,
        tokens=2,
    )
    assert (metrics.accuracy, metrics.data_accuracy) == (0.0, 1.0)


def test_zero_is_neutral() -> None:
    metrics = metrics_of("110", "100")
    total = StepMetrics.zero(4) + metrics
    assert total.slots_P.tolist() == metrics.slots_P.tolist()
    assert total.streak == metrics.streak
    assert StepMetrics.zero(4).blocks == 0
