"""Measure a drafter on prompts: acceptance, speed, and whether the output is still the target's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftline.data.conversations import Message
from draftline.data.dialogue import answer_slots
from draftline.data.prompts import Prompt
from draftline.data.regenerate import make_answer, render_prompt, stop_token_ids
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_interval,
    acceptance_rate_by_position,
    accepted_histogram,
    conditional_acceptance_rate_by_position,
    teacher_forced_walk,
)
from draftline.evaluate.generate import Generation, check_prompt, generate, generate_plain, tie_gap
from draftline.evaluate.pieces import text_pieces
from draftline.evaluate.result import Difference, EvaluationResult, TurnResult
from draftline.target.model import Target

Progress = Callable[[int, int], None]
"""Called with answered turns and all turns."""


@dataclass(frozen=True)
class _Turn:
    """Both decodings of one turn.

    Attributes:
        prompt: index of the prompt among all.
        turn: index of the turn in the prompt.
    """

    prompt: int
    turn: int
    asked: str
    input_ids: list[int]
    drafted: Generation
    plain: Generation
    drafted_seconds: float
    plain_seconds: float


def evaluate_prompts(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
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
    total = sum(len(answer_slots(prompt.conversation)) for prompt in prompts)
    if not total:
        raise DataError('no prompt has a user turn: give a file with lines such as {"turns": ["..."]}')
    target.require_chat_template()
    _check_prompts(target, prompts, max_new_tokens)
    # What a device or a library does only once belongs to neither of the two speeds.
    generate(target, draft_model, torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=3)
    turns: list[_Turn] = []
    for index, prompt in enumerate(prompts):
        history: list[Message] = []
        for turn, slot in enumerate(answer_slots(prompt.conversation)):
            history += slot
            turns.append(_answer(target, draft_model, prompt, (index, turn), history, max_new_tokens))
            if on_turn is not None:
                on_turn(len(turns), total)
    return _summary(target, draft_model, prompts, turns)


def _check_prompts(target: Target, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
    """Refuse, before the first is answered, a prompt whose first turn is too long; later turns depend on answers."""
    tokenizer = target.require_tokenizer()
    for prompt in prompts:
        slots = answer_slots(prompt.conversation)
        if slots:
            first = prompt.conversation.model_copy(update={"messages": slots[0]})
            ids = render_prompt(tokenizer, first, {})
            check_prompt(target, len(ids), max_new_tokens, f"{prompt.place}, {_excerpt(slots[0])},")


def _excerpt(messages: Sequence[Message]) -> str:
    """The beginning of what the user says."""
    text = " ".join(str(messages[-1].content).split())
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _answer(
    target: Target,
    draft_model: DFlashDraftModel,
    prompt: Prompt,
    place: tuple[int, int],
    history: list[Message],
    max_new_tokens: int,
) -> _Turn:
    """Decode one turn both ways, and append the answer to the history; `place` is (prompt, turn)."""
    tokenizer = target.require_tokenizer()
    stop_ids = stop_token_ids(target.model, tokenizer)
    conversation = prompt.conversation.model_copy(update={"messages": tuple(history)})
    ids = render_prompt(tokenizer, conversation, {})
    input_ids = torch.tensor([ids], device=target.device)
    started = time.perf_counter()
    drafted = generate(target, draft_model, input_ids, max_new_tokens=max_new_tokens, stop_token_ids=stop_ids)
    between = time.perf_counter()
    plain = generate_plain(target, input_ids, max_new_tokens=max_new_tokens, stop_token_ids=stop_ids)
    ended = time.perf_counter()
    answer = make_answer(tokenizer, "", drafted.output_ids, stop_ids, with_tools=bool(conversation.tools))
    asked = history[-1].content
    history.append(answer.as_message())
    return _Turn(*place, asked, ids, drafted, plain, between - started, ended - between)


def _summary(
    target: Target, draft_model: DFlashDraftModel, prompts: Sequence[Prompt], turns: Sequence[_Turn]
) -> EvaluationResult:
    num_drafted = draft_model.config.num_speculative_tokens
    counts = [Acceptance(len(turn.drafted.output_ids) - 1, turn.drafted.target_forwards) for turn in turns]
    answered = {turn.prompt for turn in turns}
    clusters = [
        Acceptance.total([count for count, turn in zip(counts, turns, strict=True) if turn.prompt == prompt])
        for prompt in sorted(answered)
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
        greedy_equal=1.0 - len({turns[difference.turn].prompt for difference in differences}) / len(answered),
        prompts=len(answered),
        differences=differences,
        teacher_forced_acceptance_length=Acceptance.total(walks).length,
        tokens_per_second=_rate([turn.drafted for turn in turns], [turn.drafted_seconds for turn in turns]),
        baseline_tokens_per_second=_rate([turn.plain for turn in turns], [turn.plain_seconds for turn in turns]),
        per_prompt=[_turn_result(target, prompts[turn.prompt], turn) for turn in turns],
    )


def _turn_result(target: Target, prompt: Prompt, turn: _Turn) -> TurnResult:
    return TurnResult(
        file=prompt.file,
        number=prompt.number,
        turn=turn.turn + 1,
        asked=turn.asked,
        input_ids=turn.input_ids,
        output_ids=turn.drafted.output_ids,
        text_pieces=text_pieces(target.require_tokenizer(), turn.drafted.output_ids),
        target_forwards=turn.drafted.target_forwards,
        accepted_per_forward=turn.drafted.accepted_per_forward,
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
