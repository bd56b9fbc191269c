"""Where in a rendered conversation each of its texts stands, found from renderings only.

Every text that somebody wrote (`parts.py`) is replaced by a sentinel, and the conversation is rendered again. Where the
sentinels stand is where the template writes the texts, in its own order; between them stands its markup. A text without
a sentinel was dropped by the template. Where a template alters texts or acts on them, so that the markup differs, each
text of an assistant is instead wrapped in two different letters in turn, and the two renderings are compared from both
ends.

The conversation with its sentinels is short, and the same for all conversations of one kind. What else has to be known
about the template is therefore found out by rendering parts of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

from draftline.data.conversations import Conversation
from draftline.data.parts import Part, Selection, substitute
from draftline.data.template import ChatTemplate, Refused, shared_start
from draftline.errors import TemplateError

_SELECTIONS = (
    Selection(),
    Selection(others=False),
    Selection(others=False, empty_block_is_markup=True),
    Selection(others=False, arguments=False),
)
"""What is replaced by sentinels, tried in this order until a template shows the rest unchanged."""

_WRAPPERS = ("q", "Z")


class AnswerNotFound(TemplateError):
    """The template renders one conversation so that the place of an answer cannot be told."""


class Occurrence(NamedTuple):
    """One occurrence of a part: its number, its place in the text with sentinels, and in the real text."""

    number: int
    probe_start: int
    probe_end: int
    start: int
    end: int


@dataclass(frozen=True)
class Alignment:
    """A conversation whose texts are found in what the template makes of it.

    A *place* is the index of an occurrence.

    Attributes:
        messages: with a sentinel in every part, or as they are where the template alters texts.
        probe: how they are rendered.
        text: how the real ones are.
        shown: every occurrence of a part, in the order of the template.
        sentinel: matches any sentinel; None without.
    """

    template: ChatTemplate
    conversation: Conversation
    messages: list[dict[str, Any]]
    parts: Sequence[Part]
    probe: str
    text: str
    shown: Sequence[Occurrence]
    sentinel: re.Pattern[str] | None

    @cached_property
    def places(self) -> dict[int, list[int]]:
        """By turn, the places of its parts."""
        places: dict[int, list[int]] = {}
        for place, each in enumerate(self.shown):
            places.setdefault(self.parts[each.number].turn, []).append(place)
        return places

    @cached_property
    def numbers(self) -> dict[int, list[int]]:
        """By turn, the numbers of its parts, shown or not."""
        numbers: dict[int, list[int]] = {}
        for number, part in enumerate(self.parts):
            numbers.setdefault(part.turn, []).append(number)
        return numbers

    def part(self, place: int) -> Part:
        """The part that stands at a place."""
        return self.parts[self.shown[place].number]

    def markup_before(self, place: int) -> str:
        """What the template writes between the text before a place and the one at it."""
        return self.probe[self.shown[place - 1].probe_end if place else 0 : self.shown[place].probe_start]

    def markup_behind(self, place: int) -> str:
        """What the template writes between the text at a place and the next one, or the end."""
        end = self.shown[place + 1].probe_start if place + 1 < len(self.shown) else len(self.probe)
        return self.probe[self.shown[place].probe_end : end]

    def rendered(self, messages: list[dict[str, Any]], *, ask: bool = False) -> str | None:
        """What the template makes of other messages; None if it refuses them."""
        try:
            return self.template.render(messages, self.conversation, ask=ask).text
        except Refused:
            return None

    def after(self, other: str | None, place: int) -> str | None:
        """What follows the text at a place in another rendering of the same beginning; None if it is not to be told."""
        if other is None or place < 0:
            return other
        shown = self.shown[place]
        if other.startswith(self.probe[: shown.probe_end]):
            return other[shown.probe_end :]
        if self.sentinel is None:
            return None
        _, found, rest = other.rpartition(self.probe[shown.probe_start : shown.probe_end])
        return rest if found else None

    def until_sentinel(self, text: str | None) -> str | None:
        """The text up to the first sentinel in it."""
        found = self.sentinel.search(text) if text is not None and self.sentinel is not None else None
        return text if text is None or found is None else text[: found.start()]

    def sentinels_in(self, text: str) -> list[int] | None:
        """Numbers of the parts of which a rendering shows the sentinels, in its order; None without sentinels."""
        return None if self.sentinel is None else list(map(_number, self.sentinel.finditer(text)))

    def kind_of(self, markup: str, turn: int) -> tuple[str, tuple[int, ...]]:
        """Markup with the ids of calls near a turn made equal, and the lengths of these: turns are of one kind
        whatever their ids are."""
        near = self.messages[max(0, turn - 1) : turn + 2]
        ids = {str(call.get("id") or "") for message in near for call in message.get("tool_calls", ())}
        ids |= {str(message.get("tool_call_id") or "") for message in near}
        found = sorted((each for each in ids if each and each in markup), key=lambda each: (markup.find(each), each))
        for each in found:
            markup = markup.replace(each, "\0")
        return markup, tuple(map(len, found))


def align(template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], text: str) -> Alignment:
    """Find the texts of a conversation in `text`, which is how the template renders `messages`.

    Costs one more rendering where the template leaves texts as they are, trims or escapes them; up to four more, and
    two for every text of an assistant, otherwise.

    Raises:
        AnswerNotFound: the template shows no stable place for a text.
    """
    found = next(_aligned(template, conversation, messages, text), None)
    return _wrapped(template, conversation, messages, text) if found is None else found


def _aligned(
    template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], text: str
) -> Iterator[Alignment]:
    """The conversation with sentinels in its parts, for each selection that leaves what is written around them."""
    stem = next(stem for stem in (f"qz{number}PARTzq" for number in count()) if stem not in text)
    digits = next(digits for digits in (f"7{number}31" for number in count(58)) if digits not in text)
    for selection in _SELECTIONS:
        parts = selection.parts(conversation.messages)
        sentinels = [
            f"{stem}{number}qz" if isinstance(part.value, str) else int(f"{digits}{number:06}00")
            for number, part in enumerate(parts)
        ]
        changed = substitute(messages, parts, sentinels)
        try:
            probe = template.render(changed, conversation).text
        except Refused:
            continue
        found = re.compile(rf"{stem}(\d+)qz|{digits}(\d{{6}})00")
        shown = _align(text, probe, parts, found)
        if shown is not None:
            yield Alignment(template, conversation, changed, parts, probe, text, shown, found)


def _align(text: str, probe: str, parts: Sequence[Part], found: re.Pattern[str]) -> list[Occurrence] | None:
    """Every occurrence of a sentinel in `probe`, and what stands there in `text`; None if the two differ elsewhere."""
    shown: list[Occurrence] = []
    at = probe_at = 0
    pending: tuple[int, int, int] | None = None
    for match in [*found.finditer(probe), None]:
        begin = match.start() if match else len(probe)
        literal = probe[probe_at:begin]
        if pending is None:
            if not text.startswith(literal):
                return None
            at = len(literal)
        else:
            end = _fit(text, at, parts[pending[0]], literal, last=match is None)
            if end is None:
                return None
            shown.append(Occurrence(*pending, at, end))
            at = end + len(literal)
        if match:
            probe_at = match.end()
            pending = (_number(match), begin, probe_at)
    return shown if at == len(text) else None


def _fit(text: str, at: int, part: Part, literal: str, *, last: bool) -> int | None:
    """Where the part, in one of its forms, ends in `text` if it begins at `at` and `literal` follows."""
    for form in part.forms():
        end = at + len(form)
        if (
            text.startswith(form, at)
            and text.startswith(literal, end)
            and (not last or end + len(literal) == len(text))
        ):
            return end
    return None


def _wrapped(
    template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], text: str
) -> Alignment:
    """The conversation with its own texts, each found by two renderings that differ in the letters around it."""
    parts = Selection(others=False, arguments=False).parts(conversation.messages)
    values = [part.value for part in parts]
    shown = []
    for number, part in enumerate(parts):
        first, second = (
            template.render(
                substitute(messages, parts, [*values[:number], f"{letter}{part.value}{letter}", *values[number + 1 :]]),
                conversation,
            ).text
            for letter in _WRAPPERS
        )
        if first == second:
            continue
        before, after = shared_start(first, second), shared_start(first[::-1], second[::-1])
        start, end = before, len(text) - after
        if start > end or not text.startswith(first[:before]) or not text.endswith(first[len(first) - after :]):
            raise AnswerNotFound(
                f"the loss mask cannot be found: the chat template renders turn {part.turn + 1} differently when its "
                f"text changes, once as {_around(text, before)!r}, once as {_around(first, before)!r}; "
                "put {% generation %} markers into the template"
            )
        if part.kind == "call" and text.startswith(str(part.value), start):
            end = start + len(str(part.value))  # the name may be repeated with the result of the call
        shown.append(Occurrence(number, start, end, start, end))
    return Alignment(
        template, conversation, messages, parts, text, text, sorted(shown, key=lambda each: each.start), None
    )


def _around(text: str, at: int) -> str:
    return text[max(0, at - 60) : at + 60]


def _number(match: re.Match[str]) -> int:
    return int(match.group(1) or match.group(2))
