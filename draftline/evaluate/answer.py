"""Prompts answered through the target's chat template: one with a drafter, or a dialogue with it and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from draftline.data.answers import answer_slots, make_answer
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.generate import Generation, fits, generate, generate_plain
from draftline.options import EvaluationSettings
from draftline.targets.model import Target, stop_token_ids


@dataclass(frozen=True)
class PromptAnswer:
    """A decoded answer.

    Attributes:
        text: without special tokens.
        output_ids: with the stop token, if the answer ended by itself.
        target_forwards: after the prompt's own.
        accepted_per_forward: drafted tokens that stood, per forward.
    """

    text: str
    output_ids: list[int]
    target_forwards: int
    accepted_per_forward: list[int]

    def counts(self) -> str:
        """One line for people."""
        accepted = sum(self.accepted_per_forward)
        return f"{len(self.output_ids)} tokens, {self.target_forwards} target forwards, {accepted} drafted tokens kept"

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json`."""
        return asdict(self)


def answer_prompt(
    target: Target,
    draft_model: DFlashDraftModel,
    text: str,
    settings: EvaluationSettings,
) -> PromptAnswer:
    """Answer what a user says, through the target's chat template.

    Raises:
        DataError: the prompt is empty or too long.
        TemplateError: the target has no chat template.
    """
    if not text.strip():
        raise DataError("the prompt is empty: give a text with --prompt")
    target.require_chat_template()
    tokenizer = target.require_tokenizer()
    asked = Conversation(messages=(Message(role="user", content=text),)).with_system_prompt(settings.system_prompt)
    ids = render_prompt(tokenizer, asked, settings.template_options)
    generation = generate(
        target,
        draft_model,
        torch.tensor([ids], device=target.device),
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=stop_token_ids(target.model, tokenizer),
        sampling=settings.sampling,
        generator=torch.Generator(target.device).manual_seed(settings.seed),
        num_speculative_tokens=settings.num_speculative_tokens,
    )
    return PromptAnswer(
        text=str(tokenizer.decode(generation.output_ids, skip_special_tokens=True)),
        output_ids=generation.output_ids,
        target_forwards=generation.target_forwards,
        accepted_per_forward=generation.accepted_per_forward,
    )


@dataclass(frozen=True)
class DecodedTurn:
    """Both decodings of one turn.

    Attributes:
        prompt: index of the prompt among all.
        turn: index of the turn in the prompt.
        dialogue: everything said up to and with the drafted answer.
    """

    prompt: int
    turn: int
    dialogue: Conversation
    input_ids: list[int]
    drafted: Generation
    plain: Generation
    drafted_seconds: float
    plain_seconds: float

    @property
    def asked(self) -> str:
        """What the user says in it."""
        return self.dialogue.messages[-2].content


@dataclass(frozen=True)
class Question:
    """A turn that is to be answered.

    Attributes:
        turn: its index in the prompt.
        asked: everything said before the answer.
        input_ids: the same, as the target's template renders it.
    """

    turn: int
    asked: Conversation
    input_ids: list[int]


class OpenDialogue:
    """A prompt whose turns are answered one by one, each with the outputs of the earlier ones before it."""

    def __init__(self, target: Target, prompt: Prompt, settings: EvaluationSettings) -> None:
        self.stop_ids = stop_token_ids(target.model, target.require_tokenizer())
        self._target, self._settings, self._conversation = target, settings, prompt.conversation
        self._slots = list(enumerate(answer_slots(prompt.conversation)))
        self._history: list[Message] = []

    def next_question(self) -> Question | None:
        """The next turn; None where there is no more, or none that fits the target's positions with its history."""
        if not self._slots:
            return None
        turn, slot = self._slots.pop(0)
        asked = self._conversation.model_copy(update={"messages": (*self._history, *slot)})
        ids = render_prompt(self._target.require_tokenizer(), asked, self._settings.template_options)
        return Question(turn, asked, ids) if fits(self._target, len(ids), self._settings.max_new_tokens) else None

    def answered(self, question: Question, output_ids: list[int]) -> Conversation:
        """Take the output into the history; the dialogue up to and with it."""
        tokenizer = self._target.require_tokenizer()
        answer = make_answer(tokenizer, "", output_ids, self.stop_ids, question.asked).as_message()
        self._history = [*question.asked.messages, answer]
        return question.asked.model_copy(update={"messages": tuple(self._history)})


def answer_dialogue(
    target: Target, draft_model: DFlashDraftModel, prompt: Prompt, index: int, settings: EvaluationSettings
) -> Iterator[DecodedTurn]:
    """Answer one turn after another with the drafter and without; the history holds the drafted outputs.

    Ends early before a turn that does not fit the target's positions with that history.
    """
    dialogue = OpenDialogue(target, prompt, settings)
    while (question := dialogue.next_question()) is not None:
        input_ids = torch.tensor([question.input_ids], device=target.device)
        started = time.perf_counter()
        drafted = generate(
            target,
            draft_model,
            input_ids,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=dialogue.stop_ids,
            sampling=settings.sampling,
            generator=_generator(target, settings, (index, question.turn)),
            num_speculative_tokens=settings.num_speculative_tokens,
        )
        between = time.perf_counter()
        plain = generate_plain(
            target,
            input_ids,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=dialogue.stop_ids,
            sampling=settings.sampling,
            generator=_generator(target, settings, (index, question.turn)),
        )
        ended = time.perf_counter()
        said = dialogue.answered(question, drafted.output_ids)
        seconds = (between - started, ended - between)
        yield DecodedTurn(index, question.turn, said, question.input_ids, drafted, plain, *seconds)


def _generator(target: Target, settings: EvaluationSettings, place: tuple[int, int]) -> torch.Generator:
    seed = np.random.SeedSequence([settings.seed, *place]).generate_state(1)[0]
    return torch.Generator(target.device).manual_seed(int(seed))
