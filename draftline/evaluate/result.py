"""What `draftline evaluate` reports, and writes with `--json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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
class EvaluationResult:
    """What `draftline evaluate` reports.

    Attributes:
        acceptance_length: decoded, bonus included.
        acceptance_length_interval: 95 %, clustered by prompt.
        acceptance_rate_by_position: unconditional, one entry per drafted token.
        conditional_acceptance_rate_by_position: given that all drafted tokens before stood.
        accepted_histogram: forwards in which exactly 0, 1, .. drafted tokens stood.
        greedy_equal: share of prompts whose outputs, in all turns, are identical to plain greedy decoding.
        prompts: how many there were.
        differences: the turns that are not.
        teacher_forced_acceptance_length: the walk over plain greedy outputs, from the training forward.
        tokens_per_second: output tokens over wall-clock time with the drafter, the prompt's forward included.
        baseline_tokens_per_second: the same for plain decoding.
        per_prompt: one entry per turn.
    """

    acceptance_length: float
    acceptance_length_interval: tuple[float, float]
    acceptance_rate_by_position: list[float]
    conditional_acceptance_rate_by_position: list[float]
    accepted_histogram: list[int]
    greedy_equal: float
    prompts: int
    differences: list[Difference]
    teacher_forced_acceptance_length: float
    tokens_per_second: float
    baseline_tokens_per_second: float
    per_prompt: list[TurnResult]

    @property
    def speedup(self) -> float:
        """How many times faster the same target decodes with the drafter."""
        return self.tokens_per_second / self.baseline_tokens_per_second

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for JSON; what could not be measured is None, never NaN."""
        fields: dict[str, Any] = without_nan({**asdict(self), "speedup": self.speedup})
        return fields
