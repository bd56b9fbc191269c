"""Records refuse wrong shapes by field name."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from draftline.records import CapturedSample, HiddenStates, PackedBatch, Sample


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
        ({"loss_mask": torch.ones(4, dtype=torch.int64)}, r"Sample\.loss_mask is \[4\] int64, expected \[4\] bool"),
        ({"loss_mask": torch.ones(3, dtype=torch.bool)}, r"Sample\.loss_mask is \[3\] bool, expected \[4\] bool"),
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
