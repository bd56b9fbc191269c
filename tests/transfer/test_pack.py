"""Packing, against indexing by hand."""

from __future__ import annotations

import pytest
import torch

from draftline.data.sampler import RowPlan
from draftline.records import CapturedSample, Sample
from draftline.transfer.pack import pack


def captured(sample_id: int, length: int, *, send_ids: bool = True) -> CapturedSample:
    generator = torch.Generator().manual_seed(sample_id)
    ids = torch.randint(0, 50, (length,), generator=generator)
    return CapturedSample(
        sample=Sample(sample_id, ids, ids % 2 == 0),
        hidden_states_SLD=torch.randn(length, 6, generator=generator),
        target_ids_S=ids + 1 if send_ids else None,
        verifier_last_hidden_SD=None if send_ids else torch.randn(length, 3, generator=generator),
    )


def plan(*sample_ids: int) -> RowPlan:
    return RowPlan(sequence_number=4, step=2, last_of_step=False, epoch=1, sample_ids=sample_ids)


def test_every_position_of_a_row_is_the_token_of_its_conversation() -> None:
    items = [captured(8, 3), captured(2, 1), captured(5, 4)]
    row = pack(plan(8, 2, 5), items)
    places = [(document, position) for document, item in enumerate(items) for position in range(len(item.sample))]
    assert row.input_ids.shape == (1, 8)
    for index, (document, position) in enumerate(places):
        item = items[document]
        assert row.document_ids[0, index] == document
        assert row.position_ids[0, index] == position
        assert row.input_ids[0, index] == item.sample.input_ids[position]
        assert row.loss_mask[0, index] == item.sample.loss_mask[position]
        assert torch.equal(row.hidden_states_packed[0, index], item.hidden_states_SLD[position])
        assert item.target_ids_S is not None
        assert row.target_ids is not None
        assert row.target_ids[0, index] == item.target_ids_S[position]
    assert (row.sequence_number, row.step, row.last_of_step, row.epoch) == (4, 2, False, 1)
    assert row.verifier_last_hidden_packed is None


def test_last_hidden_states_travel_instead_of_ids() -> None:
    items = [captured(0, 2, send_ids=False), captured(1, 3, send_ids=False)]
    row = pack(plan(0, 1), items)
    assert row.target_ids is None
    assert row.verifier_last_hidden_packed is not None
    expected = torch.cat([item.verifier_last_hidden_SD for item in items if item.verifier_last_hidden_SD is not None])
    assert torch.equal(row.verifier_last_hidden_packed[0], expected)


def test_samples_that_do_not_match_the_plan_are_refused() -> None:
    with pytest.raises(ValueError, match="row 4"):
        pack(plan(1, 0), [captured(0, 2), captured(1, 2)])
    with pytest.raises(ValueError, match="1 of 2 samples"):
        pack(plan(0, 1), [captured(0, 2), captured(1, 2, send_ids=False)])
