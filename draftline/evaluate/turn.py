"""Answer the turns of a dialogue, each with the drafter and without."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from draftline.data.answers import answer_slots, make_answer
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import Generation, fits, generate, generate_plain
from draftline.evaluate.settings import EvaluationSettings
from draftline.targets.model import Target, stop_token_ids


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
        answer = make_answer(tokenizer, "", drafted.output_ids, stop_ids, with_tools=bool(asked.tools)).as_message()
        history.append(answer)
        dialogue = asked.model_copy(update={"messages": tuple(history)})
        yield DecodedTurn(index, turn, dialogue, ids, drafted, plain, between - started, ended - between)


def _generator(target: Target, settings: EvaluationSettings, place: tuple[int, int]) -> torch.Generator:
    seed = np.random.SeedSequence([settings.seed, *place]).generate_state(1)[0]
    return torch.Generator(target.device).manual_seed(int(seed))
