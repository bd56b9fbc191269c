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
from typing import Any

from draftline.data.conversations import Conversation
from draftline.data.parts import Part, assistant_parts, substitute
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

_SENTINEL = "qzPARTzq{}qz"
_SENTINEL_FOUND = re.compile(r"qzPARTzq(\d+)qz")


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


def locate_answers(template: ChatTemplate, conversation: Conversation) -> tuple[str, list[TurnSpan]]:
    """Render the conversation, and return the text and the span of every assistant turn that it shows.

    Costs two renderings where the template leaves the assistant's texts as they are (or trims them), two more for
    every text otherwise, and one for every turn that ends in a tool call before the end of the conversation.
    Raises `Refused` if the template does not take the conversation, `AnswerNotFound` if it shows no stable place for
    an answer, `TemplateError` if it never does.
    """
    messages = template.messages(conversation)
    rendering = template.render(messages, conversation)
    parts = assistant_parts(conversation.messages)
    places = _align_sentinels(template, conversation, messages, parts, rendering.text)
    if places is None:
        parts = assistant_parts(conversation.messages, empty_block_is_markup=True)
        places = _align_sentinels(template, conversation, messages, parts, rendering.text)
    if places is None:
        places = [_align_wrapped(template, conversation, messages, parts, part, rendering.text) for part in parts]
    spans = _turn_spans(template, conversation, messages, parts, places, rendering.text)
    return rendering.text, _narrow_to_markers(spans, rendering)


Place = tuple[int, int] | None
"""Characters of a part in the rendering; None if the template left it out."""


def _align_sentinels(
    template: ChatTemplate, conversation: Conversation, messages: list[dict[str, Any]], parts: Sequence[Part], text: str
) -> list[Place] | None:
    """Places of all parts from one more rendering; None if the template alters the parts, or acts on their text."""
    sentinels = [_SENTINEL.format(number) for number in range(len(parts))]
    try:
        probe = template.render(substitute(messages, parts, sentinels), conversation).text
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


def _fit(text: str, at: int, part: str, literal: str) -> int | None:
    """Where `part`, as it is or trimmed, ends in `text` if it begins at `at` and `literal` follows."""
    for form in (part, part.strip(), part.rstrip(), part.lstrip(), part.strip("\n")):
        if text.startswith(form, at) and text.startswith(literal, at + len(form)):
            return at + len(form)
    return None


def _align_wrapped(
    template: ChatTemplate,
    conversation: Conversation,
    messages: list[dict[str, Any]],
    parts: Sequence[Part],
    wanted: Part,
    text: str,
) -> Place:
    """Place of one part from two renderings that differ in the letters around it."""
    first, second = (
        template.render(
            substitute(messages, parts, [w + p.text + w if p is wanted else p.text for p in parts]), conversation
        ).text
        for w in WRAPPERS
    )
    if first == second:
        return None
    place = place_between(first, second, text)
    if place is None:
        before = shared_start(first, second)
        raise AnswerNotFound(
            f"the loss mask cannot be found: the chat template renders turn {wanted.turn + 1} differently when its "
            f"text changes, once as {_around(text, before)!r}, once as {_around(first, before)!r}; "
            "put {% generation %} markers into the template"
        )
    if wanted.kind == "call" and text.startswith(wanted.text, place[0]):
        return place[0], place[0] + len(wanted.text)  # the name may be repeated with the result of the call
    return place


def _around(text: str, at: int) -> str:
    return text[max(0, at - 60) : at + 60]


def _turn_spans(
    template: ChatTemplate,
    conversation: Conversation,
    messages: list[dict[str, Any]],
    parts: Sequence[Part],
    places: Sequence[Place],
    text: str,
) -> list[TurnSpan]:
    ends = template.turn_ends(conversation)
    spans: list[TurnSpan] = []
    for turn in sorted({part.turn for part in parts}):
        own = [(part, place) for part, place in zip(parts, places, strict=True) if part.turn == turn]
        shown = [(part, place) for part, place in own if place is not None]
        if not shown:
            continue
        first, (start, _) = shown[0]
        rest = [place[0] for part, place in shown if part.kind != "reasoning"]
        text_end = shown[-1][1][1]
        start = _opening(text, spans[-1].end if spans else 0, start, ends, first)
        by_call = shown[-1][0].kind == "call"
        end = _known_end(text, text_end, (ends.middle, ends.last)) if not by_call else None
        if end is None:
            end = _compared_end(template, conversation, messages, parts, turn, text, text_end)
        spans.append(
            TurnSpan(
                turn=turn,
                start=start,
                content_start=min(rest, default=text_end) if first.kind == "reasoning" else start,
                text_end=text_end,
                end=end,
                reasoning_lost=any(part.kind == "reasoning" and place is None for part, place in own),
            )
        )
    return spans


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


def _compared_end(
    template: ChatTemplate,
    conversation: Conversation,
    messages: list[dict[str, Any]],
    parts: Sequence[Part],
    turn: int,
    text: str,
    text_end: int,
) -> int:
    """End of a turn from a rendering that stops after it: what the two renderings share belongs to the turn."""
    if turn == len(messages) - 1:
        return len(text.rstrip())
    kept = [part for part in parts if part.turn <= turn]
    sentinel = _SENTINEL.format("last")
    texts = [sentinel if part is kept[-1] else part.text for part in kept]
    try:
        stopped = template.render(substitute(messages[: turn + 1], kept, texts), conversation).text
    except Refused:
        return text_end
    tail = stopped[stopped.find(sentinel) + len(sentinel) :].replace(sentinel, kept[-1].text)
    shared = template.whole_tokens(text[text_end:], shared_start(tail, text[text_end:]))
    if template.turn_ends(conversation).always_opens and len(shared) < len(tail):
        shared = without_last_mark(shared)
    return text_end + len(shared.rstrip())


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
