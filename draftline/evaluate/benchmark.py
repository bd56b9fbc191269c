"""Measure a drafter on prompts: acceptance, speed, and whether the output is still the target's own.

All prompts are answered first, with the drafter and without (or some of them, see `fast`); then turns are counted,
divided and compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from draftline.data.accounting import ChatMode
from draftline.data.answers import answer_slots
from draftline.data.prompts import Prompt
from draftline.data.render import text_pieces
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import DataError
from draftline.evaluate.acceptance import (
    Acceptance,
    acceptance_interval,
    acceptance_rate_by_position,
    acceptance_rate_intervals,
    accepted_histogram,
    macro_acceptance_interval,
    macro_acceptance_length,
    ratio_interval,
    teacher_forced_streaks,
    walk,
)
from draftline.evaluate.answer import DecodedTurn, answer_dialogue
from draftline.evaluate.doubts import disagreement, mode_of, mode_warnings, repeated, same_rendering, unasked
from draftline.evaluate.draft_length import (
    DraftLength,
    draft_lengths,
    lengths_from_rates,
    round_costs,
    walked_lengths,
)
from draftline.evaluate.fast import WalkedTurns, walk_prompts
from draftline.evaluate.generate import Generation, check_prompt, drafted_tokens, fits, generate, tie_gap
from draftline.evaluate.result import (
    CountedAnswer,
    Counts,
    EvaluationResult,
    OutputDifference,
    TurnResult,
    by_file,
    by_output_length,
    by_output_position,
)
from draftline.options import EvaluationSettings
from draftline.progress import OnProgress
from draftline.targets.model import Target, weights_fingerprint

_UNDEFINED = (math.nan, math.nan)


def evaluate_prompts(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    *,
    trained_mode: ChatMode | None = None,
    on_turn: OnProgress | None = None,
    answers_at_once: int | None = None,
) -> EvaluationResult:
    """Answer prompts with and without the drafter.

    A prompt of several turns runs as a dialogue: the history holds the outputs of the earlier turns.

    Args:
        prompts: what the user says; answers that a conversation may carry are not used.
        trained_mode: how the drafter's training data was put to the target, to be compared with.
        answers_at_once: answer without the drafter, in batches of so many, and count its blocks along the answers; see
            `fast`. None: decode everything, one prompt at a time.

    Raises:
        ConfigError: sampling with `answers_at_once`.
        DataError: there is nothing to answer, or a prompt does not fit.
        TemplateError: the target has no chat template, or it refuses a prompt.
    """
    drafted_tokens(draft_model.config, settings.num_speculative_tokens)  # refused before anything is answered
    prompts = [replace(p, conversation=p.conversation.with_system_prompt(settings.system_prompt)) for p in prompts]
    asked = [len(answer_slots(prompt.conversation)) for prompt in prompts]
    if not sum(asked):
        raise DataError('no prompt has a user turn: give a file with lines such as {"turns": ["..."]}')
    target.require_chat_template()
    _check_prompts(target, prompts, settings)
    # What a device or a library does only once belongs to neither of the two speeds.
    generate(target, draft_model, torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=3)
    if answers_at_once is not None:
        walked = walk_prompts(target, draft_model, prompts, settings, answers_at_once, on_turn)
        return summarise(target, draft_model, prompts, walked.turns, settings, trained_mode, walked)
    turns: list[DecodedTurn] = []
    for index, prompt in enumerate(prompts):
        for turn in answer_dialogue(target, draft_model, prompt, index, settings):
            turns.append(turn)
            if on_turn is not None:
                on_turn(sum(asked[:index]) + turn.turn + 1, sum(asked))
    return summarise(target, draft_model, prompts, turns, settings, trained_mode)


def summarise(
    target: Target,
    draft_model: DFlashDraftModel,
    prompts: Sequence[Prompt],
    turns: Sequence[DecodedTurn],
    settings: EvaluationSettings,
    trained_mode: ChatMode | None,
    walked: WalkedTurns | None = None,
) -> EvaluationResult:
    """Count, divide, compare; greedy outputs are walked over, unless that was done and is given as `walked`."""
    num_drafted = drafted_tokens(draft_model.config, settings.num_speculative_tokens)
    longest = num_drafted + 1
    answers = _counted(prompts, turns)
    clusters = Acceptance.by_prompt((answer.prompt, answer.acceptance) for answer in answers)
    by_prompt = _accepted_by_prompt(answers)
    accepted = [count for counts in by_prompt for count in counts]
    conditional_intervals = acceptance_rate_intervals(by_prompt, num_drafted, conditional=True)
    rates = acceptance_rate_by_position(accepted, num_drafted, conditional=False)
    greedy = settings.sampling.greedy
    streaks = walked.streaks if walked is not None else _streaks(target, draft_model, turns) if greedy else []
    walks, mode = _walks(turns, streaks, num_drafted), mode_of(turns, settings.template_options)
    decoded_prompts = {turn.prompt for turn in turns} if walked is None else walked.decoded_prompts
    differences = _differences(target, turns) if greedy else []
    equal = _equal_prompts(decoded_prompts, turns, differences) if greedy else []
    length, forced = Acceptance.total(clusters).length, Acceptance.total(walks).length
    return EvaluationResult(
        acceptance_length=length,
        acceptance_length_interval=acceptance_interval(clusters, longest),
        acceptance_length_macro=macro_acceptance_length(clusters),
        acceptance_length_macro_interval=macro_acceptance_interval(clusters, longest),
        acceptance_rate_by_position=rates,
        acceptance_rate_by_position_interval=acceptance_rate_intervals(by_prompt, num_drafted, conditional=False),
        conditional_acceptance_rate_by_position=acceptance_rate_by_position(accepted, num_drafted, conditional=True),
        conditional_acceptance_rate_by_position_interval=conditional_intervals,
        accepted_histogram=accepted_histogram(accepted, num_drafted),
        by_draft_length=_by_draft_length(target, draft_model, turns, streaks, rates),
        counts=_counts(turns, num_drafted),
        by_file=by_file(answers, longest),
        by_output_length=by_output_length(answers, longest),
        by_output_position=by_output_position(answers, longest),
        greedy_equal=sum(equal) / len(equal) if equal else math.nan,
        greedy_equal_interval=ratio_interval(equal, [1] * len(equal), (0.0, 1.0)) if equal else _UNDEFINED,
        prompts=len(clusters),
        decoded_prompts=len(decoded_prompts),
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
        warnings=[*disagreement(length, forced), *_doubts(target, prompts, turns, mode, trained_mode)],
        per_prompt=[_turn_result(target, prompts[turn.prompt], turn) for turn in turns],
    )


def _doubts(
    target: Target, prompts: Sequence[Prompt], turns: Sequence[DecodedTurn], mode: ChatMode, trained: ChatMode | None
) -> list[str]:
    """What the prompts themselves make doubtful."""
    other_mode = [] if trained is None else mode_warnings(trained, mode, same_rendering(target, prompts[0]))
    return [*unasked(prompts, turns, target), *repeated(prompts), *other_mode]


def _counted(prompts: Sequence[Prompt], turns: Sequence[DecodedTurn]) -> list[CountedAnswer]:
    return [
        CountedAnswer(t.prompt, prompts[t.prompt].file, len(t.drafted.output_ids), t.drafted.accepted_per_forward)
        for t in turns
    ]


def _accepted_by_prompt(answers: Sequence[CountedAnswer]) -> list[list[int]]:
    """Drafted tokens that stood, per forward, of all turns of each prompt."""
    found: dict[int, list[int]] = {}
    for answer in answers:
        found.setdefault(answer.prompt, []).extend(answer.accepted_per_forward)
    return list(found.values())


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


def _streaks(target: Target, draft_model: DFlashDraftModel, turns: Sequence[DecodedTurn]) -> list[list[int]]:
    """How many drafted tokens in a row are right, from each token of the plain outputs."""
    return teacher_forced_streaks(target, draft_model, [(turn.input_ids, turn.plain.output_ids) for turn in turns])


def _walks(turns: Sequence[DecodedTurn], streaks: Sequence[Sequence[int]], num_drafted: int) -> list[Acceptance]:
    """The teacher-forced walk over the plain outputs, one sum per prompt."""
    pairs = zip(turns, streaks, strict=True) if streaks else ()
    return Acceptance.by_prompt((turn.prompt, walk(answer, num_drafted)) for turn, answer in pairs)


def _by_draft_length(
    target: Target,
    draft_model: DFlashDraftModel,
    turns: Sequence[DecodedTurn],
    streaks: Sequence[Sequence[int]],
    rates: Sequence[float],
) -> list[DraftLength]:
    """What checking fewer of the drafted tokens would give, at the context of the turn of median length."""
    most = draft_model.config.num_speculative_tokens
    lengths = walked_lengths(streaks, most) if streaks else lengths_from_rates(rates)
    turn = sorted(turns, key=lambda turn: len(turn.input_ids) + len(turn.plain.output_ids))[len(turns) // 2]
    context = [*turn.input_ids, *turn.plain.output_ids[: len(turn.plain.output_ids) // 2]]
    return draft_lengths(lengths, round_costs(target, draft_model, context))


def _counts(turns: Sequence[DecodedTurn], num_drafted: int) -> Counts:
    accepted = [count for turn in turns for count in turn.drafted.accepted_per_forward]
    return Counts(
        output_tokens=sum(len(turn.drafted.output_ids) for turn in turns),
        target_forwards=len(accepted),
        replayed_forwards=sum(turn.drafted.replayed_forwards for turn in turns),
        drafted_tokens=num_drafted * len(accepted),
        verified_tokens=sum(min(count + 1, num_drafted) for count in accepted),
        accepted_tokens=sum(accepted),
    )


def _differences(target: Target, turns: Sequence[DecodedTurn]) -> list[OutputDifference]:
    found = []
    for i, turn in enumerate(turns):
        if turn.drafted.output_ids != turn.plain.output_ids:
            input_ids = torch.tensor([turn.input_ids])
            place, gap = tie_gap(target, input_ids, turn.drafted.output_ids, turn.plain.output_ids)
            found.append(OutputDifference(i, place, gap))
    return found


def _equal_prompts(
    prompts: Collection[int], turns: Sequence[DecodedTurn], differences: Sequence[OutputDifference]
) -> list[int]:
    """1 for each prompt whose outputs are those of plain greedy decoding in all turns, else 0."""
    differing = {turns[difference.turn].prompt for difference in differences}
    return [int(prompt not in differing) for prompt in sorted(prompts)]


def _rate(generations: Sequence[Generation], seconds: Sequence[float]) -> float:
    """Tokens per second; NaN where the answers were not made one at a time."""
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
