"""Records refuse wrong shapes by field name; metrics count blocks and add up in any order."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from draftline.records import CapturedSample, HiddenStates, PackedBatch, Sample, StepMetrics


def sample(length: int = 4) -> Sample:
    return Sample(sample_id=0, input_ids=torch.arange(length), loss_mask=torch.ones(length, dtype=torch.bool))


def row() -> PackedBatch:
    return PackedBatch(
        sequence_number=0,
        step=0,
        last_of_step=True,
        epoch=0,
        sample_ids=(0,),
        input_ids=torch.arange(4)[None],
        loss_mask=torch.ones(1, 4, dtype=torch.bool),
        document_ids=torch.zeros(1, 4, dtype=torch.int64),
        position_ids=torch.arange(4)[None],
        hidden_states_packed=torch.zeros(1, 4, 6),
        target_ids=torch.zeros(1, 4, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": torch.zeros(4)}, r"Sample\.input_ids is \[4\] float32, expected \[S\] int64"),
        ({"loss_mask": torch.ones(4, dtype=torch.int64)}, r"Sample\.loss_mask is torch.int64, expected bool"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, r"Sample\.loss_mask is \(3,\), expected \(4,\)"),
    ],
)
def test_sample_names_the_bad_field(changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(sample(), **changes)


@pytest.mark.parametrize(
    ("states", "last", "field"),
    [
        ((4, 6), (1, 4, 3), "hidden_states_packed"),
        ((1, 4, 6), (1, 5, 3), "verifier_last_hidden_packed"),
        ((1, 4, 6), (1, 4, 4), "verifier_last_hidden_packed"),
        ((1, 4, 3), (1, 4, 6), "verifier_last_hidden_packed"),
    ],
)
def test_hidden_states_refuse_what_does_not_fit(states: tuple[int, ...], last: tuple[int, ...], field: str) -> None:
    with pytest.raises(ValueError, match=rf"HiddenStates\.{field}"):
        HiddenStates(torch.zeros(states), torch.zeros(last))


def test_captured_sample_carries_exactly_one_target() -> None:
    ids, last = torch.zeros(4, dtype=torch.int64), torch.zeros(4, 3)
    CapturedSample(sample(), torch.zeros(4, 6), target_ids_S=ids)
    CapturedSample(sample(), torch.zeros(4, 6), verifier_last_hidden_SD=last)
    for both in ({}, {"target_ids_S": ids, "verifier_last_hidden_SD": last}):
        with pytest.raises(ValueError, match="exactly one of the two"):
            CapturedSample(sample(), torch.zeros(4, 6), **both)
    with pytest.raises(ValueError, match=r"hidden_states_SLD is \[3, 6\] float32, expected \[4, L\*D\]"):
        CapturedSample(sample(), torch.zeros(3, 6), target_ids_S=ids)
    with pytest.raises(ValueError, match=r"target_ids_S is \[4\] int32"):
        CapturedSample(sample(), torch.zeros(4, 6), target_ids_S=ids.int())
    with pytest.raises(ValueError, match="verifier_last_hidden_SD"):
        CapturedSample(sample(), torch.zeros(4, 6), verifier_last_hidden_SD=torch.zeros(5, 3))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"input_ids": torch.arange(4)}, "input_ids"),
        ({"loss_mask": torch.ones(1, 5, dtype=torch.bool)}, "loss_mask"),
        ({"document_ids": torch.zeros(1, 3)}, "document_ids"),
        ({"position_ids": torch.zeros(4)}, "position_ids"),
        ({"hidden_states_packed": torch.zeros(1, 5, 6)}, "hidden_states_packed"),
        ({"target_ids": None}, "target_ids"),
        ({"verifier_last_hidden_packed": torch.zeros(1, 4, 3)}, "target_ids"),
        ({"target_ids": torch.zeros(1, 3)}, "target_ids"),
        ({"target_ids": None, "verifier_last_hidden_packed": torch.zeros(1, 3, 3)}, "verifier_last_hidden_packed"),
    ],
)
def test_packed_batch_names_the_bad_field(changes: dict[str, torch.Tensor | None], field: str) -> None:
    with pytest.raises(ValueError, match=rf"PackedBatch\.{field} is"):
        replace(row(), **changes)


def test_packed_batch_counts_the_bytes_of_what_is_present() -> None:
    assert row().num_bytes() == 4 * (8 + 1 + 8 + 8 + 8) + 4 * 6 * 4
    assert "verifier_last_hidden_packed" not in row().tensors()
    with pytest.raises(FrozenInstanceError):
        row().step = 3  # type: ignore[misc]


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
