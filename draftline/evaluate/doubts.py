"""What makes the figures of an evaluation doubtful, one sentence each; above all, another mode than that of training.

A drafter has seen the target in the modes of its training data only: thinking or not, with these system prompts, with
these options of the chat template. In another mode its acceptance may halve without any error.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftline.data.accounting import (
    NO_SYSTEM_PROMPT,
    OTHERS,
    THINKING,
    ChatMode,
    options_label,
    system_label,
    thinking_label,
)
from draftline.data.answers import answer_slots
from draftline.data.prompts import Prompt
from draftline.data.template import render_prompt
from draftline.evaluate.answer import DecodedTurn
from draftline.targets.model import Target

AGREEMENT = 0.05
"""Relative difference of decoded and teacher-forced acceptance length from which one of the two must be wrong."""

_NOTICED = 0.05
"""Share from which a mode counts: below it, training has not taught it, and an evaluation does not depend on it."""

_VARIED = 10
"""With this many system prompts in the data, a new one is nothing new."""

SameRendering = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""Whether two sets of template options render the evaluation's prompts alike."""


def disagreement(decoded: float, forced: float) -> list[str]:
    """Acceptance lengths, of the decoder and of the walk, of which one must be wrong."""
    if abs(forced / decoded - 1) > AGREEMENT:
        return [
            f"decoded acceptance length {decoded:.2f} and teacher-forced {forced:.2f} differ by more than "
            f"{AGREEMENT:.0%}: what is decoded is not what was trained; run `draftline audit` on the drafter"
        ]
    return []


def unasked(prompts: Sequence[Prompt], turns: Sequence[DecodedTurn], target: Target) -> list[str]:
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


def repeated(prompts: Sequence[Prompt]) -> list[str]:
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


def mode_of(turns: Sequence[DecodedTurn], template_options: Mapping[str, Any]) -> ChatMode:
    """The mode of the prompts that were answered, each with its whole dialogue.

    Args:
        template_options: of all prompts; those of a conversation come on top.
    """
    dialogues = list({turn.prompt: turn.dialogue for turn in turns}.values())
    options = [{**template_options, **dialogue.template_options} for dialogue in dialogues]
    return ChatMode(
        thinking=dict(Counter(thinking_label(dialogue) for dialogue in dialogues)),
        system_prompts=dict(Counter(system_label(dialogue) for dialogue in dialogues)),
        template_options=dict(Counter(options_label(each) for each in options)),
    )


def mode_warnings(trained: ChatMode, served: ChatMode, same_rendering: SameRendering) -> list[str]:
    """One line for each property in which the evaluation is in a mode that training did not have."""
    lines = []
    if new := _unknown(trained.thinking, served.thinking):
        said = "think first" if THINKING in new else "do not think first"
        lines.append(
            f"{_percent(served.thinking, new)} of the answers {said}, as {_percent(trained.thinking, new)} of "
            "those in the training data do: the acceptance is that of a mode the drafter was not trained in"
        )
    if new := _unknown_system_prompts(trained.system_prompts, served.system_prompts):
        said = "no system prompt" if new == {NO_SYSTEM_PROMPT} else "a system prompt of their own"
        lines.append(
            f"{_percent(served.system_prompts, new)} of the prompts have {said}, as "
            f"{_percent(trained.system_prompts, new)} of the training data had: evaluate with what it was made with"
        )
    known = [json.loads(label) for label in _known(trained.template_options) if label != OTHERS]
    unknown = _unknown(trained.template_options, served.template_options)
    if new := {label for label in unknown if not any(same_rendering(json.loads(label), each) for each in known)}:
        lines.append(
            f"the chat template is given {', '.join(sorted(new))}, in the training data mostly "
            f"{max(trained.template_options, key=lambda label: trained.template_options[label])}, and renders the "
            "prompts differently: the acceptance is that of a mode the drafter was not trained in"
        )
    return lines


def same_rendering(target: Target, prompt: Prompt) -> SameRendering:
    """Compares two sets of template options by what they make of one prompt."""
    conversation = prompt.conversation.model_copy(update={"template_options": {}})
    asked = conversation.model_copy(update={"messages": answer_slots(conversation)[0]})

    def same(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
        one, other = (render_prompt(target.require_tokenizer(), asked, dict(options)) for options in (first, second))
        return one == other

    return same


def _known(trained: Mapping[str, int]) -> set[str]:
    return {label for label, count in trained.items() if count >= _NOTICED * sum(trained.values())}


def _unknown(trained: Mapping[str, int], served: Mapping[str, int]) -> set[str]:
    """Labels that matter in the evaluation and were not taught; none where further labels were not listed."""
    if OTHERS in _known(trained):
        return set()
    return _known(served) - _known(trained)


def _unknown_system_prompts(trained: Mapping[str, int], served: Mapping[str, int]) -> set[str]:
    unknown = _unknown(trained, served)
    return unknown & {NO_SYSTEM_PROMPT} if len(trained) > _VARIED else unknown


def _percent(counts: Mapping[str, int], labels: set[str]) -> str:
    share = sum(counts.get(label, 0) for label in labels) / sum(counts.values())
    return f"{share:.0%}"
