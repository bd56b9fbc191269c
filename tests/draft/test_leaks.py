"""What a block may know: its document's states before the anchor, and the anchor's own token. Nothing else.

Held at the level of the model's outputs, bit for bit, through the path that training takes.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftline.draft.attention import Attention, DenseAttention, FlexAttention, GroupedAttention
from draftline.draft.model import DFlashDraftModel
from draftline.records import PackedBatch
from tests.draft.layouts import TinyTarget, block_outputs, drafter, drafter_config, make_row

CASES = [(seed, attention) for seed in range(4) for attention in (DenseAttention, GroupedAttention)] + [
    (0, FlexAttention)
]
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TARGET = TinyTarget()


def random_case(seed: int) -> tuple[DFlashDraftModel, PackedBatch, Tensor]:
    """A fully supervised row with overlapping blocks."""
    rng = random.Random(seed)
    config = drafter_config({"block_size": rng.randint(2, 5), "sample_from_anchor": rng.random() < 0.3})
    if rng.random() < 0.4:
        layer_types = ("sliding_attention", "full_attention")
        config = config.model_copy(update={"layer_types": layer_types, "sliding_window": 3})
    lengths = [rng.randint(3, 9) for _ in range(rng.randint(2, 3))]
    batch = make_row(lengths, torch.ones(sum(lengths), dtype=torch.bool), seed=seed)
    eligible = [p for p in range(sum(lengths) - 1) if batch.document_ids[0, p] == batch.document_ids[0, p + 1]]
    anchors = sorted(rng.sample(eligible, min(6, len(eligible))))
    return drafter(config, seed), batch, torch.tensor(anchors)


def with_other_states(batch: PackedBatch, keep_S: Tensor) -> PackedBatch:
    """Other states at every position that is not kept."""
    other = 5 * torch.randn(batch.hidden_states_packed.shape, generator=torch.Generator().manual_seed(99))
    return replace(batch, hidden_states_packed=torch.where(keep_S[None, :, None], batch.hidden_states_packed, other))


def with_other_tokens(batch: PackedBatch, keep_S: Tensor) -> PackedBatch:
    """The next token id at every position that is not kept."""
    return replace(batch, input_ids=torch.where(keep_S[None], batch.input_ids, (batch.input_ids + 1) % 40))


@pytest.mark.parametrize(("seed", "attention"), CASES)
def test_nothing_but_the_prefix_and_the_anchor_reaches_a_block(seed: int, attention: type[Attention]) -> None:
    model, batch, anchors = random_case(seed)
    before, _ = block_outputs(model, batch, anchors, TARGET, attention)
    positions_S = torch.arange(batch.input_ids.shape[1])
    for index, anchor in enumerate(anchors.tolist()):
        own_S = batch.document_ids[0] == batch.document_ids[0, anchor]
        changed = with_other_tokens(batch, positions_S == anchor)
        changed = with_other_states(changed, own_S & (positions_S < anchor))
        after, _ = block_outputs(model, changed, anchors, TARGET, attention)
        assert torch.equal(after[index], before[index])
        others = [i for i in range(len(anchors)) if i != index]
        assert not (after[others] == before[others]).all()


@pytest.mark.parametrize("attention", [DenseAttention, GroupedAttention])
@pytest.mark.parametrize("seed", range(4))
def test_the_anchor_and_every_state_before_it_reach_a_block(seed: int, attention: type[Attention]) -> None:
    model, batch, anchors = random_case(seed)
    model = drafter(model.config.model_copy(update={"layer_types": ("full_attention",) * 2}), seed)
    before, _ = block_outputs(model, batch, anchors, TARGET, attention)
    positions_S = torch.arange(batch.input_ids.shape[1])
    for position in positions_S.tolist():
        after, _ = block_outputs(model, with_other_states(batch, positions_S != position), anchors, TARGET, attention)
        moved_A = (after != before).flatten(1).any(dim=1)
        same_document_A = batch.document_ids[0, anchors] == batch.document_ids[0, position]
        assert moved_A.tolist() == (same_document_A & (position < anchors)).tolist()
        after, _ = block_outputs(model, with_other_tokens(batch, positions_S != position), anchors, TARGET, attention)
        assert (after != before).flatten(1).any(dim=1).tolist() == (anchors == position).tolist()


def test_overlapping_blocks_keep_to_themselves() -> None:
    """Anchors 3 and 4, blocks of 4: states from 3 on, and the token at 4, do not reach the block at 3."""
    batch, anchors = make_row([10], torch.ones(10, dtype=torch.bool)), torch.tensor([3, 4])
    model = drafter(drafter_config())
    before, _ = block_outputs(model, batch, anchors, TARGET)
    positions_S = torch.arange(10)
    for position in (3, 4, 5, 6):
        after, _ = block_outputs(model, with_other_states(batch, positions_S != position), anchors, TARGET)
        assert torch.equal(after[0], before[0])
    after, _ = block_outputs(model, with_other_states(batch, positions_S != 2), anchors, TARGET)
    assert not torch.equal(after[0], before[0])
    after, _ = block_outputs(model, with_other_tokens(batch, positions_S != 4), anchors, TARGET)
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_every_captured_layer_is_read(layer: int) -> None:
    model = drafter(drafter_config({"target_layer_ids": (0, 2, 4)}))
    batch, anchors = make_row([10], torch.ones(10, dtype=torch.bool), captured=3), torch.tensor([4])
    before, _ = block_outputs(model, batch, anchors, TARGET)
    states = batch.hidden_states_packed.clone().unflatten(-1, (3, -1))
    states[:, 2, layer] += 1.0
    after, _ = block_outputs(model, replace(batch, hidden_states_packed=states.flatten(-2)), anchors, TARGET)
    assert not torch.equal(after, before)
