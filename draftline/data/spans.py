"""Which characters of a rendered conversation the target would have generated.

Supervised of a turn is what the target would generate behind the generation prompt of the turn's history. That is found
from renderings only, never from the names of roles or from the order of a row:

1. The texts of the turn are found (`alignment.py`), in the order in which the template writes them.
2. Where the turn begins: the history alone, with the generation prompt, is rendered. What it shares with the
   conversation was given to the target. Markup that a plain answer in the same place would have too (an empty reasoning
   block, the header of the answer's channel) is written by the template and not by the target.
3. Where the turn ends: the conversation is rendered up to this turn, once as it is, once with the generation prompt and
   once with a question behind it. What follows the last text there and in the whole conversation belongs to the turn,
   and the header of the next turn does not.

A turn whose parts or end cannot be proven in this way is not supervised at all, and says why. What steps 2 and 3 find
is kept by the markup around the turn, so that they are done once for every kind of turn and not for every turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, TypeVar

from draftline.data.alignment import Alignment, AnswerNotFound, align
from draftline.data.conversations import Conversation, Message
from draftline.data.template import MARK, ChatTemplate, Refused, Rendering, shared_start

_T = TypeVar("_T")

_QUESTION, _PLAIN = "qzUSERzq", "qzPLAINzq"
_HIDDEN = "turn_not_rendered"


@dataclass(frozen=True)
class TurnSpan:
    """The supervised characters of one assistant turn.

    Attributes:
        turn: index of the message.
        pieces: start and end of each run of characters; several where a template writes a result between them.
        content_start: where the turn goes on after its reasoning; the start without reasoning.
        text_end: behind the last character that the assistant wrote, before the turn's end.
        notes: what the template left out of the turn, as reasons of the report.
    """

    turn: int
    pieces: tuple[tuple[int, int], ...]
    content_start: int
    text_end: int
    notes: tuple[str, ...] = ()

    @property
    def start(self) -> int:
        """First supervised character."""
        return self.pieces[0][0]

    @property
    def end(self) -> int:
        """Behind the last supervised character."""
        return self.pieces[-1][1]


@dataclass(frozen=True)
class Located:
    """A rendered conversation, the spans of its turns, and why turns of it have none."""

    text: str
    spans: list[TurnSpan]
    unproven: tuple[str, ...] = ()


class _Unproven(Exception):
    """A turn cannot be supervised; the message is the reason of the report."""


def locate_answers(template: ChatTemplate, conversation: Conversation) -> Located:
    """Render the conversation, and find what the target would have generated of it.

    Costs what `align` does, and up to ten short renderings for every kind of turn that was not seen before.

    Raises:
        Refused: the template does not take the conversation.
        AnswerNotFound: it shows no stable place for an answer.
    """
    conversation = template.adapted(conversation)
    messages = conversation.for_template()
    rendering = template.render(messages, conversation)
    aligned = align(template, conversation, messages, rendering.text)
    spans, unproven = [], []
    for turn, message in enumerate(conversation.messages):
        if message.role == "assistant" and turn in aligned.numbers:
            try:
                spans.append(_Turn(aligned, turn).span())
            except _Unproven as reason:
                unproven.append(str(reason))
    if not spans and _HIDDEN in unproven:
        raise AnswerNotFound(
            f"the loss mask cannot be found: the chat template shows no answer of {messages}, but renders them as "
            f"{rendering.text!r}; give the target a template that shows them"
        )
    return Located(rendering.text, _narrow_to_markers(spans, rendering), tuple(unproven))


@dataclass(frozen=True)
class _Turn:
    """One assistant turn of a conversation whose texts are found."""

    chat: Alignment
    turn: int

    def span(self) -> TurnSpan:
        """What of the turn is supervised. Raises `_Unproven`."""
        chat, places = self.chat, self._own_places()
        notes = self._left_out(places)
        self._require_one_turn(places)
        runs: list[list[int]] = []
        for place in places:
            if runs and place == runs[-1][-1] + 1:
                runs[-1].append(place)
            else:
                runs.append([place])
        pieces = [(self._start(run[0], first=run is runs[0]), self._end(places[0], run[-1])) for run in runs]
        shown = [chat.shown[place] for place in places]
        answered = [chat.shown[place].start for place in places if chat.part(place).kind != "reasoning"]
        reasoned = chat.part(places[0]).kind == "reasoning"
        content_start = min(answered, default=shown[-1].end) if reasoned else pieces[0][0]
        return TurnSpan(self.turn, tuple(pieces), content_start, shown[-1].end, notes)

    def _own_places(self) -> list[int]:
        """Places of the turn's parts, without what later turns repeat of them, such as the name of a function."""
        chat, places = self.chat, self.chat.places.get(self.turn, [])
        if not places:
            called = any(chat.parts[number].kind == "call" for number in chat.numbers[self.turn])
            raise _Unproven("tool_call_not_rendered" if called else _HIDDEN)
        if max(Counter(chat.shown[place].number for place in places).values()) == 1:
            return places
        first = chat.numbers[self.turn][0]
        markup = [chat.kind_of(chat.markup_behind(place), self.turn) for place in places[:-1]]
        pattern = tuple(zip([chat.shown[place].number - first for place in places], [*markup, None], strict=True))
        kept = self._learnt(("own", pattern), lambda: self._said_before_the_next(places))
        return [places[index] for index in kept]

    def _said_before_the_next(self, places: Sequence[int]) -> list[int]:
        """Which of the places there are when the conversation stops behind the turn."""
        stopped = self.chat.rendered(self.chat.messages[: self.turn + 1])
        numbers = None if stopped is None else self.chat.sentinels_in(stopped)
        allowed = Counter({self.chat.shown[place].number: 1 for place in places} if numbers is None else numbers)
        kept = []
        for index, place in enumerate(places):
            allowed[self.chat.shown[place].number] -= 1
            if allowed[self.chat.shown[place].number] >= 0:
                kept.append(index)
        return kept

    def _left_out(self, places: Sequence[int]) -> tuple[str, ...]:
        """Notes on parts that the template does not show. Raises `_Unproven` where a call is not whole."""
        shown = {self.chat.shown[place].number for place in places}
        missing = {self.chat.parts[number].kind for number in self.chat.numbers[self.turn] if number not in shown}
        if missing & {"call", "argument"}:
            raise _Unproven("tool_call_not_rendered")
        names = {"reasoning": "reasoning_not_rendered", "content": "text_beside_call_not_rendered"}
        return tuple(note for kind, note in names.items() if kind in missing)

    def _require_one_turn(self, places: Sequence[int]) -> None:
        """Raise `_Unproven` where a template ends the turn behind a text or a call, and opens another for the rest."""
        prompt = self.chat.template.generation_prompt(self.chat.conversation).strip()
        opening = prompt[: next((mark.end() for mark in MARK.finditer(prompt)), len(prompt))]
        if not opening:
            return
        for before, after in pairwise(places):
            ended, found, _ = self.chat.markup_before(after).partition(opening)
            stopped = found and self._plain_end.strip() and ended.rstrip().endswith(self._plain_end.strip())
            if stopped and self.chat.part(before).kind != "reasoning":
                raise _Unproven("turn_rendered_in_two")

    def _learnt(self, key: tuple[Any, ...], learn: Callable[[], _T]) -> _T:
        """What `learn` finds, found once for every kind of place in this template."""
        known, key = self.chat.template.learned, (self.chat.template.situation(self.chat.conversation), *key)
        if key not in known:
            known[key] = learn()
        found: _T = known[key]
        return found

    def _start(self, place: int, *, first: bool) -> int:
        """First character of the piece that begins with the text at a place. Raises `_Unproven`."""
        chat, kind, start = self.chat, self.chat.part(place).kind, self.chat.shown[place].start
        if not first:
            if kind not in ("content", "reasoning"):
                raise _Unproven("call_after_result")
            return start
        markup = chat.markup_before(place)
        role = chat.messages[self.turn - 1]["role"] if self.turn else ""
        key = ("start", kind, role, chat.kind_of(markup, self.turn))
        return start - len(markup) + self._learnt(key, lambda: self._given(place, markup))

    def _given(self, place: int, markup: str) -> int:
        """How much of the markup before the first text was given to the target, or is written by the template."""
        chat, kind = self.chat, self.chat.part(place).kind
        history = chat.messages[: self.turn]
        asked = chat.rendered(history, ask=True)
        given = chat.after(asked, place - 1)
        length = 0 if given is None else self._shared(markup, given)
        if kind == "content":
            return length if length and not markup[length:].strip() else len(markup.rstrip(" "))
        openings = self._plain_openings(place)
        if kind == "reasoning" and given is not None and asked != chat.rendered(history):
            # The prompt may forbid the reasoning that the row has; where it does not, what all openings share is given.
            return length if given == markup[:length] else min([length, *(self._shared(markup, o) for o in openings)])
        fillers = [opening[length:] for opening in openings if opening[:length] == markup[:length]]
        return length + max((len(f) for f in fillers if f.strip() and markup.startswith(f, length)), default=0)

    def _shared(self, markup: str, other: str) -> int:
        """Length of what markup has in common with another, in whole tokens and marks."""
        return self.chat.template.whole_tokens(markup, shared_start(markup, other))

    def _plain_openings(self, place: int) -> list[str]:
        """Markup before a plain answer instead of the turn: at the end, before a question, and before what follows."""
        messages, openings = self.chat.messages, []
        for rest in ([], [_message("user", _QUESTION)], messages[self.turn + 1 :]):
            rendered = self.chat.rendered([*messages[: self.turn], _message("assistant", _PLAIN), *rest]) or ""
            before, found, _ = rendered.partition(_PLAIN)
            opening = self.chat.after(before, place - 1) if found else None
            openings += [] if opening is None else [opening]
        return openings

    def _end(self, first: int, place: int) -> int:
        """Behind the end of the piece whose last text stands at a place; `first` is that of the turn's first text.

        Raises `_Unproven`.
        """
        chat, turn = self.chat, self.turn
        markup, final = chat.markup_behind(place), place + 1 == len(chat.shown)
        stop = max([turn, *(chat.part(each).turn for each in range(first, place))]) + 1
        following = chat.messages[stop]["role"] if stop < len(chat.messages) else ""
        kinds = tuple(sorted({chat.parts[number].kind for number in chat.numbers[turn]}))
        key = ("end", kinds, stop == turn + 1, following, chat.kind_of(markup, turn), final)
        length = self._learnt(key, lambda: self._written(stop, place, markup, final=final))
        if length is None:
            raise _Unproven("turn_end_not_proven")
        if "call" in kinds:
            plain = self._plain_end
            stopped = markup[:length].find(plain.strip()) + len(plain.strip())
            if plain.strip() and stopped >= len(plain.strip()) and markup[stopped:length].strip():
                length = stopped  # what follows the end of a turn is another one
            if plain.isspace() and markup.startswith(plain, length):
                length += len(plain)
        return chat.shown[place].end + length

    @property
    def _plain_end(self) -> str:
        """What ends a plain answer at the end of such a conversation: behind it nothing more is generated."""
        return self._learnt(("plain end",), self._learn_plain_end)

    def _learn_plain_end(self) -> str:
        messages = (Message(role="user", content=_QUESTION), Message(role="assistant", content=_PLAIN))
        small = self.chat.conversation.model_copy(update={"messages": messages})
        try:
            located = locate_answers(self.chat.template, small)
        except (Refused, AnswerNotFound):
            return ""
        return "".join(located.text[span.text_end : span.end] for span in located.spans)

    def _written(self, stop: int, place: int, markup: str, *, final: bool) -> int | None:
        """How much of the markup behind a text belongs to its turn; None if that cannot be told.

        `stop` is the number of messages up to the one that is to come next; `final` says that no further text does.
        """
        chat, history = self.chat, self.chat.messages[:stop]
        tail = chat.until_sentinel(chat.after(chat.rendered(history), place))
        followed = chat.after(chat.rendered([*history, _message("user", _QUESTION)]), place)
        if tail is None:
            return len(markup.rstrip() or markup) if final else None
        shared = self._shared(tail, (followed or tail) if final else markup)
        rest = tail[shared:]
        if rest.strip() and (chat.rendered(history[:-1]) or "").endswith(rest):
            return self._before_the_appended(tail[:shared])
        end = len(tail.rstrip())
        if not final and not (end and markup.startswith(tail[:end])):
            found = [self._before_going_on(history, place, markup), self._before_a_question(followed, markup)]
            if found == [None, None] and not markup.startswith(tail):
                return None
            end = found[0] or found[1] or 0
        return end or (len(tail) if markup.startswith(tail) else 0)

    def _before_the_appended(self, text: str) -> int | None:
        """Length of what belongs to a turn behind which the template writes the same in every conversation.

        The header of what is appended and that of a next turn may begin with the same mark, and so does then the
        whole conversation.
        """
        bos = self.chat.template.tokenizer.bos_token
        first = next((mark.group() for mark in MARK.finditer(self.chat.probe) if mark.group() != bos), "")
        headers = [mark.start() for mark in MARK.finditer(text) if mark.group() == first]
        return len(text[: headers[-1]].rstrip() if headers else text.rstrip()) or None

    def _before_going_on(self, history: list[dict[str, Any]], place: int, markup: str) -> int | None:
        """As `_written`, from what stands between this turn and the generation prompt behind it."""
        chat = self.chat
        going_on = chat.until_sentinel(chat.after(chat.rendered(history, ask=True), place))
        prompt = chat.template.generation_prompt(chat.conversation)
        if going_on is None or not prompt.strip() or not going_on.endswith(prompt):
            return None
        end = going_on.removesuffix(prompt).rstrip()
        return len(end) if markup.startswith(end) else None

    def _before_a_question(self, followed: str | None, markup: str) -> int | None:
        """As `_written`, from what stands between this turn and a question, without the question's own header.

        The header is what the questions at the beginning of two conversations share with it; a turn ends in a mark.
        """
        question = _message("user", _QUESTION)
        beginnings = [self.chat.rendered([*system, question]) for system in ([], [_message("system", "s")])]
        openings = [text.partition(_QUESTION)[0] for text in beginnings if text is not None]
        if followed is None or not openings:
            return None
        between = followed.partition(_QUESTION)[0]
        begin = len(between) - min(shared_start(between[::-1], opening[::-1]) for opening in openings)
        cut = [mark.end() for mark in MARK.finditer(between) if mark.start() < begin < mark.end()]
        end = between[: max([begin, *cut])].rstrip()
        return len(end) if end and markup.startswith(end) and self._ends_in_mark(end) else None

    def _ends_in_mark(self, text: str) -> bool:
        """Whether a text ends in a control token, or in what is written like one."""
        added = self.chat.template.tokenizer.get_added_vocab()
        return any(mark.end() == len(text) for mark in MARK.finditer(text)) or any(map(text.endswith, added))


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


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
            pieces = tuple((max(s, start), min(e, end)) for s, e in span.pieces if s < end and e > start)
            narrowed.append(
                replace(
                    span,
                    pieces=pieces,
                    content_start=max(start, span.content_start),
                    text_end=min(end, span.text_end),
                )
            )
    return narrowed


def text_marks(template: ChatTemplate) -> tuple[str, frozenset[str]]:
    """What opens an answer in text that went through this template already, and what ends one; empty if unknown."""
    chat = Conversation.model_validate(
        {"messages": [{"role": role, "content": f"qz{role}{n}zq"} for n in (1, 2) for role in ("user", "assistant")]}
    )
    try:
        located = locate_answers(template, chat)
    except (Refused, AnswerNotFound):
        return "", frozenset()
    ends = {located.text[span.text_end : span.end] for span in located.spans}
    return template.generation_prompt(chat), frozenset(end for end in ends if end)
