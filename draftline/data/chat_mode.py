"""How conversations were put to a target: thinking or not, which system prompt, which options of the chat template.

A drafter has seen the target in the modes of its training data only. Served in another (thinking switched on, a system
prompt that it never saw) its acceptance may halve without any error, so the modes of the data are counted when it is
prepared, go with the run into the drafter's card, and are compared with those of an evaluation.

System prompts are kept as hashes: cards are published, and a system prompt may be nobody else's business.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftline.data.conversations import Conversation, Message, hash_json

THINKING, NOT_THINKING = "with_reasoning", "without_reasoning"
NO_SYSTEM_PROMPT = "none"
OTHERS = "others"
"""Label for all further ones when a data set has too many to be listed."""

MOST_LABELS = 50


@dataclass(frozen=True)
class ChatMode:
    """Numbers of conversations, by label of each of three properties.

    Attributes:
        thinking: `with_reasoning` or `without_reasoning`.
        system_prompts: `none`, or the hash of the text.
        template_options: keyword arguments of the chat template as JSON, `{}` without any.
    """

    thinking: dict[str, int]
    system_prompts: dict[str, int]
    template_options: dict[str, int]

    @staticmethod
    def of_prepared(meta: Mapping[str, Any], report: Mapping[str, Any]) -> ChatMode | None:
        """The mode of a prepared data set; None where it was not counted, as for rows of token ids."""
        counts = [report.get(name) for name in ("thinking", "system_prompts", "template_options")]
        if not all(counts):
            return None
        thinking, system_prompts, own_options = ({str(k): int(v) for k, v in c.items()} for c in counts if c)
        options: Counter[str] = Counter()
        for label, count in own_options.items():
            own = {} if label == OTHERS else json.loads(label)
            options[OTHERS if label == OTHERS else options_label({**meta["template_options"], **own})] += count
        return ChatMode(thinking, system_prompts, dict(options))

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> ChatMode:
        """What `dataclasses.asdict` gave."""
        return ChatMode(dict(tree["thinking"]), dict(tree["system_prompts"]), dict(tree["template_options"]))


def thinks(message: Message) -> bool:
    """Whether an answer holds reasoning, also one that was cut inside of it."""
    return bool(message.reasoning_content) or "</think>" in message.content or message.content.startswith("<think>")


def thinking_label(conversation: Conversation) -> str:
    """Whether any answer of a conversation holds reasoning."""
    answers = (message for message in conversation.messages if message.role == "assistant")
    return THINKING if any(thinks(message) for message in answers) else NOT_THINKING


def system_label(conversation: Conversation) -> str:
    """Which system prompt a conversation has; `developer` is another name of the role."""
    texts = [message.content for message in conversation.messages if message.role in ("system", "developer")]
    return f"sha256:{hash_json([' '.join(text.split()) for text in texts])[:12]}" if texts else NO_SYSTEM_PROMPT


def options_label(options: Mapping[str, Any]) -> str:
    """Keyword arguments of the chat template as JSON with sorted keys."""
    return json.dumps(dict(options), sort_keys=True, ensure_ascii=False)


def count_label(counts: Counter[str], label: str) -> None:
    """Count a label; from `MOST_LABELS` different ones on, new ones are counted as others."""
    counts[label if label in counts or len(counts) < MOST_LABELS else OTHERS] += 1
