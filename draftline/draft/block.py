"""Blocks: where they start, what they are made of, which of their slots are supervised, and what each is to say.

A block at anchor `a` has slots k = 0..P-1. By default (z-lab's layout) slot 0 holds the anchor's own token and
predicts nothing, and slot k >= 1 predicts the token at position a + k. With `sample_from_anchor` (the layout of
DSpark) slot k predicts position a + k + 1, so that slot 0 predicts too.

The training step, the walk over an answer, the decoder and `inspect` build their blocks here, and all that a drafter
says in them goes through a `Head`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from draftline.config import DFlashConfig
from draftline.draft.attention import Attention, BlockLayout, GroupedAttention
from draftline.records import PackedBatch

if TYPE_CHECKING:  # what only draws blocks need not wait for a model to be imported
    from draftline.draft.model import DFlashDraftModel


class Head(Protocol):
    """What a drafter speaks through: rows of the target's head, all of them by default, with the target's final norm.

    `draftline.targets.TargetHead` is one in which each row is its own token, `ReducedHead` one with some of the rows.
    """

    @property
    def rows(self) -> int:
        """How many tokens it can say."""

    @property
    def whole(self) -> Head:
        """The target's own, with all rows."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., rows] of states that are already normed, scaled and soft-capped as the target does."""

    def target_ids(self, last_hidden: Tensor, chunk_size: int | None) -> Tensor:
        """The target's own greedy next tokens [...] of raw last-layer states [..., D], whatever rows there are."""

    def label_rows(self, target_ids: Tensor, last_hidden: Tensor | None, chunk_size: int | None) -> Tensor:
        """Row of the best token that there is a row for, [...]: what a slot is taught where the target says an id."""

    def __call__(self, last_hidden: Tensor) -> Tensor:
        """Logits [..., rows] of the target's raw last-layer states [..., D]."""

    def to_target_ids(self, rows: Tensor) -> Tensor:
        """Tokens of rows."""

    def to_whole(self, values: Tensor) -> Tensor:
        """Values [..., rows] of rows as values [..., V] of tokens."""

    def of_rows(self, kept_ids: Tensor | None) -> Head:
        """The head with the rows of these tokens alone; none: as it is."""


class Lender(Protocol):
    """A target, as far as a drafter borrows from it; `draftline.targets.Target` is one."""

    @property
    def head(self) -> Head:
        """Its final norm and head."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """Ids [...] -> what its first layer receives, [..., D]."""


@dataclass(frozen=True)
class FrozenTarget:
    """The parts of the target that the drafter borrows.

    Attributes:
        embed: ids [...] -> what the target's first layer receives, [..., D], in the drafter's precision.
        head: what the drafter speaks through.
    """

    embed: Callable[[Tensor], Tensor]
    head: Head

    @staticmethod
    def of(target: Lender, kept_ids: Tensor | None, like: Tensor) -> FrozenTarget:
        """Borrow from a target.

        Args:
            target: whose parts are borrowed.
            kept_ids: [Vd] int64, tokens of a reduced vocabulary; none: the drafter can say all.
            like: a tensor with the device and precision in which the drafter computes.

        Raises:
            TargetError: the head has no rows to choose from, or not those of `kept_ids`.
        """
        return FrozenTarget(lambda ids: target.embed(ids).to(like), target.head.of_rows(kept_ids))


@dataclass(frozen=True)
class Blocks:
    """The blocks at some anchors of one packed row or document.

    Attributes:
        layout: where they sit.
        ids_AP: [A, P] int64, what they start from: the anchor's own token, then the mask token in every other slot.
        predicted_AP: [A, P] int64, row position that each slot predicts; it may lie past the end of the row.
        supervised_AP: [A, P] bool, slots that carry a loss.
    """

    layout: BlockLayout
    ids_AP: Tensor
    predicted_AP: Tensor
    supervised_AP: Tensor

    @staticmethod
    def of_row(batch: PackedBatch, anchor_positions_A: Tensor, config: DFlashConfig) -> Blocks:
        """Blocks of a packed row at [A] int64 increasing row positions, for a drafter of this shape."""
        rows = (batch.input_ids[0], batch.loss_mask[0], batch.document_ids[0], batch.position_ids[0])
        return _blocks(*rows, anchor_positions_A, config)

    @staticmethod
    def of_document(input_ids_S: Tensor, anchor_positions_A: Tensor, config: DFlashConfig) -> Blocks:
        """Blocks of one document, every token of which counts as an answer."""
        everywhere, position_ids_S = torch.ones_like(input_ids_S).bool(), torch.arange(len(input_ids_S))
        position_ids_S = position_ids_S.to(input_ids_S.device)
        rows = (input_ids_S, everywhere, torch.zeros_like(input_ids_S), position_ids_S)
        return _blocks(*rows, anchor_positions_A, config)


def drafted_states(
    draft_model: DFlashDraftModel,
    hidden_states_packed: Tensor,
    blocks: Blocks,
    embed: Callable[[Tensor], Tensor],
    attention: type[Attention] = GroupedAttention,
) -> Tensor:
    """What the drafter computes in blocks, [A, P, D], ready for the head.

    Args:
        hidden_states_packed: [1, S, L*D] states of the captured layers.
        blocks: of the same row.
        embed: see `FrozenTarget`.
        attention: implementation; all give the same result.
    """
    embeddings = embed(blocks.ids_AP.flatten()[None])
    return draft_model(hidden_states_packed, embeddings, blocks.layout, attention)[0].unflatten(0, blocks.ids_AP.shape)


def greedy_tokens(hidden: Tensor, head: Head) -> Tensor:
    """What is said in slots with these states, [..., D] -> [...] int64 tokens of the target."""
    return head.to_target_ids(head.logits(hidden).argmax(-1))


def eligible_anchors(loss_mask_S: Tensor, document_ids_S: Tensor) -> Tensor:
    """Positions where a block may start: the token and its successor are supervised and of one document.

    The successor matters because a block whose first prediction is not supervised teaches nothing; the last
    supervised token is therefore no anchor, the second-last is. Returns [S] bool.
    """
    eligible_S = torch.zeros_like(loss_mask_S)
    eligible_S[:-1] = loss_mask_S[:-1] & loss_mask_S[1:] & (document_ids_S[:-1] == document_ids_S[1:])
    return eligible_S


def draw_anchors(batch: PackedBatch, num_anchors: int, seed: int) -> Tensor:
    """Draw the anchors of a packed row: at most `num_anchors` per document, without replacement.

    Each document has a generator of its own, seeded by (seed, epoch, sample id), and draws among its own eligible
    positions. The draw is thus the same whatever the document is packed with, on whichever worker, and after a
    resume. The budget is per document, so that short conversations are not starved by a long one in the same row.

    Returns [A] int64 row positions in increasing order, on the device of the batch.
    """
    eligible_S = eligible_anchors(batch.loss_mask[0], batch.document_ids[0])
    positions = eligible_S.nonzero()[:, 0].cpu().numpy()
    documents = batch.document_ids[0].cpu().numpy()[positions]
    drawn = [
        _draw(positions[documents == index], num_anchors, (seed, batch.epoch, sample_id))
        for index, sample_id in enumerate(batch.sample_ids)
    ]
    return torch.from_numpy(np.concatenate(drawn)).to(batch.input_ids.device)


def supervised_slots(
    anchor_positions_A: Tensor,
    loss_mask_S: Tensor,
    document_ids_S: Tensor,
    block_size: int,
    sample_from_anchor: bool,
) -> Tensor:
    """Slots that carry a loss: the unbroken run of supervised tokens that follows the anchor.

    A block never reaches over a gap of the loss mask (a user turn) into the next answer, nor into the next document:
    at serving time decoding stops there, so what lies behind is never drafted from this anchor.

    Returns [A, P] bool; column 0 is false unless `sample_from_anchor`.
    """
    length = loss_mask_S.shape[0]
    positions_AP = predicted_positions(anchor_positions_A, block_size, sample_from_anchor)
    inside_AP = positions_AP < length
    safe_AP = positions_AP.clamp(max=length - 1)
    same_document_AP = document_ids_S[safe_AP] == document_ids_S[anchor_positions_A][:, None]
    run_AP = inside_AP & same_document_AP & loss_mask_S[safe_AP]
    if not sample_from_anchor:
        run_AP[:, 0] = True
    run_AP = run_AP.cumprod(dim=1).bool()
    if not sample_from_anchor:
        run_AP[:, 0] = False
    return run_AP


def predicted_positions(anchor_positions_A: Tensor, block_size: int, sample_from_anchor: bool) -> Tensor:
    """Row position that each slot predicts, [A, P] int64; it may lie past the end of the row."""
    first_offset = 1 if sample_from_anchor else 0
    offsets_P = torch.arange(first_offset, first_offset + block_size, device=anchor_positions_A.device)
    return anchor_positions_A[:, None] + offsets_P


def block_input_ids(anchor_ids_A: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """What every block starts from, [A, P]: its anchor's token, then the mask token in each slot to be predicted."""
    block_ids_AP = torch.full((len(anchor_ids_A), block_size), mask_token_id, device=anchor_ids_A.device)
    block_ids_AP[:, 0] = anchor_ids_A
    return block_ids_AP


def slot_labels(predicted_AP: Tensor, ids_S: Tensor, shift: int) -> Tensor:
    """What each slot is to say: `ids_S` at the position that it predicts plus `shift`, [A, P] int64.

    For the target's own predictions `shift` is -1, because the target at position p - 1 predicts position p; for
    tokens of the data it is 0. Positions outside the row are clamped: such slots are never supervised.
    """
    return ids_S[(predicted_AP + shift).clamp(min=0, max=ids_S.shape[0] - 1)]


def slot_weights(block_size: int, decay_gamma: float, sample_from_anchor: bool) -> Tensor:
    """Weight of each slot, [P] float32: exp(-j / gamma) with j = 0 at the first slot that predicts.

    Source: DFlash, arXiv 2602.06036, w_k = exp(-(k-1)/gamma) for k = 1..P-1. The anchor's slot has weight 0.
    """
    first = 0 if sample_from_anchor else 1
    weight_P = torch.exp(-(torch.arange(block_size, dtype=torch.float32) - first) / decay_gamma)
    weight_P[:first] = 0.0
    return weight_P


def _draw(positions: np.ndarray, num_anchors: int, seed: tuple[int, int, int]) -> np.ndarray:
    if len(positions) <= num_anchors:
        return positions
    return np.sort(np.random.default_rng(seed).choice(positions, size=num_anchors, replace=False))


def _blocks(
    input_ids_S: Tensor,
    loss_mask_S: Tensor,
    document_ids_S: Tensor,
    position_ids_S: Tensor,
    anchor_positions_A: Tensor,
    config: DFlashConfig,
) -> Blocks:
    shape = (config.block_size, config.sample_from_anchor)
    return Blocks(
        layout=BlockLayout.of_row(anchor_positions_A, position_ids_S, config.block_size),
        ids_AP=block_input_ids(input_ids_S[anchor_positions_A], config.block_size, config.mask_token_id),
        predicted_AP=predicted_positions(anchor_positions_A, *shape),
        supervised_AP=supervised_slots(anchor_positions_A, loss_mask_S, document_ids_S, *shape),
    )
