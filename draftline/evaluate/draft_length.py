"""How many drafted tokens the target should check per forward: what each number gives, and what it costs here.

    acceptance length   a walk over the target's own answers that takes at most K tokens of each streak: with greedy
                        decoding exactly what decoding with K would give. With sampling there is no such walk, and
                        1 + the sum of the first K acceptance rates stands for it.
    seconds             one round of decoding at a typical length of context, measured on this machine: a block drafted
                        whole, of which K tokens pass the head; a forward of the target over K + 1 tokens, with its
                        rollback; the kept states taken up by the drafter
    speed-up            tokens per second against rounds of one token without a drafter; the prompt's own forward, which
                        is the same in both, is left out

Blocks stay whole whatever K is, so that every slot sees what it saw in training.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.acceptance import Acceptance, walk
from draftline.evaluate.generate import GREEDY, BlockDrafter, verify_greedy
from draftline.evaluate.target_state import TargetState, open_target_state
from draftline.targets.model import Target

_ROUNDS = 5
"""Of which the fastest counts: what else the machine does only ever makes a round slower."""


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the parts of a round; entry k is of k drafted tokens.

    Attributes:
        target: forward over k + 1 tokens, and its rollback; entry 0 is plain decoding.
        drafter: drafting k tokens, and taking up the states of a kept one; entry 0 is 0.
    """

    target: tuple[float, ...]
    drafter: tuple[float, ...]

    def seconds(self, num_speculative_tokens: int) -> float:
        """One round in which so many drafted tokens are checked."""
        return self.target[num_speculative_tokens] + self.drafter[num_speculative_tokens]


@dataclass(frozen=True)
class DraftLength:
    """What checking so many drafted tokens per forward gives.

    Attributes:
        acceptance_length: bonus included.
        seconds_per_round: drafter and target.
        speedup: tokens per second over those of plain decoding, prompts left out.
    """

    num_speculative_tokens: int
    acceptance_length: float
    seconds_per_round: float
    speedup: float


def draft_lengths(acceptance_lengths: Sequence[float], costs: RoundCosts) -> list[DraftLength]:
    """One entry for every number of drafted tokens, from 1; `acceptance_lengths` starts there too."""
    found = []
    for count, length in enumerate(acceptance_lengths, start=1):
        seconds = costs.seconds(count)
        found.append(DraftLength(count, length, seconds, length * costs.seconds(0) / seconds))
    return found


def walked_lengths(streaks: Sequence[Sequence[int]], most: int) -> list[float]:
    """Acceptance length over answers if 1, 2, .. `most` drafted tokens are checked; see `teacher_forced_streaks`."""
    return [Acceptance.total([walk(answer, count) for answer in streaks]).length for count in range(1, most + 1)]


def lengths_from_rates(rates: Sequence[float]) -> list[float]:
    """The same from unconditional acceptance rates by position, as far as they go."""
    return [1.0 + sum(rates[:count]) for count in range(1, len(rates) + 1)]


@torch.no_grad()
def round_costs(target: Target, draft_model: DFlashDraftModel, context_ids: Sequence[int]) -> RoundCosts:
    """Measure rounds of greedy decoding after a context; a few seconds for a small target.

    Args:
        context_ids: a prompt and part of its answer, of typical length.

    Raises:
        TargetError: this target cannot be rolled back.
    """
    drafter = BlockDrafter(target, draft_model, GREEDY, None)
    most = drafter.num_speculative_tokens
    best = {("target", count): float("inf") for count in range(most + 1)}
    best |= {("drafter", count): float("inf") for count in range(1, most + 1)}
    with open_target_state(target, drafter.target_layer_ids) as state:
        room = target.config.max_position_embeddings - (_ROUNDS + 1) * (most + 1)  # each round keeps a token a forward
        context = torch.tensor([list(context_ids[: max(1, room)])], device=target.device)
        kept = _forward(state, context, context.shape[1])
        drafter.extend(kept)
        anchor = int(context[0, -1])
        for _ in range(_ROUNDS):
            for part, count in best:
                started = time.perf_counter()
                if part == "target":
                    _forward(state, torch.full((1, count + 1), anchor, device=target.device), 1)
                else:
                    _draft(drafter, anchor, count, kept[:, -1:])
                if target.device.type != "cpu":
                    torch.accelerator.synchronize(target.device)
                best[part, count] = min(best[part, count], time.perf_counter() - started)
    return RoundCosts(
        target=tuple(best["target", count] for count in range(most + 1)),
        drafter=(0.0, *(best["drafter", count] for count in range(1, most + 1))),
    )


def _forward(state: TargetState, input_ids: Tensor, keep: int) -> Tensor:
    """States [1, n, L*D] of new tokens, of which the first `keep` stay."""
    verified = state.forward(input_ids)
    verify_greedy(input_ids[0, 1 : len(verified.logits_nV)], verified.logits_nV)
    state.keep(keep)
    assert verified.hidden_states is not None, "a drafter has captured layers"
    return verified.hidden_states


def _draft(drafter: BlockDrafter, anchor_id: int, count: int, hidden_states: Tensor) -> None:
    drafter.num_speculative_tokens = count
    drafter.extend(hidden_states)
    drafter.propose(anchor_id).tokens_K.tolist()
