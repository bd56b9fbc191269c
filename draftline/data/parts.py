"""The texts that a conversation is made of, each of which can be replaced without disturbing its surroundings.

Of an assistant's turn these are its reasoning, its content, and of each call the name and every value in its arguments;
of another turn its content. Reasoning that the row keeps inside the content is a part of its own: templates split the
content at the closing tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from draftline.data.conversations import Message

PartKind = Literal["reasoning", "content", "call", "argument", "other"]

_OPENING, _CLOSING = "<think>", "</think>"


@dataclass(frozen=True)
class Part:
    """One text, and where it is kept.

    Attributes:
        turn: index of the message.
        kind: what the text is; `other` is the content of a turn that no assistant wrote.
        path: keys from the message to the field that holds it.
        value: the text itself, or the number that an argument is; never empty.
        before, after: the rest of the field up to the next part; a field is the sum of all its parts with these.
    """

    turn: int
    kind: PartKind
    path: tuple[str | int, ...]
    value: str | int | float
    before: str = ""
    after: str = ""

    def forms(self) -> Iterator[str]:
        """How templates write the text: as it is, trimmed, as JSON writes it, and as JSON in JSON does."""
        if not isinstance(self.value, str):
            yield json.dumps(self.value)
            return
        text = self.value
        yield from (text, text.strip(), text.rstrip(), text.lstrip(), text.strip("\n"))
        for ascii_only in (False, True):
            once = _escaped(text, ascii_only)
            yield from (once, once.strip(), _escaped(once, ascii_only))


def _escaped(text: str, ascii_only: bool) -> str:
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


@dataclass(frozen=True)
class Selection:
    """Which texts of a conversation are parts.

    Attributes:
        others: the contents of turns that no assistant wrote, too.
        arguments: the values in the arguments of calls, too.
        empty_block_is_markup: a reasoning block without reasoning inside the content is markup that a template is free
            to take out and write itself, and not text like any other.
    """

    others: bool = True
    arguments: bool = True
    empty_block_is_markup: bool = False

    def parts(self, messages: Sequence[Message]) -> list[Part]:
        """The parts of all turns, in the order of the row; where a template writes them is another matter."""
        found: list[Part] = []
        for turn, message in enumerate(messages):
            if message.role != "assistant":
                if self.others and message.content.strip():
                    found.append(Part(turn, "other", ("content",), message.content))
                continue
            if message.reasoning_content and message.reasoning_content.strip():
                found.append(Part(turn, "reasoning", ("reasoning_content",), message.reasoning_content))
            found += _content_parts(turn, message.content, self.empty_block_is_markup)
            for number, call in enumerate(message.tool_calls):
                path = ("tool_calls", number, "function")
                if call.function.name:
                    found.append(Part(turn, "call", (*path, "name"), call.function.name))
                if self.arguments:
                    found += _argument_parts(turn, (*path, "arguments"), call.function.arguments)
        return found


def split_reasoning(content: str) -> tuple[str, str, str, str] | None:
    """Opening, reasoning, closing and answer of a content that begins with a reasoning block; together the content.

    The opening tag may be missing, because it may be part of the prompt. None without a closing tag.
    """
    at = content.find(_CLOSING)
    if at < 0:
        return None
    answer = content[at + len(_CLOSING) :].lstrip()
    thought = content[:at].rstrip()
    opened = thought.lstrip()
    if opened.startswith(_OPENING):
        thought = opened.removeprefix(_OPENING).lstrip()
    begin = len(content[:at].rstrip()) - len(thought)
    end = len(content) - len(answer)
    return (
        (content[:begin], thought, content[begin + len(thought) : end], answer)
        if thought
        else (content[:end], "", "", answer)
    )


def unclosed_reasoning(content: str) -> str | None:
    """The reasoning of a content that begins with an opening tag and was cut before the closing one; else None."""
    begun = content.lstrip()
    if not begun.startswith(_OPENING) or _CLOSING in begun:
        return None
    return begun.removeprefix(_OPENING).lstrip()


def _content_parts(turn: int, content: str, empty_block_is_markup: bool) -> list[Part]:
    found = split_reasoning(content)
    if found is None or not (found[1] or empty_block_is_markup):
        return [Part(turn, "content", ("content",), content)] if content.strip() else []
    opening, thought, closing, answer = found
    if not thought:
        return [Part(turn, "content", ("content",), answer, before=opening + closing)] if answer else []
    parts = [Part(turn, "reasoning", ("content",), thought, before=opening, after="" if answer else closing)]
    return [*parts, Part(turn, "content", ("content",), answer, before=closing)] if answer else parts


def _argument_parts(turn: int, path: tuple[str | int, ...], value: Any) -> list[Part]:
    if isinstance(value, dict):
        return [part for key, item in value.items() for part in _argument_parts(turn, (*path, key), item)]
    if isinstance(value, list):
        return [part for key, item in enumerate(value) for part in _argument_parts(turn, (*path, key), item)]
    if isinstance(value, bool) or value is None or (isinstance(value, str) and not value.strip()):
        return []
    return [Part(turn, "argument", path, value)]


def substitute(
    messages: Sequence[dict[str, Any]], parts: Sequence[Part], values: Sequence[str | int | float]
) -> list[dict[str, Any]]:
    """The messages with the value of each part replaced; `parts` are all parts of the messages."""
    copies = [_copy(message) for message in messages]
    begun: set[tuple[int, tuple[str | int, ...]]] = set()
    for part, value in zip(parts, values, strict=True):
        holder: Any = copies[part.turn]
        for key in part.path[:-1]:
            holder = holder[key]
        new = part.before + value + part.after if isinstance(value, str) else value
        where = (part.turn, part.path)
        holder[part.path[-1]] = holder[part.path[-1]] + new if where in begun else new
        begun.add(where)
    return copies


def _copy(value: Any) -> Any:
    """A copy of nested dictionaries and lists; many times faster than `copy.deepcopy`, which keeps track of cycles."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value
