"""What `draftline evaluate` reports, and writes with `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from draftline.data.accounting import ChatMode
from draftline.evaluate.breakdown import Part
from draftline.evaluate.interval import Interval
from draftline.evaluate.settings import EvaluationSettings
from draftline.storage import without_nan


@dataclass(frozen=True)
class TurnResult:
    """One answered turn of one prompt.

    Attributes:
        file: file, data set or task of the prompt.
        number: the prompt's line or row there, from 1.
        turn: which turn of the prompt, from 1.
        asked: what the user says in it.
        input_ids: prompt with the history before it, as the target's template renders them.
        output_ids: decoded with the drafter, with the stop token.
        text_pieces: text of each output token; joined they are the output. A character that is spread over several
            tokens belongs to the last of them, the others have an empty piece.
        target_forwards: after the prompt's own.
        accepted_per_forward: drafted tokens that stood, per forward; `pieces.token_slots` tells from it which drafted
            token each output token was.
    """

    file: str
    number: int
    turn: int
    asked: str
    input_ids: list[int]
    output_ids: list[int]
    text_pieces: list[str]
    target_forwards: int
    accepted_per_forward: list[int]


@dataclass(frozen=True)
class Difference:
    """A turn whose output is not that of plain greedy decoding.

    Attributes:
        turn: index in `EvaluationResult.per_prompt`.
        token: index of the first differing token of the output.
        logit_gap: distance of the two tokens' logits; within rounding, both outputs are right.
    """

    turn: int
    token: int
    logit_gap: float


@dataclass(frozen=True)
class Counts:
    """Sums over all turns.

    Attributes:
        output_tokens: the first token of each turn included.
        target_forwards: after the prompts' own.
        replayed_forwards: further ones to roll back linear-attention layers; they give no token.
        drafted_tokens: what the drafter proposed.
        verified_tokens: drafted tokens that the target judged: those that stood, and the one after them that did not;
            behind that one, drafted tokens are thrown away unread.
        accepted_tokens: drafted tokens that are part of an output.
    """

    output_tokens: int
    target_forwards: int
    replayed_forwards: int
    drafted_tokens: int
    verified_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class EvaluationResult:
    """What `draftline evaluate` reports. All intervals are 95 %, clustered by prompt; see `interval`.

    Attributes:
        acceptance_length: decoded, bonus included; micro average: each forward counts once.
        acceptance_length_macro: the same as a mean over prompts: each prompt counts once.
        acceptance_rate_by_position: unconditional, one entry per drafted token.
        conditional_acceptance_rate_by_position: given that all drafted tokens before stood.
        accepted_histogram: forwards in which exactly 0, 1, .. drafted tokens stood.
        by_output_length, by_output_position: what the two mean is said in `breakdown`.
        greedy_equal: share of prompts whose outputs, in all turns, are identical to plain greedy decoding. NaN with
            sampling, where two right outputs differ.
        prompts: how many there were.
        differences: the turns that are not identical.
        teacher_forced_acceptance_length: the walk over plain greedy outputs, from the training forward; NaN with
            sampling, where there is no such walk.
        tokens_per_second: output tokens over wall-clock time with the drafter, the prompt's forward included.
        baseline_tokens_per_second: the same for plain decoding.
        target, target_dtype, target_weights: name, number format and fingerprint of the weights, as in run.json.
        drafter, drafter_weights: folder that it was read from, None if it was never on disk; and fingerprint.
        mode: how the prompts were put to the target, and whether it thought.
        trained_mode: the same of the drafter's training data; None if that is not recorded.
        warnings: what makes the numbers doubtful, one sentence each.
        per_prompt: one entry per turn.
    """

    acceptance_length: float
    acceptance_length_interval: Interval
    acceptance_length_macro: float
    acceptance_length_macro_interval: Interval
    acceptance_rate_by_position: list[float]
    acceptance_rate_by_position_interval: list[Interval]
    conditional_acceptance_rate_by_position: list[float]
    conditional_acceptance_rate_by_position_interval: list[Interval]
    accepted_histogram: list[int]
    counts: Counts
    by_file: list[Part]
    by_output_length: list[Part]
    by_output_position: list[Part]
    greedy_equal: float
    greedy_equal_interval: Interval
    prompts: int
    differences: list[Difference]
    teacher_forced_acceptance_length: float
    teacher_forced_acceptance_length_interval: Interval
    tokens_per_second: float
    baseline_tokens_per_second: float
    target: str
    target_dtype: str
    target_weights: str
    drafter: str | None
    drafter_weights: str
    settings: EvaluationSettings
    mode: ChatMode
    trained_mode: ChatMode | None
    warnings: list[str]
    per_prompt: list[TurnResult]

    @property
    def speedup(self) -> float:
        """How many times faster the same target decodes with the drafter."""
        return self.tokens_per_second / self.baseline_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what could not be measured is None, never NaN."""
        fields: dict[str, Any] = without_nan({**asdict(self), "speedup": self.speedup})
        return fields
