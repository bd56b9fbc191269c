"""Hundreds of prompts: the target answers them in batches and alone, and the drafter's blocks are counted along them.

With greedy decoding the output is the target's own answer whatever the drafter says, and a block depends only on what
stands before its anchor. So the forwards that decoding would need can be counted along an answer that exists: the
teacher-forced walk takes its anchors where decoding would take them, and gives the same numbers.

    answers   in batches, greedily, without the drafter: one forward of the target a token and batch
    walk      one forward of the target over each answer, and of the drafter over all its blocks
    a few     prompts are decoded with the drafter as well, from the beginning: the same outputs, the same forwards

What is not measured is speed: that of a batch says nothing about decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from draftline.data.prompts import Prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import TargetError
from draftline.evaluate.acceptance import accepted_along, teacher_forced_streaks
from draftline.evaluate.answer import DecodedTurn, OpenDialogue, Question
from draftline.evaluate.doubts import AGREEMENT
from draftline.evaluate.generate import Generation, drafted_tokens, generate
from draftline.options import EvaluationSettings
from draftline.progress import OnProgress
from draftline.targets.model import Target, stop_token_ids
from draftline.targets.regenerate import generate_batch, largest_batch

_DECODED = 4
"""Prompts that are decoded as well: first, last, and some between."""


@dataclass(frozen=True)
class WalkedTurns:
    """Turns that were counted along the target's own answers.

    Attributes:
        turns: by prompt and turn; `drafted` is the decoder's where the prompt was decoded.
        streaks: of each turn, see `teacher_forced_streaks`.
        decoded_prompts: indices of the prompts that were decoded as well.
    """

    turns: list[DecodedTurn]
    streaks: list[list[int]]
    decoded_prompts: frozenset[int]


def walk_prompts(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    answers_at_once: int,
    on_turn: OnProgress | None = None,
) -> WalkedTurns:
    """Answer all turns of all prompts in batches, walk along them, and decode some prompts to compare.

    Raises:
        TargetError: what is decoded is not what is walked, or transformers is wrong behind a cache of this target.
    """
    checked = drafted_tokens(draft_model.config, settings.num_speculative_tokens)
    plain = list(_answered(target, prompts, settings, answers_at_once, on_turn))
    plain.sort(key=lambda turn: (turn.prompt, turn.turn))
    streaks = teacher_forced_streaks(target, draft_model, [(turn.input_ids, turn.plain.output_ids) for turn in plain])
    walked = [
        replace(turn, drafted=Generation(turn.plain.output_ids, accepted_along(of_turn, checked)))
        for turn, of_turn in zip(plain, streaks, strict=True)
    ]
    indices = sorted({turn.prompt for turn in plain})
    places = {round(i * (len(indices) - 1) / (_DECODED - 1)) for i in range(_DECODED)}
    sample = frozenset(indices[place] for place in places)
    turns = [_decoded(target, draft_model, turn, settings) if turn.prompt in sample else turn for turn in walked]
    _check_equal(walked, turns, prompts)
    return WalkedTurns(turns, streaks, sample)


def _check_equal(walked: Sequence[DecodedTurn], turns: Sequence[DecodedTurn], prompts: Sequence[Prompt]) -> None:
    """Hold the walk against the decoder, in turns whose outputs are the same; others part at a near tie, or are shown.

    Raises:
        TargetError: the decoder needs clearly more or fewer forwards.
    """
    pairs = [(a, b) for a, b in zip(walked, turns, strict=True) if a.plain.output_ids == b.drafted.output_ids]
    counted = sum(a.drafted.target_forwards for a, _ in pairs)
    decoded = sum(b.drafted.target_forwards for _, b in pairs)
    if abs(decoded - counted) > AGREEMENT * counted:
        place = next(
            prompts[a.prompt].place for a, b in pairs if a.drafted.target_forwards != b.drafted.target_forwards
        )
        raise TargetError(
            f"--fast counts {counted} forwards along the answers that were decoded as well, decoding took {decoded} "
            f"(first at {place}): what is decoded is not what was trained; run `draftline audit` on the drafter, or "
            "measure without --fast"
        )


def _answered(
    target: Target,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    answers_at_once: int,
    on_turn: OnProgress | None,
) -> Iterator[DecodedTurn]:
    """Turns as they are answered: the first of all dialogues, then the second, each with the history before it."""
    at_once = largest_batch(target.model, answers_at_once)
    dialogues = [OpenDialogue(target, prompt, settings) for prompt in prompts]
    waiting = list(_questions(list(enumerate(dialogues))))
    done, total = 0, len(waiting)
    while waiting:
        waiting.sort(key=lambda item: len(item[1].input_ids))  # little padding
        for first in range(0, len(waiting), at_once):
            batch = waiting[first : first + at_once]
            asked = [question.input_ids for _, question in batch]
            stop_ids = dialogues[batch[0][0]].stop_ids
            for row, output_ids in generate_batch(target.model, asked, stop_ids, settings.max_new_tokens):
                index, question = batch[row]
                said = dialogues[index].answered(question, output_ids)
                answer = Generation(output_ids)
                yield DecodedTurn(index, question.turn, said, question.input_ids, answer, answer, math.nan, math.nan)
                done += 1
                if on_turn is not None:
                    on_turn(done, total)
        waiting = list(_questions([(index, dialogues[index]) for index, _ in waiting]))
        total += len(waiting)


def _questions(dialogues: Sequence[tuple[int, OpenDialogue]]) -> Iterator[tuple[int, Question]]:
    for index, dialogue in dialogues:
        question = dialogue.next_question()
        if question is not None:
            yield index, question


def _decoded(
    target: Target, draft_model: DFlashDraftModel, turn: DecodedTurn, settings: EvaluationSettings
) -> DecodedTurn:
    """The same turn, decoded with the drafter."""
    drafted = generate(
        target,
        draft_model,
        torch.tensor([turn.input_ids], device=target.device),
        max_new_tokens=settings.max_new_tokens,
        stop_token_ids=stop_token_ids(target.model, target.require_tokenizer()),
        num_speculative_tokens=settings.num_speculative_tokens,
    )
    return replace(turn, drafted=drafted)
