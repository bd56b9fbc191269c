"""Where blocks start, which of their slots are supervised, and what each slot is to predict.

A block at anchor `a` has slots k = 0..P-1. By default (z-lab's layout) slot 0 holds the anchor's own token and
predicts nothing, and slot k >= 1 predicts the token at position a + k. With `sample_from_anchor` (the layout of
DSpark) slot k predicts position a + k + 1, so that slot 0 predicts too. `first_offset` below is the distance from
the anchor to what slot 0 would predict: 0 or 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftline.records import PackedBatch


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


def slot_labels(
    anchor_positions_A: Tensor, ids_S: Tensor, block_size: int, sample_from_anchor: bool, shift: int
) -> Tensor:
    """What each slot is to say: `ids_S` at its predicted position plus `shift`, [A, P] int64.

    For the target's own predictions `shift` is -1, because the target at position p - 1 predicts position p; for
    tokens of the data it is 0. Positions outside the row are clamped: such slots are never supervised.
    """
    positions_AP = predicted_positions(anchor_positions_A, block_size, sample_from_anchor) + shift
    return ids_S[positions_AP.clamp(min=0, max=ids_S.shape[0] - 1)]


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
