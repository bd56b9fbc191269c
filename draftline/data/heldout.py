"""Chooses the prompts that training never sees."""

from __future__ import annotations

import heapq
import json
from typing import Any

from draftline.data.conversations import Conversation


class HeldoutPrompts:
    """The `count` prompts with the smallest hashes of all that were offered.

    The choice depends on the prompts only, not on their order or on the answers, and all rows with the same prompt
    fall on the same side. Costs `count` prompts of memory.
    """

    def __init__(self, count: int, state: list[list[Any]] | None = None) -> None:
        self._count = count
        # A heap of (-hash, prompt), so that the largest of the kept hashes, which all differ, is at its head.
        self._heap: list[tuple[int, dict[str, Any]]] = [(entry[0], entry[1]) for entry in state or []]
        heapq.heapify(self._heap)
        self._hashes = {-entry[0] for entry in self._heap}

    def offer(self, prompt_hash: int, conversation: Conversation) -> None:
        """Consider the prompt of a conversation."""
        if prompt_hash in self._hashes or self._count == 0:
            return
        if len(self._heap) == self._count:
            if prompt_hash > -self._heap[0][0]:
                return
            self._hashes.remove(-heapq.heappop(self._heap)[0])
        heapq.heappush(self._heap, (-prompt_hash, _as_prompt(conversation)))
        self._hashes.add(prompt_hash)

    def as_state(self) -> list[list[Any]]:
        """Everything, to be given to the constructor again."""
        return [[negative, prompt] for negative, prompt in self._heap]

    @property
    def hashes(self) -> list[int]:
        """The hashes of the chosen prompts."""
        return sorted(self._hashes)

    def as_jsonl(self) -> str:
        """The chosen prompts, one a line, as `read_prompts` takes them."""
        chosen = sorted(self._heap, key=lambda entry: entry[0], reverse=True)
        return "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for _, prompt in chosen)


def _as_prompt(conversation: Conversation) -> dict[str, Any]:
    """`{"turns": [...]}` if users alone speak; else messages, with the answers where results of tools follow them."""
    roles = {message.role for message in conversation.messages}
    if roles <= {"user", "assistant"} and not conversation.tools and not conversation.template_options:
        return {"turns": [message.content for message in conversation.messages if message.role == "user"]}
    asked = [message for message in conversation.messages if message.role != "assistant" or "tool" in roles]
    prompt: dict[str, Any] = {"messages": [message.for_template() for message in asked]}
    if conversation.tools:
        prompt["tools"] = list(conversation.tools)
    if conversation.template_options:
        prompt["chat_template_kwargs"] = conversation.template_options
    return prompt
