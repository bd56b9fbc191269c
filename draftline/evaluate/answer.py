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


def answer_dialogue(
    target: Target, draft_model: DFlashDraftModel, prompt: Prompt, index: int, settings: EvaluationSettings
) -> Iterator[DecodedTurn]:
    """Answer one turn after another; the history of each holds the drafted outputs of the earlier ones.

    Ends early before a turn that does not fit the target's positions with that history.
    """
    tokenizer, history = target.require_tokenizer(), list[Message]()
    stop_ids = stop_token_ids(target.model, tokenizer)
    for turn, slot in enumerate(answer_slots(prompt.conversation)):
        history += slot
        asked = prompt.conversation.model_copy(update={"messages": tuple(history)})
        ids = render_prompt(tokenizer, asked, settings.template_options)
        if not fits(target, len(ids), settings.max_new_tokens):
            return
        input_ids = torch.tensor([ids], device=target.device)
        started = time.perf_counter()
        drafted = generate(
            target,
            draft_model,
            input_ids,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=stop_ids,
            sampling=settings.sampling,
            generator=_generator(target, settings, (index, turn)),
            num_speculative_tokens=settings.num_speculative_tokens,
        )
        between = time.perf_counter()
        plain = generate_plain(
            target,
            input_ids,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=stop_ids,
            sampling=settings.sampling,
            generator=_generator(target, settings, (index, turn)),
        )
        ended = time.perf_counter()
        answer = make_answer(tokenizer, "", drafted.output_ids, stop_ids, asked).as_message()
        history.append(answer)
        dialogue = asked.model_copy(update={"messages": tuple(history)})
        yield DecodedTurn(index, turn, dialogue, ids, drafted, plain, between - started, ended - between)


def _generator(target: Target, settings: EvaluationSettings, place: tuple[int, int]) -> torch.Generator:
    seed = np.random.SeedSequence([settings.seed, *place]).generate_state(1)[0]
    return torch.Generator(target.device).manual_seed(int(seed))
