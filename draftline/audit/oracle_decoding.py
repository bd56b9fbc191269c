"""The reference run's walk and decoder: greedy, without any cache, the target alone through transformers.

Source: `docs/concepts/semantics.md`, sections 6 and 7. Integers are exact but for ties: where two best logits of target
or drafter are closer than the rounding of what is compared, either token may be said, so their distances come along.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftline.audit.drafter_reference import ReferenceDrafter, block_outputs, said
from draftline.audit.reference import model_forward

_ANCHORS_AT_ONCE = 32
"""Anchors of a walk whose logits exist at the same time."""


@dataclass(frozen=True)
class Walk:
    """A walk over one answer.

    Attributes:
        streaks: leading right slots of the block at each token of the answer but the last.
        gaps: for each of these, the smallest distance of two best logits, of drafter or target, that decided it.
        tokens: tokens covered; jumps: blocks that it took.
    """

    streaks: list[int]
    gaps: list[float]
    tokens: int
    jumps: int


def acceptance_length(tokens: int, forwards: int) -> float | None:
    """Bonus included: tokens after the first of each output, by the target's forwards (or jumps) for them."""
    return tokens / forwards if forwards else None


def last_answer(loss_mask: Tensor) -> tuple[int, int]:
    """First position of the last unbroken run of a mask, and the one after it; equal without any."""
    mask = loss_mask.tolist()
    end = max((t + 1 for t, supervised in enumerate(mask) if supervised), default=0)
    start = end
    while start and mask[start - 1]:
        start -= 1
    return start, end


@torch.no_grad()
def walk_answer(drafter: ReferenceDrafter, model: PreTrainedModel, input_ids: Tensor, start: int) -> Walk:
    """Walk over an answer as decoding would.

    Args:
        input_ids: [S] a conversation up to the end of its last answer.
        start: position of that answer's first token.
    """
    output, view = model_forward(model, input_ids), drafter.view
    states, next_ids, target_gaps = output.states(view.target_layer_ids), output.next_ids.tolist(), output.gaps.tolist()
    streaks: list[int] = []
    gaps: list[float] = []
    for first in range(start, len(input_ids) - 1, _ANCHORS_AT_ONCE):
        anchors = range(first, min(first + _ANCHORS_AT_ONCE, len(input_ids) - 1))
        hidden_AKD = block_outputs(drafter, input_ids, states, anchors)[:, view.first :]
        ids, said_gaps = said(drafter, drafter.logits(hidden_AKD.flatten(0, 1)))
        tables = (table.view(hidden_AKD.shape[:2]).tolist() for table in (ids, said_gaps))
        for anchor, tokens, gaps_of_tokens in zip(anchors, *tables, strict=True):
            streak, gap = 0, math.inf
            for token, said_gap, place in zip(tokens, gaps_of_tokens, range(anchor, len(input_ids) - 1), strict=False):
                gap = min(gap, said_gap, target_gaps[place])
                if token != next_ids[place]:
                    break
                streak += 1
            streaks.append(streak)
            gaps.append(gap)
    place = jumps = 0
    while place < len(streaks):
        place, jumps = place + streaks[place] + 1, jumps + 1
    return Walk(streaks, gaps, len(streaks), jumps)


def walks(
    drafter: ReferenceDrafter, model: PreTrainedModel, conversations: Sequence[tuple[Tensor, Tensor]]
) -> list[Walk]:
    """Walks over the last answers of conversations, [S] ids and [S] mask; those of fewer than two tokens give none."""
    spans = [(input_ids, *last_answer(loss_mask)) for input_ids, loss_mask in conversations]
    return [walk_answer(drafter, model, ids[:end], start) for ids, start, end in spans if end - start > 1]


@dataclass(frozen=True)
class Decoded:
    """One greedy answer.

    Attributes:
        output_ids: with the stop token.
        output_gaps: per token of the output, distance of the target's two best logits where it was chosen.
        drafted_blocks: per forward, the K tokens drafted; drafted_gaps: distances of the drafter's two best logits.
        accepted_per_forward: drafted tokens that stood and are part of the output.
    """

    output_ids: list[int]
    output_gaps: list[float]
    drafted_blocks: list[list[int]]
    drafted_gaps: list[list[float]]
    accepted_per_forward: list[int]


@torch.no_grad()
def decode(
    drafter: ReferenceDrafter,
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int],
) -> Decoded:
    """Decode greedily; the target reads everything again in every forward."""
    view, ids = drafter.view, list(prompt_ids)
    seen = model_forward(model, torch.tensor(ids))
    answer = Decoded([int(seen.next_ids[-1])], [float(seen.gaps[-1])], [], [], [])
    while len(answer.output_ids) < max_new_tokens and answer.output_ids[-1] not in stop_ids:
        ids = [*prompt_ids, *answer.output_ids]
        anchor = len(ids) - 1
        states = seen.states(view.target_layer_ids)[:anchor]
        block_PD = block_outputs(drafter, torch.tensor(ids), states, [anchor])[0]
        drafted_ids, gaps = said(drafter, drafter.logits(block_PD[view.first :]))
        drafted = drafted_ids.tolist()
        seen = model_forward(model, torch.tensor([*ids, *drafted]))
        own = seen.next_ids[anchor:].tolist()
        accepted = next((k for k, token in enumerate(drafted) if token != own[k]), len(drafted))
        kept = own[: accepted + 1][: max_new_tokens - len(answer.output_ids)]
        kept = kept[: next((k + 1 for k, token in enumerate(kept) if token in stop_ids), len(kept))]
        answer.output_ids.extend(kept)
        answer.output_gaps.extend(seen.gaps[anchor : anchor + len(kept)].tolist())
        answer.drafted_blocks.append(drafted)
        answer.drafted_gaps.append(gaps.tolist())
        answer.accepted_per_forward.append(min(accepted, len(kept)))
    return answer
