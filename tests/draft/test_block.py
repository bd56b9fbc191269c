"""Where blocks start and what their slots are to say, against hand-made cases and nested loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.draft.block import (
    Blocks,
    draw_anchors,
    eligible_anchors,
    greedy_tokens,
    predicted_positions,
    slot_labels,
    slot_weights,
    supervised_slots,
)
from draftline.records import PackedBatch
from tests.draft.layouts import WIDTH, TinyTarget, drafter_config, make_row


def mask_of(length: int, *spans: tuple[int, int]) -> torch.Tensor:
    """Supervised from first to last of each span, both included."""
    mask = torch.zeros(length, dtype=torch.bool)
    for first, last in spans:
        mask[first : last + 1] = True
    return mask


def one_document(length: int) -> torch.Tensor:
    return torch.zeros(length, dtype=torch.int64)


documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=4)


@given(documents, st.integers(2, 8), st.booleans())
@settings(max_examples=150, deadline=None)
def test_supervised_slots_are_the_run_that_nested_loops_find(
    masks: list[list[bool]], block_size: int, sample_from_anchor: bool
) -> None:
    mask = [token for document in masks for token in document]
    document = [index for index, tokens in enumerate(masks) for _ in tokens]
    eligible = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1] and document[t] == document[t + 1]]
    mask_S, document_S = torch.tensor(mask), torch.tensor(document)
    assert eligible_anchors(mask_S, document_S).nonzero()[:, 0].tolist() == eligible
    found = supervised_slots(
        torch.tensor(eligible, dtype=torch.int64), mask_S, document_S, block_size, sample_from_anchor
    )
    for anchor, slots in zip(eligible, found.tolist(), strict=True):
        wanted = [] if sample_from_anchor else [False]
        alive, position = True, anchor + 1
        while len(wanted) < block_size:
            alive = alive and position < len(mask) and mask[position] and document[position] == document[anchor]
            wanted.append(alive)
            position += 1
        assert slots == wanted


def test_labels_are_the_tokens_after_the_anchor() -> None:
    ids_S = torch.arange(10, 26)
    predicted = predicted_positions(torch.tensor([3]), block_size=4, sample_from_anchor=False)
    labels = slot_labels(predicted, ids_S, shift=0)
    assert labels[0, 1:].tolist() == ids_S[4:7].tolist()
    weights = slot_weights(4, decay_gamma=2.0, sample_from_anchor=False)
    assert weights[0] == 0.0
    assert torch.allclose(weights[1:], torch.tensor([1.0, math.exp(-0.5), math.exp(-1.0)]))


def test_labels_of_the_target_stand_one_position_earlier() -> None:
    ids_S = torch.arange(100, 116)
    after, from_anchor = (predicted_positions(torch.tensor([3]), 4, layout) for layout in (False, True))
    assert slot_labels(after, ids_S, shift=-1)[0, 1:].tolist() == [103, 104, 105]
    assert slot_labels(from_anchor, ids_S, shift=-1)[0].tolist() == [103, 104, 105, 106]
    assert slot_labels(from_anchor, ids_S, shift=0)[0].tolist() == [104, 105, 106, 107]


def test_weights_start_at_one_where_the_first_slot_predicts() -> None:
    assert slot_weights(8, 4.0, sample_from_anchor=False)[1] == 1.0
    assert slot_weights(8, 4.0, sample_from_anchor=True)[0] == 1.0
    assert slot_weights(8, 4.0, sample_from_anchor=True)[2].item() == pytest.approx(math.exp(-0.5))


@pytest.mark.parametrize(
    ("anchor", "sample_from_anchor", "wanted"),
    [
        (37, True, [1, 1, 0, 0]),
        (8, True, [1, 1, 1, 1]),
        (37, False, [0, 1, 1, 0]),
        (8, False, [0, 1, 1, 1]),
    ],
)
def test_slots_past_the_answer_carry_no_loss(anchor: int, sample_from_anchor: bool, wanted: list[int]) -> None:
    mask = mask_of(48, (8, 39))
    slots = supervised_slots(torch.tensor([anchor]), mask, one_document(48), 4, sample_from_anchor)
    assert slots.int().tolist() == [wanted]


def test_first_answer_token_is_an_anchor_and_the_last_is_none() -> None:
    eligible = eligible_anchors(mask_of(48, (8, 39)), one_document(48)).nonzero()[:, 0].tolist()
    assert eligible == list(range(8, 39))


def test_predictions_stay_inside_the_answer_and_cover_it() -> None:
    mask = mask_of(12, (5, 8))
    anchors = eligible_anchors(mask, one_document(12)).nonzero()[:, 0]
    slots = supervised_slots(anchors, mask, one_document(12), 4, sample_from_anchor=False)
    predicted = {int(anchor) + k for anchor, row in zip(anchors, slots, strict=True) for k in range(4) if row[k]}
    assert predicted == {6, 7, 8}


def test_a_block_stops_at_a_user_turn() -> None:
    mask = mask_of(20, (2, 5), (8, 15))
    slots = supervised_slots(torch.tensor([3]), mask, one_document(20), 12, sample_from_anchor=False)
    assert slots[0].nonzero()[:, 0].tolist() == [1, 2]


def test_last_token_of_a_document_has_no_label_in_the_next() -> None:
    mask, document_ids = mask_of(8, (0, 7)), torch.tensor([0] * 4 + [1] * 4)
    assert eligible_anchors(mask, document_ids).nonzero()[:, 0].tolist() == [0, 1, 2, 4, 5, 6]
    slots = supervised_slots(torch.tensor([2, 6]), mask, document_ids, 4, sample_from_anchor=False)
    assert slots.int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]


def test_short_answer_gives_anchors_and_every_token_but_the_first_is_a_first_slot_label() -> None:
    mask = mask_of(10, (4, 9))
    assert int(eligible_anchors(mask, one_document(10)).sum()) >= 5
    seen: set[int] = set()
    for seed in range(200):
        anchors = draw_anchors(make_row([10], mask), num_anchors=2, seed=seed)
        assert len(anchors) == 2
        slots = supervised_slots(anchors, mask, one_document(10), 16, sample_from_anchor=False)
        assert slots[:, 1].all()
        seen |= {int(anchor) + 1 for anchor in anchors}
    assert seen == {5, 6, 7, 8, 9}


def test_budget_is_per_document() -> None:
    lengths = [188, 4001]
    batch = make_row(lengths, mask_of(sum(lengths), (0, sum(lengths) - 1)))
    anchors = draw_anchors(batch, num_anchors=512, seed=0)
    assert int((anchors < 188).sum()) == 187
    assert int((anchors >= 188).sum()) == 512
    assert len(set(anchors.tolist())) == 187 + 512


def test_anchors_are_drawn_without_order_bias() -> None:
    mask = mask_of(21, (0, 20))
    counts = torch.zeros(21)
    for seed in range(2000):
        counts[draw_anchors(make_row([21], mask), num_anchors=5, seed=seed)] += 1
    expected = 2000 * 5 / 20
    assert counts[20] == 0
    assert (((counts[:20] - expected) ** 2) / expected).sum() < 50  # chi-square, 19 degrees: 50 is p = 1e-4


def positions_in_document(batch: PackedBatch, document: int, seed: int) -> list[int]:
    anchors = draw_anchors(batch, num_anchors=6, seed=seed)
    mine = anchors[batch.document_ids[0, anchors] == document]
    return batch.position_ids[0, mine].tolist()


def test_draw_depends_on_seed_epoch_and_sample_alone() -> None:
    mask = mask_of(30, (3, 29))
    other = mask_of(17, (2, 16))
    alone = positions_in_document(make_row([30], mask, sample_ids=[7]), 0, seed=1)
    second = make_row([17, 30], torch.cat([other, mask]), sample_ids=[3, 7], seed=5)
    first = make_row([30, 17], torch.cat([mask, other]), sample_ids=[7, 3], seed=6)
    assert len(alone) == 6
    assert positions_in_document(second, 1, seed=1) == alone
    assert positions_in_document(first, 0, seed=1) == alone
    for changed in (
        positions_in_document(make_row([30], mask, sample_ids=[7]), 0, seed=2),
        positions_in_document(make_row([30], mask, sample_ids=[7], epoch=1), 0, seed=1),
        positions_in_document(make_row([30], mask, sample_ids=[8]), 0, seed=1),
    ):
        assert changed != alone


def test_row_without_supervision_has_no_anchors() -> None:
    anchors = draw_anchors(make_row([5, 4], mask_of(9)), num_anchors=3, seed=0)
    assert anchors.tolist() == []
    assert anchors.dtype == torch.int64


@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_blocks_of_a_document_are_those_of_a_row_that_holds_it_alone_and_is_all_answer(
    sample_from_anchor: bool,
) -> None:
    """Slot by slot, from the description in words."""
    config = drafter_config({"sample_from_anchor": sample_from_anchor})
    batch, anchors, first = make_row((9,), mask_of(9, (0, 8))), [0, 3, 7], int(not sample_from_anchor)
    of_row = Blocks.of_row(batch, torch.tensor(anchors), config)
    of_document = Blocks.of_document(batch.input_ids[0], torch.tensor(anchors), config)
    for blocks in (of_row, of_document):
        assert blocks.ids_AP.tolist() == [[int(batch.input_ids[0, a]), *[config.mask_token_id] * 3] for a in anchors]
        assert blocks.predicted_AP.tolist() == [[a + k + 1 - first for k in range(4)] for a in anchors]
        assert blocks.supervised_AP.tolist() == [
            [k >= first and a + k + 1 - first < 9 for k in range(4)] for a in anchors
        ]
        assert blocks.layout.position_ids_Q.tolist() == [a + k for a in anchors for k in range(4)]


def test_what_is_said_are_tokens_of_the_target_whatever_rows_the_head_has() -> None:
    target, hidden = TinyTarget(), torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    kept_ids = torch.tensor([2, 3, 11, 40])
    logits = hidden @ target.lm_head.weight.T
    assert torch.equal(greedy_tokens(hidden, target.frozen().head), logits.argmax(-1))
    assert torch.equal(greedy_tokens(hidden, target.frozen(kept_ids).head), kept_ids[logits[..., kept_ids].argmax(-1)])
