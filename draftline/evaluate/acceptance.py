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

Every figure is a ratio of two sums over prompts, and has a 95 % interval by prompts and not by forwards: forwards of
one answer resemble each other. It is a bootstrap-t: prompts are drawn again and again, and each draw tells how far its
ratio lies from the measured one in units of the draw's own standard error. The percentile bootstrap, which is simpler,
is too narrow with few prompts (`tests/evaluate/test_acceptance.py` counts both).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftline.draft.block import Blocks, FrozenTarget, drafted_states, greedy_tokens, slot_labels
from draftline.draft.model import DFlashDraftModel
from draftline.records import CapturedSample, Sample
from draftline.targets.loop import BATCH_TOKENS, TargetForwardLoop
from draftline.targets.model import Target

Interval = tuple[float, float]

Capture = Callable[[Sequence[Sample]], list[CapturedSample]]
"""What gives states of samples."""

CHUNK_SIZE = 2048
"""Slots that the walk drafts at the same time."""

_ANSWERS_AT_ONCE = 16
"""Answers whose captured states exist at the same time in the walk."""

_RESAMPLES = 1000
_TAIL, _TAIL_OF_FEW, _LEAST_TAIL = 0.02, 0.1, 0.005
"""Share of draws beyond each end: the first, less the second over the number of prompts, at least the third. With 0.025
throughout the intervals held the truth in 92.5 to 95 % of simulations, least often with few prompts of skewed
difficulty; a promise of 95 % should be kept there too."""
_DRAWN_AT_ONCE = 2_000_000
"""Drawn prompts whose sums are in memory at the same time."""

_ROUNDING = 1e-12


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

    @staticmethod
    def by_prompt(counted: Iterable[tuple[int, Acceptance]]) -> list[Acceptance]:
        """Sums by the prompt that each part is of, in the order in which prompts first come."""
        sums: dict[int, Acceptance] = {}
        for prompt, part in counted:
            sums[prompt] = sums.get(prompt, Acceptance(0, 0)) + part
        return list(sums.values())

    @property
    def length(self) -> float:
        """Acceptance length, bonus included; NaN where no answer had a second token."""
        return self.tokens / self.forwards if self.forwards else float("nan")


def describe_acceptance_length(length: float) -> str:
    """The number with its convention, as it is printed everywhere."""
    return f"acceptance length (with bonus): {length:.2f}"


def describe_figure(value: float) -> str:
    """A length or rate for people; a dash where nothing was counted."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def describe_interval(interval: Interval | None) -> str:
    """An interval for people; a dash where it is not known."""
    return "-" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}"


def acceptance_interval(clusters: Sequence[Acceptance], longest: int, seed: int = 0) -> Interval:
    """95 % interval of the acceptance length of all `clusters`, one per prompt; see `ratio_interval`.

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


def acceptance_rate_by_position(
    accepted_per_forward: Sequence[int], num_drafted: int, *, conditional: bool
) -> list[float]:
    """Share of forwards in which drafted token k = 1..K stood, and so did all before it.

    Conditional: among forwards in which all drafted tokens before k stood; NaN where there was none.
    """
    return [_ratio(*counts) for counts in _stood(accepted_per_forward, num_drafted, conditional)]


def acceptance_rate_intervals(
    accepted_by_prompt: Sequence[Sequence[int]], num_drafted: int, *, conditional: bool
) -> list[Interval]:
    """95 % interval of each rate by position; the forwards of each prompt together."""
    by_prompt = [_stood(accepted, num_drafted, conditional) for accepted in accepted_by_prompt]
    return [
        ratio_interval([stood[k][0] for stood in by_prompt], [stood[k][1] for stood in by_prompt], (0.0, 1.0))
        for k in range(num_drafted)
    ]


def accepted_histogram(accepted_per_forward: Sequence[int], num_drafted: int) -> list[int]:
    """Number of forwards in which exactly 0, 1, .. K drafted tokens stood."""
    return np.bincount(np.asarray(accepted_per_forward, dtype=np.int64), minlength=num_drafted + 1).tolist()


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], bounds: Interval, seed: int = 0
) -> Interval:
    """95 % interval of sum(numerators) / sum(denominators), one entry of each per prompt, cut to what is possible.

    Entries without a denominator are left out. With fewer than two prompts nothing is known about their spread and the
    interval is `bounds`. Where all prompts have the same ratio, at most 3 in `n` others can have escaped (the rule of
    three), and those could lie at a bound.
    """
    pairs = np.array([(a, b) for a, b in zip(numerators, denominators, strict=True) if b], dtype=np.float64)
    if len(pairs) < 2:
        return bounds
    sums = _sums(pairs).sum(0)[None]
    ratio, error = float(sums[0, 0] / sums[0, 1]), float(_standard_error(sums, len(pairs))[0])
    low, high = bounds
    if error == 0.0:
        unseen = min(1.0, 3.0 / len(pairs))
        return ratio - unseen * (ratio - low), ratio + unseen * (high - ratio)
    drawn = _resample(_sums(pairs), np.random.default_rng(seed))
    errors = _standard_error(drawn, len(pairs))
    distances = drawn[:, 0] / drawn[:, 1] - ratio
    # A draw without spread says that the error can be anything: infinitely many of its own, on the side where it lies.
    studentised = np.divide(distances, errors, out=np.copysign(np.inf, distances), where=errors > 0)
    tail = max(_TAIL - _TAIL_OF_FEW / len(pairs), _LEAST_TAIL)
    left, right = np.quantile(studentised, [tail, 1 - tail], method="nearest")
    return max(low, ratio - float(right) * error), min(high, ratio - float(left) * error)


def teacher_forced_walk(
    target: Target,
    draft_model: DFlashDraftModel,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = BATCH_TOKENS,
    capture: Capture | None = None,
) -> list[Acceptance]:
    """Walk over answers that the target wrote greedily and alone, with the training forward.

    Args:
        answers: prompt ids and output ids of each.
        batch_tokens: padded tokens in one forward of the target.
        capture: gives the states of samples, numbered by answer, with the target's ids; none: the target itself.

    Returns:
        Tokens covered and jumps taken, per answer; the last jump counts only tokens that exist.
    """
    return [walk(streaks) for streaks in teacher_forced_streaks(target, draft_model, answers, batch_tokens, capture)]


@torch.no_grad()
def teacher_forced_streaks(
    target: Target,
    draft_model: DFlashDraftModel,
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    batch_tokens: int = BATCH_TOKENS,
    capture: Capture | None = None,
) -> list[list[int]]:
    """How many drafted tokens in a row are right, from each token of each answer but its last; arguments as above."""
    samples = [_as_sample(i, prompt, output) for i, (prompt, output) in enumerate(answers)]
    layers = draft_model.config.target_layer_ids
    capture = capture or TargetForwardLoop(target, layers, "target_ids", batch_tokens).capture
    streaks = []
    for first in range(0, len(samples), _ANSWERS_AT_ONCE):
        for captured in capture(samples[first : first + _ANSWERS_AT_ONCE]):
            start, end = (len(ids) for ids in (answers[captured.sample.sample_id][0], captured.sample.input_ids))
            anchors = torch.arange(start, end - 1, device=target.device)
            streaks.append(_streaks_of_answer(target, draft_model, captured, anchors).tolist())
    return streaks


def split_last_answer(sample: Sample) -> tuple[list[int], list[int]]:
    """Ids before the last answer of a conversation, and of that answer; both empty if there is no answer."""
    supervised = sample.loss_mask.tolist()
    end = len(supervised) - supervised[::-1].index(True) if any(supervised) else 0
    start = end
    while start and supervised[start - 1]:
        start -= 1
    ids = sample.input_ids.tolist()
    return ids[:start], ids[start:end]


def walk(streaks: Sequence[int], num_speculative_tokens: int | None = None) -> Acceptance:
    """Tokens after the first and the forwards that give them; arguments as in `accepted_along`."""
    return Acceptance(len(streaks), len(accepted_along(streaks, num_speculative_tokens)))


def accepted_along(streaks: Sequence[int], num_speculative_tokens: int | None = None) -> list[int]:
    """Drafted tokens that stand in each forward: jump from anchor to anchor, streak + 1 at a time.

    Args:
        streaks: one per answer token but the last.
        num_speculative_tokens: how many tokens the target checks per forward; none: all.
    """
    place, accepted = 0, list[int]()
    while place < len(streaks):
        accepted.append(min(streaks[place], num_speculative_tokens or streaks[place]))
        place += accepted[-1] + 1
    return accepted


def _streaks_of_answer(
    target: Target, draft_model: DFlashDraftModel, captured: CapturedSample, anchor_positions_A: Tensor
) -> Tensor:
    """Leading run of right slots at each anchor of one document, [A] int64, from the drafter's training forward."""
    anchors_at_once = max(1, CHUNK_SIZE // draft_model.config.block_size)
    frozen = FrozenTarget.of(target, draft_model.kept_ids, draft_model.fc.weight)
    parts = [_streaks(frozen, draft_model, captured, part) for part in anchor_positions_A.split(anchors_at_once)]
    return torch.cat(parts)


def _streaks(
    frozen: FrozenTarget, draft_model: DFlashDraftModel, captured: CapturedSample, anchor_positions_A: Tensor
) -> Tensor:
    assert captured.target_ids_S is not None, "the walk captures with send = target_ids"
    device = anchor_positions_A.device
    blocks = Blocks.of_document(captured.sample.input_ids.to(device), anchor_positions_A, draft_model.config)
    states = captured.hidden_states_SLD[None].to(draft_model.fc.weight)
    drafted_APD = drafted_states(draft_model, states, blocks, frozen.embed).to(device)
    label_AP = slot_labels(blocks.predicted_AP, captured.target_ids_S.to(device), shift=-1)
    # The head costs more than the drafter, and behind a wrong slot nobody asks what is said: one slot at a time.
    streak_A = torch.zeros_like(anchor_positions_A)
    going = torch.arange(len(streak_A), device=device)
    for slot in range(draft_model.config.first_predicting_slot, draft_model.config.block_size):
        going = going[blocks.supervised_AP[going, slot]]
        said = greedy_tokens(drafted_APD[going, slot], frozen.head)
        going = going[said == label_AP[going, slot]]
        streak_A[going] += 1
    return streak_A


def _as_sample(sample_id: int, prompt: Sequence[int], output: Sequence[int]) -> Sample:
    ids = torch.tensor([*prompt, *output], dtype=torch.int64)
    return Sample(sample_id, ids, torch.arange(len(ids)) >= len(prompt))


def _stood(accepted_per_forward: Sequence[int], num_drafted: int, conditional: bool) -> list[tuple[int, int]]:
    """For each drafted token: forwards in which it and all before it stood, and forwards that this is a share of."""
    histogram = accepted_histogram(accepted_per_forward, num_drafted)
    reached = [sum(histogram[k:]) for k in range(num_drafted + 1)]
    return [(reached[k], reached[k - 1 if conditional else 0]) for k in range(1, num_drafted + 1)]


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")


def _sums(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """[n, 5]: numerator a, denominator b, and the products aa, ab, bb, whose sums give ratio and error."""
    a, b = pairs.T
    return np.stack([a, b, a * a, a * b, b * b], axis=1)


def _standard_error(sums: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Of the ratio R of sums over `count` prompts, by linearisation: residuals a - R b, in units of the mean b."""
    a, b, aa, ab, bb = sums.T
    ratio = a / b
    squares = aa - 2 * ratio * ab + ratio * ratio * bb
    squares[squares < _ROUNDING * aa] = 0.0
    error: NDArray[np.float64] = np.sqrt(squares * count / (count - 1)) / b
    return error


def _resample(rows: NDArray[np.float64], generator: np.random.Generator) -> NDArray[np.float64]:
    """Sums of as many rows as there are, drawn with replacement; one line per resample."""
    n = len(rows)
    at_once = max(1, _DRAWN_AT_ONCE // n)
    parts = []
    for first in range(0, _RESAMPLES, at_once):
        count = min(at_once, _RESAMPLES - first)
        drawn = generator.integers(n, size=(count, n)) + np.arange(count)[:, None] * n
        parts.append(np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n) @ rows)
    return np.concatenate(parts)
