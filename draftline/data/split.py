"""Which conversations a run trains on, and which it only measures itself with.

Held-out conversations come from a folder of their own, as `draftline prepare --heldout` writes it, or a share of the
prompts is kept back. No prompt is ever on both sides.
"""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftline.config import RunConfig
from draftline.data.conversations import Conversation
from draftline.data.sampler import IntArray
from draftline.errors import ConfigError
from draftline.records import Samples


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


class Conversations(Samples, Protocol):
    """A prepared data set."""

    @property
    def lengths(self) -> IntArray:
        """Tokens of each conversation."""

    @property
    def supervised_lengths(self) -> IntArray:
        """Supervised tokens of each conversation."""

    @property
    def fingerprint(self) -> str:
        """Identifies the contents."""

    @property
    def prompt_hashes(self) -> NDArray[np.uint64]:
        """Equal where the prompts are."""

    def used_token_ids(self) -> Tensor:
        """[highest id + 1] bool, true for ids that occur."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class RunData:
    """Conversations of a run: a data set and the numbers of those that are used, for training and held out."""

    training: Conversations
    training_ids: IntArray
    heldout: Conversations
    heldout_ids: IntArray

    @property
    def fingerprint(self) -> str:
        """Identifies the contents, wherever they lie."""
        parts = [self.training.fingerprint]
        if self.heldout is not self.training:
            parts.append(self.heldout.fingerprint)
        return "+".join(parts)


def choose_conversations(config: RunConfig, training: Conversations, heldout: Conversations | None) -> RunData:
    """Decide what is trained on and what is held out; without held-out data some training data is kept back.

    Raises:
        ConfigError: a conversation is longer than `data.max_length`.
    """
    if heldout is None:
        heldout = training
        training_ids, heldout_ids = split_heldout(training.prompt_hashes, config.data.heldout_fraction)
    else:
        training_ids, heldout_ids = np.arange(len(training)), np.arange(len(heldout))
    for conversations in (training, heldout):
        longest = int(conversations.lengths.max(initial=0))
        if longest > config.data.max_length:
            raise ConfigError(
                f"data.max_length is {config.data.max_length}, the longest conversation has {longest} tokens: "
                "raise it, or prepare the data again with --max-length"
            )
    return RunData(training, training_ids, heldout, heldout_ids[: config.train.eval_conversations])


def split_heldout(prompt_hashes: NDArray[np.uint64], fraction: float) -> tuple[IntArray, IntArray]:
    """Divide conversations into those to train on and those held out, both in ascending order.

    A share of the distinct prompts is held out, with all their conversations, so no prompt is on both sides. The
    choice depends on nothing but the arguments: runs with different seeds share their held-out set. At least one
    prompt is held out if `fraction` is above 0, and at least one is left to train on.
    """
    distinct, prompt = np.unique(prompt_hashes, return_inverse=True)
    wanted = min(max(round(len(distinct) * fraction), 1), len(distinct) - 1) if fraction > 0 else 0
    chosen = np.random.default_rng(len(distinct)).permutation(len(distinct))[:wanted]
    held = np.isin(prompt, chosen)
    return np.flatnonzero(~held), np.flatnonzero(held)
