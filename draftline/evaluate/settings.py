"""What an evaluation asks for, and how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from draftline.data.conversations import Conversation, Message
from draftline.data.shapes import TEMPLATE_ARGUMENTS
from draftline.errors import ConfigError
from draftline.evaluate.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class EvaluationSettings:
    """How prompts are put to the target, and how it answers.

    Attributes:
        max_new_tokens: longest output of a turn.
        sampling: greedy, or temperature, top-p and top-k of drafter and target alike.
        seed: of sampling; each turn has its own generator, so that no answer depends on what was asked before it.
        template_options: keyword arguments of the chat template (`enable_thinking`, for instance); a prompt's own
            come on top.
        system_prompt: for prompts that have none of their own.
    """

    max_new_tokens: int
    sampling: Sampling = GREEDY
    seed: int = 0
    template_options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None

    def options_for(self, conversation: Conversation) -> dict[str, Any]:
        """Template options that one conversation is rendered with."""
        return {**self.template_options, **conversation.template_options}

    def with_system_prompt(self, conversation: Conversation) -> Conversation:
        """The conversation with the system prompt in front, unless it has one."""
        if self.system_prompt is None or any(m.role in ("system", "developer") for m in conversation.messages):
            return conversation
        system = Message(role="system", content=self.system_prompt)
        return conversation.model_copy(update={"messages": (system, *conversation.messages)})

    def refuse_for_server(self) -> None:
        """Refuse what only an evaluation in process can do.

        Raises:
            ConfigError: sampling, template options or a system prompt are set.
        """
        if not self.sampling.greedy or self.template_options or self.system_prompt is not None:
            raise ConfigError(
                "a server is measured greedily and with the prompts as they are: leave out --temperature, "
                "--template-option and --system-prompt, or measure in process with --draft"
            )


def parse_template_options(words: Sequence[str]) -> dict[str, Any]:
    """Keyword arguments of the chat template from `KEY=VALUE` words; values are YAML.

    Raises:
        ConfigError: a word is none, or its key is not the template's.
    """
    options: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier() or key in TEMPLATE_ARGUMENTS:
            raise ConfigError(f"--template-option {word!r} is not an option of a chat template: write KEY=VALUE")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--template-option {word!r}: {value!r} is not a YAML value: quote it") from error
    return options
