"""From decoded turns to the result of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from draftline.data.accounting import ChatMode
from draftline.data.answers import answer_slots
from draftline.data.prompts import Prompt
from draftline.data.render import text_pieces
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_interval,
    acceptance_rate_by_position,
    acceptance_rate_intervals,
    accepted_histogram,
    conditional_acceptance_rate_by_position,
    macro_acceptance_interval,
    macro_acceptance_length,
    teacher_forced_walk,
)
from draftline.evaluate.breakdown import CountedAnswer, by_file, by_output_length, by_output_position, by_prompt
from draftline.evaluate.generate import Generation, tie_gap
from draftline.evaluate.interval import ratio_interval
from draftline.evaluate.mode import SameRendering, mode_of, mode_warnings
from draftline.evaluate.result import Counts, Difference, EvaluationResult, TurnResult
from draftline.evaluate.settings import EvaluationSettings
from draftline.evaluate.turn import DecodedTurn
from draftline.targets.model import Target, weights_fingerprint

_UNDEFINED = (math.nan, math.nan)

AGREEMENT = 0.05
"""Relative difference of decoded and teacher-forced acceptance length from which one of the two must be wrong."""


def summarise(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    turns: Sequence[DecodedTurn],
    settings: EvaluationSettings,
    trained_mode: ChatMode | None,
) -> EvaluationResult:
    """Count, divide, compare; runs the teacher-forced walk over the plain outputs if they are greedy."""
    num_drafted = draft_model.config.num_speculative_tokens
    longest = num_drafted + 1
    answers = [_counted(prompts[turn.prompt], turn) for turn in turns]
    clusters, accepted_by_prompt = by_prompt(answers), _accepted_by_prompt(answers)
    accepted = [count for counts in accepted_by_prompt for count in counts]
    walks = _walks(target, draft_model, turns) if settings.sampling.greedy else []
    differences = _differences(target, turns) if settings.sampling.greedy else []
    equal = _equal_prompts(turns, differences) if settings.sampling.greedy else []
    decoded, forced = Acceptance.total(clusters).length, Acceptance.total(walks).length
    mode = _mode(turns, settings)
    warnings = [
        *_disagreement(decoded, forced),
        *_unasked(prompts, turns, target),
        *_repeated(prompts),
        *([] if trained_mode is None else mode_warnings(trained_mode, mode, _same_rendering(target, prompts))),
    ]
    return EvaluationResult(
        acceptance_length=decoded,
        acceptance_length_interval=acceptance_interval(clusters, longest),
        acceptance_length_macro=macro_acceptance_length(clusters),
        acceptance_length_macro_interval=macro_acceptance_interval(clusters, longest),
        acceptance_rate_by_position=acceptance_rate_by_position(accepted, num_drafted),
        acceptance_rate_by_position_interval=acceptance_rate_intervals(
            accepted_by_prompt, num_drafted, conditional=False
        ),
        conditional_acceptance_rate_by_position=conditional_acceptance_rate_by_position(accepted, num_drafted),
        conditional_acceptance_rate_by_position_interval=acceptance_rate_intervals(
            accepted_by_prompt, num_drafted, conditional=True
        ),
        accepted_histogram=accepted_histogram(accepted, num_drafted),
        counts=_counts(turns, num_drafted),
        by_file=by_file(answers, longest),
        by_output_length=by_output_length(answers, longest),
        by_output_position=by_output_position(answers, longest),
        greedy_equal=sum(equal) / len(equal) if equal else math.nan,
        greedy_equal_interval=ratio_interval(equal, [1] * len(equal), (0.0, 1.0)) if equal else _UNDEFINED,
        prompts=len(clusters),
        differences=differences,
        teacher_forced_acceptance_length=forced,
        teacher_forced_acceptance_length_interval=acceptance_interval(walks, longest) if walks else _UNDEFINED,
        tokens_per_second=_rate([turn.drafted for turn in turns], [turn.drafted_seconds for turn in turns]),
        baseline_tokens_per_second=_rate([turn.plain for turn in turns], [turn.plain_seconds for turn in turns]),
        target=target.name,
        target_dtype=str(target.dtype).removeprefix("torch."),
        target_weights=weights_fingerprint(target.model),
        drafter=None,
        drafter_weights=weights_fingerprint(draft_model),
        settings=settings,
        mode=mode,
        trained_mode=trained_mode,
        warnings=warnings,
        per_prompt=[_turn_result(target, prompts[turn.prompt], turn) for turn in turns],
    )


def _counted(prompt: Prompt, turn: DecodedTurn) -> CountedAnswer:
    return CountedAnswer(turn.prompt, prompt.file, len(turn.drafted.output_ids), turn.drafted.accepted_per_forward)


def _accepted_by_prompt(answers: Sequence[CountedAnswer]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for answer in answers:
        groups.setdefault(answer.prompt, []).extend(answer.accepted_per_forward)
    return list(groups.values())


def _walks(target: Target, draft_model: DFlashDraftModel, turns: Sequence[DecodedTurn]) -> list[Acceptance]:
    """The teacher-forced walk over the plain outputs, one sum per prompt."""
    walks = teacher_forced_walk(target, draft_model, [(turn.input_ids, turn.plain.output_ids) for turn in turns])
    sums: dict[int, Acceptance] = {}
    for turn, walk in zip(turns, walks, strict=True):
        sums[turn.prompt] = sums.get(turn.prompt, Acceptance(0, 0)) + walk
    return list(sums.values())


def _counts(turns: Sequence[DecodedTurn], num_drafted: int) -> Counts:
    accepted = [count for turn in turns for count in turn.drafted.accepted_per_forward]
    return Counts(
        output_tokens=sum(len(turn.drafted.output_ids) for turn in turns),
        target_forwards=len(accepted),
        replayed_forwards=sum(turn.drafted.replayed_forwards for turn in turns),
        drafted_tokens=sum(len(block) for turn in turns for block in turn.drafted.drafted_blocks),
        verified_tokens=sum(min(count + 1, num_drafted) for count in accepted),
        accepted_tokens=sum(accepted),
    )


def _differences(target: Target, turns: Sequence[DecodedTurn]) -> list[Difference]:
    found = []
    for i, turn in enumerate(turns):
        if turn.drafted.output_ids != turn.plain.output_ids:
            input_ids = torch.tensor([turn.input_ids])
            found.append(Difference(i, *tie_gap(target, input_ids, turn.drafted.output_ids, turn.plain.output_ids)))
    return found


def _equal_prompts(turns: Sequence[DecodedTurn], differences: Sequence[Difference]) -> list[int]:
    """1 for each prompt whose outputs are those of plain greedy decoding in all turns, else 0."""
    differing = {turns[difference.turn].prompt for difference in differences}
    return [int(prompt not in differing) for prompt in sorted({turn.prompt for turn in turns})]


def _rate(generations: Sequence[Generation], seconds: Sequence[float]) -> float:
    return sum(len(generation.output_ids) for generation in generations) / sum(seconds)


def _turn_result(target: Target, prompt: Prompt, turn: DecodedTurn) -> TurnResult:
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


def _mode(turns: Sequence[DecodedTurn], settings: EvaluationSettings) -> ChatMode:
    """Of the prompts that were answered, each with its whole dialogue."""
    dialogues = list({turn.prompt: turn.dialogue for turn in turns}.values())
    return mode_of(dialogues, [settings.options_for(dialogue) for dialogue in dialogues])


def _disagreement(decoded: float, forced: float) -> list[str]:
    if abs(forced / decoded - 1) > AGREEMENT:
        return [
            f"decoded acceptance length {decoded:.2f} and teacher-forced {forced:.2f} differ by more than "
            f"{AGREEMENT:.0%}: what is decoded is not what was trained; run `draftline audit` on the drafter"
        ]
    return []


def _unasked(prompts: Sequence[Prompt], turns: Sequence[DecodedTurn], target: Target) -> list[str]:
    """Later turns that did not fit; a prompt's first turn was checked before."""
    answered = {turn.prompt: turn.turn + 1 for turn in turns}
    missing = {i: len(answer_slots(p.conversation)) - answered.get(i, 0) for i, p in enumerate(prompts)}
    if not any(missing.values()):
        return []
    first = next(i for i, count in missing.items() if count)
    return [
        f"{sum(missing.values())} turns were not asked: with what was said before they exceed the "
        f"{target.config.max_position_embeddings} positions of {target.name}; the first is turn "
        f"{answered.get(first, 0) + 1} of {prompts[first].place}: lower --max-new-tokens to have all"
    ]


def _repeated(prompts: Sequence[Prompt]) -> list[str]:
    """Equal prompts: their answers are equal, too, and say no more than one of them."""
    seen: set[str] = set()
    again: list[Prompt] = []
    for prompt in prompts:
        text = prompt.conversation.model_dump_json()
        again += [prompt] if text in seen else []
        seen.add(text)
    if not again:
        return []
    return [
        f"{len(again)} of {len(prompts)} prompts were asked before, the first is {again[0].place}: the intervals take "
        "them for further prompts and are too narrow"
    ]


def _same_rendering(target: Target, prompts: Sequence[Prompt]) -> SameRendering:
    """Compares two sets of template options by what they make of the first prompt."""
    conversation = prompts[0].conversation.model_copy(update={"template_options": {}})
    asked = conversation.model_copy(update={"messages": answer_slots(conversation)[0]})

    def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        one, other = (render_prompt(target.require_tokenizer(), asked, dict(options)) for options in (first, second))
        return one == other

    return same
