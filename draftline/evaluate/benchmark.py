"""Measure a drafter on prompts: acceptance, speed, and whether the output is still the target's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from draftline.data.conversations import Conversation, Message
from draftline.data.dialogue import answer_slots
from draftline.data.regenerate import make_answer, render_prompt, stop_token_ids
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_interval,
    acceptance_rate_by_position,
    accepted_histogram,
    conditional_acceptance_rate_by_position,
    describe_acceptance_length,
    teacher_forced_walk,
)
from draftline.evaluate.generate import Generation, check_prompt, generate, generate_plain, tie_gap
from draftline.storage import without_nan
from draftline.target.model import Target

Progress = Callable[[int, int], None]
"""Called with answered turns and all turns."""


@dataclass(frozen=True)
class TurnResult:
    """One answered turn of one prompt, as it is written to the JSON file."""

    input_ids: list[int]
    output_ids: list[int]
    target_forwards: int


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


@dataclass(frozen=True)
class _Turn:
    """Both decodings of one turn, and the index of the prompt it belongs to."""

    prompt: int
    input_ids: list[int]
    drafted: Generation
    plain: Generation
    drafted_seconds: float
    plain_seconds: float


def evaluate_prompts(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Conversation],
    *,
    max_new_tokens: int,
    on_turn: Progress | None = None,
) -> EvaluationResult:
    """Answer prompts greedily with and without the drafter.

    A prompt of several turns runs as a dialogue: the history holds the outputs of the earlier turns.

    Args:
        prompts: what the user says; answers that a conversation may carry are not used.
        max_new_tokens: longest output of a turn.

    Raises:
        DataError: there is nothing to answer, or a prompt does not fit.
        TemplateError: the target has no chat template.
    """
    total = sum(len(answer_slots(prompt)) for prompt in prompts)
    if not total:
        raise DataError('no prompt has a user turn: give a file with lines such as {"turns": ["..."]}')
    target.require_chat_template()
    _check_prompts(target, prompts, max_new_tokens)
    # What a device or a library does only once belongs to neither of the two speeds.
    generate(target, draft_model, torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=3)
    turns: list[_Turn] = []
    for index, prompt in enumerate(prompts):
        history: list[Message] = []
        for slot in answer_slots(prompt):
            history += slot
            turns.append(_answer(target, draft_model, prompt, index, history, max_new_tokens))
            if on_turn is not None:
                on_turn(len(turns), total)
    return _summary(target, draft_model, turns)


def _check_prompts(target: Target, prompts: Sequence[Conversation], max_new_tokens: int) -> None:
    """Refuse, before the first is answered, a prompt whose first turn is too long; later turns depend on answers."""
    tokenizer = target.require_tokenizer()
    for number, prompt in enumerate(prompts, start=1):
        slots = answer_slots(prompt)
        if slots:
            ids = render_prompt(tokenizer, prompt.model_copy(update={"messages": tuple(slots[0])}), {})
            check_prompt(target, len(ids), max_new_tokens, f"prompt {number}, {_excerpt(slots[0])},")


def _excerpt(messages: Sequence[Message]) -> str:
    """The beginning of what the user says."""
    text = " ".join(str(messages[-1].content).split())
    return repr(text if len(text) <= 40 else text[:40] + "...")


def result_table(result: EvaluationResult, draft_name: str) -> Table:
    """The result for people."""
    table = Table(title=f"{draft_name}: {describe_acceptance_length(result.acceptance_length)}", title_justify="left")
    table.add_column("measured")
    table.add_column("value", justify="right")
    low, high = result.acceptance_length_interval
    by_position = _rates(result.acceptance_rate_by_position)
    conditional = _rates(result.conditional_acceptance_rate_by_position)
    table.add_row(describe_acceptance_length(result.acceptance_length), f"95 % by prompt: {low:.2f} to {high:.2f}")
    table.add_row("teacher-forced acceptance length", f"{result.teacher_forced_acceptance_length:.2f}")
    table.add_row("acceptance rate by position", by_position)
    table.add_row("the same, if all before stood", conditional)
    table.add_row("forwards with 0, 1, .. accepted", " ".join(map(str, result.accepted_histogram)))
    table.add_row("outputs equal to plain greedy", f"{result.greedy_equal:.1%} of {result.prompts}")
    table.add_row("tokens per second with drafter", f"{result.tokens_per_second:.1f}")
    table.add_row("tokens per second without", f"{result.baseline_tokens_per_second:.1f}")
    table.add_row("speed-up", f"{result.speedup:.2f}")
    for difference in result.differences:
        table.add_row(
            f"turn {difference.turn} differs from token {difference.token}", f"logit gap {difference.logit_gap:.2g}"
        )
    return table


def _rates(rates: Sequence[float]) -> str:
    """Rates for people; a dash where nothing was counted."""
    return " ".join("-" if math.isnan(rate) else f"{rate:.2f}" for rate in rates)


def _answer(
    target: Target,
    draft_model: DFlashDraftModel,
    prompt: Conversation,
    index: int,
    history: list[Message],
    max_new_tokens: int,
) -> _Turn:
    """Decode one turn both ways, and append the answer to the history."""
    tokenizer = target.require_tokenizer()
    stop_ids = stop_token_ids(target.model, tokenizer)
    ids = render_prompt(tokenizer, prompt.model_copy(update={"messages": tuple(history)}), {})
    input_ids = torch.tensor([ids], device=target.device)
    started = time.perf_counter()
    drafted = generate(target, draft_model, input_ids, max_new_tokens=max_new_tokens, stop_token_ids=stop_ids)
    between = time.perf_counter()
    plain = generate_plain(target, input_ids, max_new_tokens=max_new_tokens, stop_token_ids=stop_ids)
    ended = time.perf_counter()
    answer = make_answer(tokenizer, "", drafted.output_ids, stop_ids, with_tools=bool(prompt.tools))
    history.append(answer.as_message())
    return _Turn(index, ids, drafted, plain, between - started, ended - between)


def _summary(target: Target, draft_model: DFlashDraftModel, turns: Sequence[_Turn]) -> EvaluationResult:
    num_drafted = draft_model.config.num_speculative_tokens
    counts = [Acceptance(len(turn.drafted.output_ids) - 1, turn.drafted.target_forwards) for turn in turns]
    prompts = {turn.prompt for turn in turns}
    clusters = [
        Acceptance.total([count for count, turn in zip(counts, turns, strict=True) if turn.prompt == prompt])
        for prompt in sorted(prompts)
    ]
    accepted = [count for turn in turns for count in turn.drafted.accepted_per_forward]
    walks = teacher_forced_walk(target, draft_model, [(turn.input_ids, turn.plain.output_ids) for turn in turns])
    differences = _differences(target, turns)
    return EvaluationResult(
        acceptance_length=Acceptance.total(counts).length,
        acceptance_length_interval=acceptance_interval(clusters, num_drafted + 1),
        acceptance_rate_by_position=acceptance_rate_by_position(accepted, num_drafted),
        conditional_acceptance_rate_by_position=conditional_acceptance_rate_by_position(accepted, num_drafted),
        accepted_histogram=accepted_histogram(accepted, num_drafted),
        greedy_equal=1.0 - len({turns[difference.turn].prompt for difference in differences}) / len(prompts),
        prompts=len(prompts),
        differences=differences,
        teacher_forced_acceptance_length=Acceptance.total(walks).length,
        tokens_per_second=_rate([turn.drafted for turn in turns], [turn.drafted_seconds for turn in turns]),
        baseline_tokens_per_second=_rate([turn.plain for turn in turns], [turn.plain_seconds for turn in turns]),
        per_prompt=[
            TurnResult(turn.input_ids, turn.drafted.output_ids, turn.drafted.target_forwards) for turn in turns
        ],
    )


def _differences(target: Target, turns: Sequence[_Turn]) -> list[Difference]:
    found = []
    for i, turn in enumerate(turns):
        if turn.drafted.output_ids != turn.plain.output_ids:
            input_ids = torch.tensor([turn.input_ids])
            found.append(Difference(i, *tie_gap(target, input_ids, turn.drafted.output_ids, turn.plain.output_ids)))
    return found


def _rate(generations: Sequence[Generation], seconds: Sequence[float]) -> float:
    return sum(len(generation.output_ids) for generation in generations) / sum(seconds)
