"""From a conversation to token ids and the loss mask.

The ids are exactly what the target's own chat template gives for the whole conversation, tokenised once. The mask is
true on the tokens that lie wholly inside an answer's span; a token that the tokenizer merged from the template's text
and the answer's is not supervised, because no target ever generates it there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftline.data.conversations import Conversation, Message
from draftline.data.spans import AnswerNotFound, TurnSpan, locate_answers
from draftline.data.template import ChatTemplate, Refused

_BATCH = 64
"""Conversations that are tokenised in one call."""

Supervise = Literal["answers", "last", "all"]


@dataclass(frozen=True)
class MaskOptions:
    """What is supervised.

    Attributes:
        supervise: every answer, only the last one, or all text (other roles and the template's markup too).
        reasoning: whether reasoning inside an answer is supervised.
    """

    supervise: Supervise = "answers"
    reasoning: bool = True


@dataclass(frozen=True)
class RenderedConversation:
    """Token ids and loss mask of one conversation.

    Attributes:
        text: what the template rendered.
        input_ids: [S] int32.
        loss_mask: [S] bool.
        notes: what is worth a look, as reasons for the report's `flagged` table.
    """

    text: str
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Why a conversation cannot be rendered: its name in the report, and more for whoever wants to fix it."""

    reason: str
    detail: str = ""


def render_conversations(
    template: ChatTemplate, conversations: Sequence[Conversation], options: MaskOptions
) -> list[RenderedConversation | Refusal]:
    """Render many conversations.

    The tokenizer, which needs no Python lock, works on one batch while the template renders the next.
    """
    results: list[RenderedConversation | Refusal] = []
    with ThreadPoolExecutor(max_workers=1) as pool:
        batches = []
        for start in range(0, len(conversations), _BATCH):
            batch = conversations[start : start + _BATCH]
            located = [_locate(template, conversation) for conversation in batch]
            texts = [item[0] for item in located if not isinstance(item, Refusal)]
            batches.append((batch, located, pool.submit(template.encode, texts)))
        for batch, located, tokenised in batches:
            encodings = iter(tokenised.result())
            results += [
                item
                if isinstance(item, Refusal)
                else _to_tokens(item[0], next(encodings), item[1], conversation.messages, options)
                for item, conversation in zip(located, batch, strict=True)
            ]
    return results


def _locate(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[TurnSpan]] | Refusal:
    try:
        return locate_answers(template, conversation)
    except Refused as refused:
        return Refusal(f"template_refused: {refused}")
    except AnswerNotFound as error:
        return Refusal("mask_not_found", str(error))


def render_conversation(
    template: ChatTemplate, conversation: Conversation, options: MaskOptions | None = None
) -> RenderedConversation | Refusal:
    """Render one conversation."""
    return render_conversations(template, [conversation], options or MaskOptions())[0]


def _to_tokens(
    text: str, encoding: Any, spans: Sequence[TurnSpan], messages: Sequence[Message], options: MaskOptions
) -> RenderedConversation:
    ids = np.array(encoding.ids, dtype=np.int32)
    supervised = _supervised_ranges(spans, messages, options)
    mask = np.ones(len(ids), dtype=bool) if options.supervise == "all" else token_mask(encoding.offsets, supervised)
    lost = [span.turn for span in spans if span.reasoning_lost]
    notes = (
        [] if not lost else ["reasoning_not_rendered" if lost[-1] == spans[-1].turn else "earlier_reasoning_dropped"]
    )
    return RenderedConversation(text, ids, mask, (*notes, *_left_out(text, messages)))


def _left_out(text: str, messages: Sequence[Message]) -> list[str]:
    """Notes on what the template does not show: the target would never have said what follows without it."""
    notes = []
    if any(message.role == "system" and message.content.strip() not in text for message in messages):
        notes.append("system_not_rendered")
    called = Counter(call.function.name for message in messages for call in message.tool_calls)
    if any(text.count(name) < times for name, times in called.items()):
        notes.append("tool_call_not_rendered")
    return notes


def _supervised_ranges(
    spans: Sequence[TurnSpan], messages: Sequence[Message], options: MaskOptions
) -> list[tuple[int, int]]:
    if options.supervise == "last":
        last = max((turn for turn, message in enumerate(messages) if message.role == "assistant"), default=-1)
        spans = [span for span in spans if span.turn == last]
    ranges = []
    for span in spans:
        message = messages[span.turn]
        if message.train:
            start = span.start if options.reasoning else span.content_start
            # A cut answer has no end: supervising one would teach the drafter to stop where the budget ran out.
            ranges.append((start, span.text_end if message.finish_reason == "length" else span.end))
    return ranges


def token_mask(offsets: Sequence[tuple[int, int]], ranges: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """[S] true on tokens wholly inside one of the character ranges.

    Some tokenizers leave a leading space out of a token's offsets; such a token begins where the one before ended.
    """
    flat = np.fromiter(chain.from_iterable(offsets), dtype=np.int64, count=2 * len(offsets))
    starts, ends = flat[::2].copy(), flat[1::2]
    starts[1:] = np.minimum(starts[1:], np.maximum(ends[:-1], starts[:-1]))
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in ranges:
        mask |= (starts >= start) & (ends <= end) & (ends > start)
    return mask
