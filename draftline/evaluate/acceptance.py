"""Acceptance length, defined here and nowhere else.

    acceptance length = tokens of the output after the first / forwards of the target after the prompt's own

summed over all answers before the division. The first token comes from the prompt's forward; every later forward
gives the accepted draft tokens and one more, the bonus. A drafter that is never right thus has 1, a perfect one with
blocks of P slots has P. It is the tau of the DFlash paper and vLLM's "mean acceptance length".

Two ways to measure it that share no code beyond the model's layers:

    decoded          from `generate`: draft cache, verification, rollback
    teacher-forced   from the training forward over an answer that the target wrote alone, walked as decoding would
                     walk: anchor at the first token, count the streak, jump streak + 1, repeat

If they differ by more than a few per cent, the drafter is not served what it was trained on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftline.draft.block import Blocks, FrozenTarget, drafted_states, greedy_tokens, slot_labels
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.interval import Interval, ratio_interval
from draftline.records import CapturedSample, Sample
from draftline.targets.loop import TargetForwardLoop
from draftline.targets.model import Target

_SLOTS_PER_PRODUCT = 2048
"""Slots whose logits exist at the same time in the walk."""

_ANSWERS_AT_ONCE = 16
"""Answers whose captured states exist at the same time in the walk."""


@dataclass(frozen=True)
class Acceptance:
    """Tokens and forwards of one answer or of many; additive, divided only when read.

    Attributes:
        tokens: tokens of the output after the first one.
        forwards: forwards of the target after the prompt's own (of the walk: its jumps).
    """

    tokens: int
    forwards: int

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.tokens + other.tokens, self.forwards + other.forwards)

    @staticmethod
    def total(parts: Sequence[Acceptance]) -> Acceptance:
        """Sum of any number of parts, none included."""
        return sum(parts, Acceptance(0, 0))

    @property
    def length(self) -> float:
        """Acceptance length, bonus included; NaN where no answer had a second token."""
        return self.tokens / self.forwards if self.forwards else float("nan")


def describe_acceptance_length(length: float) -> str:
    """The number with its convention, as it is printed everywhere."""
    return f"acceptance length (with bonus): {length:.2f}"


def describe_rates(rates: Sequence[float]) -> str:
    """Rates for people, one per position; a dash where nothing was counted."""
    return " ".join("-" if math.isnan(rate) else f"{rate:.2f}" for rate in rates) or "-"


def acceptance_interval(clusters: Sequence[Acceptance], longest: int, seed: int = 0) -> Interval:
    """95 % interval of the acceptance length of all `clusters`, one per prompt; see `interval`.

    The acceptance length lies between 1 and `longest`, drafted tokens + 1.
    """
    tokens, forwards = [cluster.tokens for cluster in clusters], [cluster.forwards for cluster in clusters]
    return ratio_interval(tokens, forwards, (1.0, float(longest)), seed)


def macro_acceptance_length(clusters: Sequence[Acceptance]) -> float:
    """Mean of the prompts' own acceptance lengths: each prompt counts once, however long its answer.

    The acceptance length without further name is the micro average, in which each forward counts once: it is what a
    server's counters show. Where long answers are easier or harder than short ones, the two differ.
    """
    lengths = [cluster.length for cluster in clusters if cluster.forwards]
    return sum(lengths) / len(lengths) if lengths else float("nan")


def macro_acceptance_interval(clusters: Sequence[Acceptance], longest: int) -> Interval:
    """95 % interval of `macro_acceptance_length`."""
    lengths = [cluster.length for cluster in clusters if cluster.forwards]
    return ratio_interval(lengths, [1] * len(lengths), (1.0, float(longest)))


def acceptance_rate_by_position(accepted_per_forward: Sequence[int], num_drafted: int) -> list[float]:
    """Share of forwards in which drafted token k = 1..K stood, and so did all before it. Unconditional."""
    histogram = accepted_histogram(accepted_per_forward, num_drafted)
    forwards = sum(histogram)
    return [_ratio(sum(histogram[k:]), forwards) for k in range(1, num_drafted + 1)]


def conditional_acceptance_rate_by_position(accepted_per_forward: Sequence[int], num_drafted: int) -> list[float]:
    """The same, among forwards in which all drafted tokens before k stood; NaN where there was none."""
    histogram = accepted_histogram(accepted_per_forward, num_drafted)
    return [_ratio(sum(histogram[k:]), sum(histogram[k - 1 :])) for k in range(1, num_drafted + 1)]


def acceptance_rate_intervals(
    accepted_by_prompt: Sequence[Sequence[int]], num_drafted: int, *, conditional: bool
) -> list[Interval]:
    """95 % interval of each rate by position, unconditional or conditional; the forwards of each prompt together."""
    histograms = [accepted_histogram(accepted, num_drafted) for accepted in accepted_by_prompt]
    return [
        ratio_interval(
            [sum(histogram[k:]) for histogram in histograms],
            [sum(histogram[k - 1 if conditional else 0 :]) for histogram in histograms],
            (0.0, 1.0),
        )
        for k in range(1, num_drafted + 1)
    ]


def accepted_histogram(accepted_per_forward: Sequence[int], num_drafted: int) -> list[int]:
    """Number of forwards in which exactly 0, 1, .. K drafted tokens stood."""
    return np.bincount(np.asarray(accepted_per_forward, dtype=np.int64), minlength=num_drafted + 1).tolist()


@torch.no_grad()
def teacher_forced_walk(
    target: Target,
    draft_model: DFlashDraftModel,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = 8192,
) -> list[Acceptance]:
    """Walk over answers that the target wrote greedily and alone, with the training forward.

    Args:
        answers: prompt ids and output ids of each.
        batch_tokens: padded tokens in one forward of the target.

    Returns:
        Tokens covered and jumps taken, per answer; the last jump counts only tokens that exist.
    """
    samples = [_as_sample(i, prompt, output) for i, (prompt, output) in enumerate(answers)]
    loop = TargetForwardLoop(target, draft_model.config.target_layer_ids, "target_ids", batch_tokens)
    walks = []
    for first in range(0, len(samples), _ANSWERS_AT_ONCE):
        for captured in loop.capture(samples[first : first + _ANSWERS_AT_ONCE]):
            start, end = (len(ids) for ids in (answers[captured.sample.sample_id][0], captured.sample.input_ids))
            anchors = torch.arange(start, end - 1, device=target.device)
            walks.append(walk(streaks_of_answer(target, draft_model, captured, anchors).tolist()))
    return walks


def walk(streaks: Sequence[int]) -> Acceptance:
    """Jump from anchor to anchor, streak + 1 at a time; one streak per answer token but the last."""
    place = jumps = 0
    while place < len(streaks):
        place += streaks[place] + 1
        jumps += 1
    return Acceptance(len(streaks), jumps)


def streaks_of_answer(
    target: Target, draft_model: DFlashDraftModel, captured: CapturedSample, anchor_positions_A: Tensor
) -> Tensor:
    """Leading run of right slots at each anchor of one document, [A] int64, from the drafter's training forward."""
    anchors_at_once = max(1, _SLOTS_PER_PRODUCT // draft_model.config.block_size)
    parts = [_streaks(target, draft_model, captured, part) for part in anchor_positions_A.split(anchors_at_once)]
    return torch.cat(parts)


def _streaks(
    target: Target, draft_model: DFlashDraftModel, captured: CapturedSample, anchor_positions_A: Tensor
) -> Tensor:
    weight = draft_model.fc.weight
    frozen = FrozenTarget.of(target, draft_model.kept_ids, weight)
    assert captured.target_ids_S is not None, "the walk captures with send = target_ids"
    blocks = Blocks.of_document(captured.sample.input_ids.to(target.device), anchor_positions_A, draft_model.config)
    hidden_APD = drafted_states(draft_model, captured.hidden_states_SLD[None].to(weight), blocks, frozen.embed)
    said_AP = greedy_tokens(hidden_APD.to(target.device), frozen.head)
    label_AP = slot_labels(blocks.predicted_AP, captured.target_ids_S.to(target.device), shift=-1)
    right_AP = (said_AP == label_AP) & blocks.supervised_AP
    return right_AP[:, draft_model.config.first_predicting_slot :].long().cumprod(1).sum(1)


def _as_sample(sample_id: int, prompt: Sequence[int], output: Sequence[int]) -> Sample:
    ids = torch.tensor([*prompt, *output], dtype=torch.int64)
    return Sample(sample_id, ids, torch.arange(len(ids)) >= len(prompt))


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
