"""Measure a drafter on prompts: acceptance, speed, and whether the output is still the target's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from draftline.data.accounting import ChatMode
from draftline.data.answers import answer_slots
from draftline.data.prompts import Prompt
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.generate import check_prompt, fits, generate
from draftline.evaluate.result import EvaluationResult
from draftline.evaluate.settings import EvaluationSettings
from draftline.evaluate.summary import summarise
from draftline.evaluate.turn import DecodedTurn, answer_dialogue
from draftline.targets.model import Target

Progress = Callable[[int, int], None]
"""Called with answered turns and all turns."""


def evaluate_prompts(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    *,
    trained_mode: ChatMode | None = None,
    on_turn: Progress | None = None,
) -> EvaluationResult:
    """Answer prompts with and without the drafter.

    A prompt of several turns runs as a dialogue: the history holds the outputs of the earlier turns.

    Args:
        prompts: what the user says; answers that a conversation may carry are not used.
        trained_mode: how the drafter's training data was put to the target, to be compared with.

    Raises:
        DataError: there is nothing to answer, or a prompt does not fit.
        TemplateError: the target has no chat template, or it refuses a prompt.
    """
    prompts = [replace(p, conversation=settings.with_system_prompt(p.conversation)) for p in prompts]
    asked = [len(answer_slots(prompt.conversation)) for prompt in prompts]
    if not sum(asked):
        raise DataError('no prompt has a user turn: give a file with lines such as {"turns": ["..."]}')
    target.require_chat_template()
    _check_prompts(target, prompts, settings)
    # What a device or a library does only once belongs to neither of the two speeds.
    generate(target, draft_model, torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=3)
    turns: list[DecodedTurn] = []
    for index, prompt in enumerate(prompts):
        for turn in answer_dialogue(target, draft_model, prompt, index, settings):
            turns.append(turn)
            if on_turn is not None:
                on_turn(sum(asked[:index]) + turn.turn + 1, sum(asked))
    return summarise(target, draft_model, prompts, turns, settings, trained_mode)


def _check_prompts(target: Target, prompts: Sequence[Prompt], settings: EvaluationSettings) -> None:
    """Refuse, before the first is answered, a prompt whose first turn is too long; later turns depend on answers."""
    tokenizer = target.require_tokenizer()
    too_long: list[tuple[Prompt, int]] = []
    for prompt in prompts:
        slots = answer_slots(prompt.conversation)
        if slots:
            first = prompt.conversation.model_copy(update={"messages": slots[0]})
            length = len(render_prompt(tokenizer, first, settings.template_options))
            if not fits(target, length, settings.max_new_tokens):
                too_long.append((prompt, length))
    if too_long:
        first_prompt, length = too_long[0]
        count = f"{len(too_long)} of {len(prompts)} prompts are too long, the first: " if len(too_long) > 1 else ""
        check_prompt(target, length, settings.max_new_tokens, f"{count}{first_prompt.place}, {_excerpt(first_prompt)},")


def _excerpt(prompt: Prompt) -> str:
    """The beginning of what the user says first."""
    said = next(message.content for message in prompt.conversation.messages if message.role == "user")
    text = " ".join(said.split())
    return repr(text if len(text) <= 40 else text[:40] + "...")
