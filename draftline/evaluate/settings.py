"""How an evaluation puts prompts to the target, and whether the drafter's training data was put to it so."""

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
from draftline.data.conversations import Conversation

_NOTICED = 0.05
"""Share from which a mode counts: below it, training has not taught it, and an evaluation does not depend on it."""

_VARIED = 10
"""With this many system prompts in the data, a new one is nothing new."""

SameRendering = Callable[[Mapping[str, Any], Mapping[str, Any]], bool]
"""Whether two sets of template options render the evaluation's prompts alike."""


def mode_of(dialogues: Sequence[Conversation], options: Sequence[Mapping[str, Any]]) -> ChatMode:
    """The mode of answered prompts, each with the template options that it was rendered with."""
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
