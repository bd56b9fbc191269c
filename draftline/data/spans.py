"""Where the answers lie in a rendered conversation, in characters.

The texts that the assistant wrote (reasoning, content, names of called functions) are replaced by texts that occur
nowhere else, and the conversation is rendered again. What stays the same in the two renderings is the template's and
the other roles'; what lies between is the assistant's. If the exact texts do not fit between (the template alters
them), each is wrapped in two different letters in turn, and those two renderings are compared from both ends.

Of a turn, the supervised span goes from its first text to the end of the turn. Markup between the texts (the end of
the reasoning, the syntax of a call) is the target's own writing and lies inside. Markup before the first text belongs
to the span only for reasoning and calls, and only behind the generation prompt: the generation prompt is given by
whoever serves, and an empty reasoning block before plain content is written by the template, not by the target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from draftline.data.conversations import Conversation, Message
from draftline.data.template import (
    WRAPPERS,
    ChatTemplate,
    Refused,
    Rendering,
    TurnEnds,
    place_between,
    shared_start,
    without_last_mark,
)
from draftline.errors import TemplateError

PartKind = Literal["reasoning", "content", "call"]

Place = tuple[int, int] | None
"""Characters of a part in the rendering; None if the template left it out."""

_SENTINEL = "qzPARTzq{}qz"
_SENTINEL_FOUND = re.compile(r"qzPARTzq(\d+)qz")

# Reasoning that is part of the content. Templates split at the closing tag; the opening one may be missing.
_THINKING = re.compile(r"^(\s*<think>\s*)?(.*?)(\s*</think>\s*)", re.DOTALL)


class AnswerNotFound(TemplateError):
    """The template renders one conversation so that the place of an answer cannot be told."""


@dataclass(frozen=True)
class TurnSpan:
    """The supervised characters of one assistant turn.

    Attributes:
        turn: index of the message.
        start: first supervised character.
        content_start: where the turn goes on after its reasoning; equals `start` without reasoning.
        text_end: behind the last character that the assistant wrote, before the turn's end.
        end: behind the turn's end.
        reasoning_lost: the template left out reasoning that the message has.
    """

    turn: int
    start: int
    content_start: int
    text_end: int
    end: int
    reasoning_lost: bool = False


@dataclass(frozen=True)
class Part:
    """One text that the assistant wrote, to be replaced without disturbing its surroundings.

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


def locate_answers(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[TurnSpan]]:
    """Render the conversation, and return the text and the span of every assistant turn that it shows.

    Costs two renderings where the template leaves the assistant's texts as they are (or trims them), two more for
    every text otherwise, and one for every turn that ends in a tool call before the end of the conversation.

    Raises:
        Refused: the template does not take the conversation.
        AnswerNotFound: it shows no stable place for an answer.
        TemplateError: it never does.
    """
    rendering = template.render(template.messages(conversation), conversation)
    chat = _Chat(template, conversation, assistant_parts(conversation.messages), rendering.text)
    places = chat.align_sentinels()
    if places is None:
        chat = replace(chat, parts=assistant_parts(conversation.messages, empty_block_is_markup=True))
        places = chat.align_sentinels()
    if places is None:
        places = [chat.align_wrapped(part) for part in chat.parts]
    return rendering.text, _narrow_to_markers(chat.turn_spans(places), rendering)


@dataclass(frozen=True)
class _Chat:
    """A conversation with the texts of its assistant, and how the template renders it."""

    template: ChatTemplate
    conversation: Conversation
    parts: Sequence[Part]
    text: str

    @cached_property
    def messages(self) -> list[dict[str, Any]]:
        return self.template.messages(self.conversation)

    def rendered(self, texts: Sequence[str], turns: int | None = None) -> str:
        """The text of the first `turns` messages (of all if None) with other texts in the places of their parts."""
        parts = [part for part in self.parts if turns is None or part.turn < turns]
        return self.template.render(substitute(self.messages[:turns], parts, texts), self.conversation).text

    def align_sentinels(self) -> list[Place] | None:
        """Places of all parts from one more rendering; None if the template alters them, or acts on their text."""
        text, parts = self.text, self.parts
        sentinels = [_SENTINEL.format(number) for number in range(len(parts))]
        try:
            probe = self.rendered(sentinels)
        except Refused:
            return None
        places: list[Place] = [None] * len(parts)
        at, probe_at = 0, 0
        pending: int | None = None
        for number, sentinel in enumerate([*sentinels, ""]):
            found = probe.find(sentinel, probe_at) if sentinel else len(probe)
            if found < 0:
                if sentinel in probe:
                    return None  # written in another order than the parts have
                continue
            # A template may repeat a part elsewhere, such as the name of a function with its result.
            literal = _SENTINEL_FOUND.sub(lambda match: parts[int(match.group(1))].text, probe[probe_at:found])
            if pending is None:
                if not text.startswith(literal):
                    return None
                at = len(literal)
            else:
                end = _fit(text, at, parts[pending].text, literal)
                if end is None:
                    return None
                places[pending] = (at, end)
                at = end + len(literal)
            pending, probe_at = number, found + len(sentinel)
        return places if at == len(text) else None

    def align_wrapped(self, wanted: Part) -> Place:
        """Place of one part from two renderings that differ in the letters around it."""
        first, second = (
            self.rendered([letter + part.text + letter if part is wanted else part.text for part in self.parts])
            for letter in WRAPPERS
        )
        if first == second:
            return None
        place = place_between(first, second, self.text)
        if place is None:
            before = shared_start(first, second)
            raise AnswerNotFound(
                f"the loss mask cannot be found: the chat template renders turn {wanted.turn + 1} differently when its "
                f"text changes, once as {_around(self.text, before)!r}, once as {_around(first, before)!r}; "
                "put {% generation %} markers into the template"
            )
        if wanted.kind == "call" and self.text.startswith(wanted.text, place[0]):
            return place[0], place[0] + len(wanted.text)  # the name may be repeated with the result of the call
        return place

    def turn_spans(self, places: Sequence[Place]) -> list[TurnSpan]:
        """The spans of all turns of which the template shows a part."""
        text, ends = self.text, self.template.turn_ends(self.conversation)
        spans: list[TurnSpan] = []
        for turn in sorted({part.turn for part in self.parts}):
            own = [(part, place) for part, place in zip(self.parts, places, strict=True) if part.turn == turn]
            shown = [(part, place) for part, place in own if place is not None]
            if not shown:
                continue
            first, (start, _) = shown[0]
            rest = [place[0] for part, place in shown if part.kind != "reasoning"]
            text_end = shown[-1][1][1]
            start = _opening(text, spans[-1].end if spans else 0, start, ends, first)
            by_call = shown[-1][0].kind == "call"
            end = _known_end(text, text_end, (ends.middle, ends.last)) if not by_call else None
            spans.append(
                TurnSpan(
                    turn=turn,
                    start=start,
                    content_start=min(rest, default=text_end) if first.kind == "reasoning" else start,
                    text_end=text_end,
                    end=self._compared_end(turn, text_end) if end is None else end,
                    reasoning_lost=any(part.kind == "reasoning" and place is None for part, place in own),
                )
            )
        return spans

    def _compared_end(self, turn: int, text_end: int) -> int:
        """End of a turn from a rendering that stops after it: what the two renderings share belongs to the turn."""
        if turn == len(self.messages) - 1:
            return len(self.text.rstrip())
        kept = [part.text for part in self.parts if part.turn <= turn]
        sentinel = _SENTINEL.format("last")
        try:
            stopped = self.rendered([*kept[:-1], sentinel], turns=turn + 1)
        except Refused:
            return text_end
        after = self.text[text_end:]
        tail = stopped[stopped.find(sentinel) + len(sentinel) :].replace(sentinel, kept[-1])
        shared = self.template.whole_tokens(after, shared_start(tail, after))
        if self.template.turn_ends(self.conversation).always_opens and len(shared) < len(tail):
            shared = without_last_mark(shared)
        return text_end + len(shared.rstrip())


def _fit(text: str, at: int, part: str, literal: str) -> int | None:
    """Where `part`, as it is or trimmed, ends in `text` if it begins at `at` and `literal` follows."""
    for form in (part, part.strip(), part.rstrip(), part.lstrip(), part.strip("\n")):
        if text.startswith(form, at) and text.startswith(literal, at + len(form)):
            return at + len(form)
    return None


def _around(text: str, at: int) -> str:
    return text[max(0, at - 60) : at + 60]


def _opening(text: str, floor: int, start: int, ends: TurnEnds, first: Part) -> int:
    """Where the target begins to write a turn whose first text stands at `start`.

    Behind the generation prompt if markup of reasoning or of a call lies between, without what the template fills in
    by itself, or if only spaces do, which belong to the answer's first token.
    """
    asked = text.rfind(ends.generation_prompt, floor, start) if ends.generation_prompt else -1
    if asked < 0:
        opening = first.before.strip()
        head = text[floor:start].rstrip()
        if opening and head.endswith(opening):  # the row itself wrote the opening of its reasoning
            start = floor + len(head) - len(opening)
        return floor + len(text[floor:start].rstrip(" "))
    begin = asked + len(ends.generation_prompt)
    if first.kind == "call":
        begin += max((len(filler) for filler in ends.fillers if text.startswith(filler, begin)), default=0)
    return begin if first.kind != "content" or not text[begin:start].strip() else start


def _known_end(text: str, text_end: int, ends: Sequence[str]) -> int | None:
    """End of a turn whose text is followed by one of the known ends; the longer one counts."""
    for end in sorted(ends, key=len, reverse=True):
        if text.startswith(end, text_end) and (end or not any(ends)):
            return text_end + len(end)
    return None


def _narrow_to_markers(spans: list[TurnSpan], rendering: Rendering) -> list[TurnSpan]:
    """Where the template marks what is generated, nothing outside of its marks is supervised.

    Nor is what was not found to be the answer's: some templates mark the role's header as generated.
    """
    if rendering.generation_spans is None:
        return spans
    narrowed = []
    for span in spans:
        marked = [(s, e) for s, e in rendering.generation_spans if s < span.end and e > span.start]
        if marked:
            start, end = min(s for s, _ in marked), max(e for _, e in marked)
            narrowed.append(
                replace(
                    span,
                    start=max(start, span.start),
                    content_start=max(start, span.content_start),
                    text_end=min(end, span.text_end),
                    end=min(end, span.end),
                )
            )
    return narrowed


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
