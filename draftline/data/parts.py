"""The texts that the assistant wrote, taken apart so that each can be replaced without disturbing its surroundings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftline.data.conversations import Message

PartKind = Literal["reasoning", "content", "call"]

# Reasoning that is part of the content. Templates split at the closing tag; the opening one may be missing.
_THINKING = re.compile(r"^(\s*<think>\s*)?(.*?)(\s*</think>\s*)", re.DOTALL)


@dataclass(frozen=True)
class Part:
    """One text of an assistant turn.

    Attributes:
        turn: index of the message.
        kind: what the text is.
        path: keys from the message to the field that holds it.
        text: the text itself, never empty.
        before, after: the rest of the field up to the next part; a field is the sum of all its parts with these.
    """

    turn: int
    kind: PartKind
    path: tuple[str | int, ...]
    text: str
    before: str = ""
    after: str = ""


def assistant_parts(messages: Sequence[Message], *, empty_block_is_markup: bool = False) -> list[Part]:
    """All parts of all assistant turns, in the order in which templates write them.

    A reasoning block without reasoning inside the content is text like any other, or markup that a template is free
    to take out and write itself.
    """
    parts = []
    for turn, message in enumerate(messages):
        if message.role != "assistant":
            continue
        if message.reasoning_content:
            parts.append(Part(turn, "reasoning", (message.reasoning_field,), message.reasoning_content))
        parts += _content_parts(turn, message.content, empty_block_is_markup)
        parts += [
            Part(turn, "call", ("tool_calls", number, "function", "name"), call.function.name)
            for number, call in enumerate(message.tool_calls)
            if call.function.name
        ]
    return parts


def _content_parts(turn: int, content: str, empty_block_is_markup: bool) -> list[Part]:
    found = _THINKING.match(content)
    if found is None or not (found.group(2) or empty_block_is_markup):
        return [Part(turn, "content", ("content",), content)] if content else []
    opening, thought, closing = found.group(1) or "", found.group(2), found.group(3)
    answer = content[found.end() :]
    if not thought:
        return [Part(turn, "content", ("content",), answer, before=opening + closing)] if answer else []
    after = "" if answer else closing
    parts = [Part(turn, "reasoning", ("content",), thought, before=opening, after=after)]
    return [*parts, Part(turn, "content", ("content",), answer, before=closing)] if answer else parts


def substitute(messages: Sequence[dict[str, Any]], parts: Sequence[Part], texts: Sequence[str]) -> list[dict[str, Any]]:
    """The messages with the text of each part replaced; `parts` are all parts of the messages."""
    copies = [_copy(message) for message in messages]
    for part in parts:
        _holder(copies, part)[part.path[-1]] = ""
    for part, text in zip(parts, texts, strict=True):
        _holder(copies, part)[part.path[-1]] += part.before + text + part.after
    return copies


def _copy(value: Any) -> Any:
    """A copy of nested dictionaries and lists; many times faster than `copy.deepcopy`, which keeps track of cycles."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _holder(messages: list[dict[str, Any]], part: Part) -> Any:
    holder: Any = messages[part.turn]
    for key in part.path[:-1]:
        holder = holder[key]
    return holder
