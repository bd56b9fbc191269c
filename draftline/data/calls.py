"""Reads back what a target wrote: its reasoning, its text and its calls, as its own template writes them.

How a template writes each of these is learned by rendering an answer of texts that occur nowhere else. White space does
not count, numbers of calls and ids may be others, and the called functions must be among the tools. Text that does not
fit is left as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from draftline.data.conversations import Conversation, FunctionCall, ToolCall
from draftline.data.messages import BadRow, parse_calls
from draftline.data.template import MARK, ChatTemplate, Refused, shared_start

_QUESTION, _TEXT, _THOUGHT, _NAME, _OTHER, _ID = "qzASKzq", "qzTEXTzq", "qzWHYzq", "qzNAMEzq", "qzOTHERzq", "qzid00000"
_ARGUMENTS = {"qzkeya": "qzvala", "qzkeyb": "qzvalb"}
_KEY, _NEXT = _ARGUMENTS
_VALUES: tuple[Any, ...] = ("qzvala", 7431007, True, None, ["qzlist"], {"qzinner": "qzvalue"})
"""One of each kind; where a template writes them alike, the tool's schema says what is text."""
_KEYS = re.compile(r"[\w.$-]+")


@dataclass(frozen=True)
class _Parameter:
    """How a template writes an argument of some kinds of values, each by itself.

    Attributes:
        inside: the text between its key and its value.
        further: behind the value, up to the key of a further argument.
        between: behind the value, up to the name of a further call.
        closing: behind the value, at the end of all.
        kind: `text` or `json`; None where both are written alike.
    """

    inside: str
    further: str
    between: str
    closing: str
    kind: str | None = None

    def behind(self, own: Callable[[str], str]) -> re.Pattern[str]:
        """What ends the value; `own` puts the call's own name and key in. The stop token is not in the text."""
        ends = [rf"(?P<further>{_flexible(own(self.further))})(?=[\w.$-])"]
        ends += [rf"(?P<between>{_flexible(own(self.between))})"] if self.between.strip() else []
        ends.append(_closed(own(self.closing)))
        return re.compile("|".join(ends))


@dataclass(frozen=True)
class _CallFormat:
    """How a template writes calls: the texts before the name, before the arguments, between calls, and behind all.

    Attributes:
        parameters: how arguments are written by themselves, by the kind of their values; none for JSON.
        bare: texts behind the name of a call without arguments: before a further call, and at the end.
        python: arguments are written as those of a Python call.
    """

    opening: str
    middle: str
    between: str
    closing: str
    parameters: tuple[_Parameter, ...] = ()
    bare: tuple[str, str] = ("", "")
    python: bool = False


@dataclass(frozen=True)
class AnswerFormat:
    """How a template writes an answer.

    Attributes:
        filler: what it writes before a plain text, behind the generation prompt.
        thought: texts before reasoning and between it and the text; None where it shows none.
        tools: names of the functions that may be called.
    """

    filler: str = ""
    thought: tuple[str, str] | None = None
    calls: _CallFormat | None = None
    tools: dict[str, Any] = field(default_factory=dict)

    def reasoning(self, text: str) -> tuple[str | None, str]:
        """Reasoning, None without any, and what follows it."""
        if self.thought is not None and self.thought[1].strip():
            before, found, after = text.partition(self.thought[1].strip())
            if found:
                return before.removeprefix(self.thought[0].strip()).strip("\n"), after.lstrip("\n")
        return None, text.removeprefix(self.filler) if self.filler.strip() else text

    def read_calls(self, text: str) -> tuple[str, tuple[ToolCall, ...]] | None:
        """The text before the calls, and the calls; None if there are none, or one of them does not fit."""
        form = self.calls
        if form is None:
            return None
        opening = _flexible(form.opening)
        opened = re.search(opening, text) if form.opening.strip() else re.match(r"\s*", text)
        if opened is None:
            return None
        read = self._python if form.python else self._by_parameters if form.parameters else self._calls
        try:
            calls, rest = read(form, text, opened.end())
        except (ValueError, BadRow, RecursionError):
            return None
        if form.parameters:
            return text[: opened.start()].removesuffix(self.filler).strip(), tuple(calls)
        closing, left = "" if form.python else form.closing, "".join(rest.split())
        whole = re.fullmatch(_flexible(closing) + r"\s*", rest) or "".join(closing.split()).startswith(left)
        if not whole or any(call.function.name not in self.tools for call in calls):
            return None
        return text[: opened.start()].removesuffix(self.filler).strip(), tuple(calls)

    def _python(self, form: _CallFormat, text: str, at: int) -> tuple[list[ToolCall], str]:
        """Calls of Python from a place on, and what follows them."""
        closing = form.closing.lstrip("\"' ").removeprefix(")").strip()
        inside, found, rest = text[at:].rpartition(closing) if closing else ("", "", "")
        method = form.middle.removesuffix("(")
        calls = []
        for call in parse_calls(f"[{inside if found else text[at:]}]"):
            function = FunctionCall(name=call.function.name.removesuffix(method), arguments=call.function.arguments)
            calls.append(ToolCall(function=function))
        return calls, rest if found else ""

    def _calls(self, form: _CallFormat, text: str, at: int) -> tuple[list[ToolCall], str]:
        """Calls from a place on, and what follows them; raises `ValueError` where the text does not fit."""
        calls = []
        while True:
            literal = _flexible(form.middle, named=True)
            middle = re.compile(rf"\s*(?P<name>[\w.:/-]+?){literal}(?=\s*\{{)").match(text, at)
            if middle is None:
                raise ValueError("no call")
            name = middle.group("name")
            begin = len(text) - len(text[middle.end() :].lstrip())
            arguments, at = json.JSONDecoder().raw_decode(text, begin)
            if not isinstance(arguments, dict):
                raise ValueError("no object")
            named = middle.groupdict().get("id")
            calls.append(ToolCall(id=named, function=FunctionCall(name=name, arguments=arguments)))
            following = re.compile(_flexible(form.between)).match(text, at) if form.between.strip() else None
            if following is None:
                return calls, text[at:]
            at = following.end()

    def _by_parameters(self, form: _CallFormat, text: str, at: int) -> tuple[list[ToolCall], str]:
        """Calls whose arguments are written one by one; raises `ValueError` where the text does not fit."""
        calls = list[ToolCall]()
        more = True
        while more:
            at += len(text[at:]) - len(text[at:].lstrip())
            name = next((n for n in sorted(self.tools, key=len, reverse=True) if text.startswith(n, at)), None)
            if name is None:
                raise ValueError("no tool")
            arguments, at, more = self._arguments(form, name, text, at + len(name))
            calls.append(ToolCall(function=FunctionCall(name=name, arguments=arguments)))
        return calls, ""

    def _arguments(self, form: _CallFormat, name: str, text: str, at: int) -> tuple[dict[str, Any], int, bool]:
        """The arguments behind a name, the place behind the call, and whether another follows."""
        arguments: dict[str, Any] = {}
        head = re.compile(_flexible(form.middle.replace(_NAME, name)) + r"(?=[\w.$-])").match(text, at)
        if head is None:
            between, closing = (literal.replace(_NAME, name) for literal in form.bare)
            further = re.compile(_flexible(between)).match(text, at) if between.strip() else None
            if further is None and not re.compile(_closed(closing)).match(text, at):
                raise ValueError("no arguments")
            return {}, further.end() if further else len(text), further is not None
        at, more = head.end(), None
        while more is None:
            found = _KEYS.match(text, at)
            if found is None:
                raise ValueError("no key")
            arguments[found.group()], at, more = self._value(form, name, found.group(), text, found.end())
        return arguments, at, more

    def _value(self, form: _CallFormat, name: str, key: str, text: str, at: int) -> tuple[Any, int, bool | None]:
        """A value behind its key, the place behind it, and whether another call follows; None: another argument."""

        def own(literal: str) -> str:
            return literal.replace(_NAME, name).replace(_KEY, key)

        schema = self.tools[name].get("properties", {}).get(key)
        said_kind = schema.get("type") if isinstance(schema, dict) else None
        for form_of in form.parameters:
            begin = re.compile(_flexible(own(form_of.inside))).match(text, at)
            for end in form_of.behind(own).finditer(text, begin.end()) if begin is not None else ():
                said = text[begin.end() : end.start()]  # type: ignore[union-attr]
                try:
                    value = said if form_of.kind == "text" or said_kind == "string" else json.loads(said)
                except ValueError:
                    if form_of.kind == "json":
                        continue
                    value = said
                groups = end.groupdict()
                return value, end.end(), None if groups["further"] is not None else groups.get("between") is not None
        raise ValueError("no value")


def _closed(closing: str) -> str:
    """A pattern of what ends all calls and the text, perhaps without its last marks: one of them is the stop token."""
    cuts = [mark.start() for mark in MARK.finditer(closing)][-2:]
    shorter = [closing[:cut] for cut in reversed(cuts) if closing[:cut].strip()]
    return rf"(?:{'|'.join(map(_flexible, [closing, *shorter]))})\s*\Z"


def _flexible(literal: str, *, named: bool = False) -> str:
    """A pattern of markup in which white space, numbers and ids may be others; the first id is a group if `named`."""
    pieces: list[str] = []
    for number, known in enumerate(literal.split(_ID)):
        if number:
            pieces.append(r"(?P<id>[\w-]+)" if number == 1 and named else r"[\w-]+")
        for piece in re.findall(r"\s+|\d+|[{}\[\]:,]|[^\s\d{}\[\]:,]+", known):
            if piece.isspace():
                pieces.append(r"\s*")
            elif piece.isdigit():
                pieces.append(r"\d+")
            else:
                pieces.append(re.escape(piece) if len(piece) > 1 else rf"\s*{re.escape(piece)}\s*")
    return "".join(pieces)


def answer_format(template: ChatTemplate, conversation: Conversation) -> AnswerFormat:
    """How the template writes an answer in such a conversation; learned once for its options and tools."""
    key = ("answer format", template.situation(conversation))
    if key not in template.learned:
        template.learned[key] = _learn(template, conversation)
    known: AnswerFormat = template.learned[key]
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in conversation.tools}
    return AnswerFormat(known.filler, known.thought, known.calls if tools else None, tools)


def _learn(template: ChatTemplate, conversation: Conversation) -> AnswerFormat:
    question = {"role": "user", "content": _QUESTION}
    small = conversation.model_copy(update={"messages": ()})

    def written(**answer: Any) -> str:
        """What the template writes behind what it has in common with the generation prompt."""
        try:
            prompt = template.render([question], small, ask=True).text
            text = template.render([question, {"role": "assistant", "content": "", **answer}], small).text
        except Refused:
            return ""
        return text[template.whole_tokens(text, shared_start(prompt, text)) :]

    plain = written(content=_TEXT)
    filler = plain.partition(_TEXT)[0] if _TEXT in plain else ""
    reasoned = written(content=_TEXT, reasoning_content=_THOUGHT)
    thought = None
    if _THOUGHT in reasoned and _TEXT in reasoned.partition(_THOUGHT)[2]:
        before, _, after = reasoned.partition(_THOUGHT)
        thought = (before, after.partition(_TEXT)[0])
    ending = plain.partition(_TEXT)[2] if _TEXT in plain else ""

    def calls(*arguments: dict[str, Any]) -> str:
        """One call, or two, with these arguments; without what ends any answer."""
        pairs = zip((_NAME, _OTHER), arguments, strict=False)
        return written(tool_calls=[_call(name, each) for name, each in pairs]).removesuffix(ending)

    form = _call_format(calls(_ARGUMENTS), calls(_ARGUMENTS, _ARGUMENTS), filler) or _by_parameters(calls, filler)
    return AnswerFormat(filler, thought, form)


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": _ID, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_format(one: str, two: str, filler: str) -> _CallFormat | None:
    """The format of calls with JSON or in Python, from how one and two of them are written; None if it is neither."""
    opening, found, rest = one.partition(_NAME)
    keys, values = list(_ARGUMENTS), list(_ARGUMENTS.values())
    if not found or any(rest.count(each) != 1 for each in (*keys, *values)):
        return None
    place = rest.index(keys[0])
    python = rest[:place].endswith("(") and rest[place + len(keys[0])] == "="
    if python:
        middle, end = rest[:place], rest.index(values[1]) + len(values[1])
    else:
        begin = rest.rfind("{", 0, place)
        try:
            arguments, end = json.JSONDecoder().raw_decode(rest, begin) if begin >= 0 else (None, 0)
        except ValueError:
            return None
        if arguments != _ARGUMENTS:
            return None
        middle = rest[:begin]
    between = ""
    if _OTHER in two:
        between = two.partition(_OTHER)[0].partition(_NAME)[2][end:]
    return _CallFormat(opening.removeprefix(filler), middle, between, rest[end:], python=python)


def _by_parameters(calls: Callable[..., str], filler: str) -> _CallFormat | None:
    """The format of calls whose arguments are written one by one, from how `calls` with each kind of value are."""
    found: dict[str, tuple[_Parameter, set[str]]] = {}
    opening, named, behind = calls({_KEY: _VALUES[0]}).partition(_NAME)
    middle, keyed, _ = behind.partition(_KEY)
    if not named or not keyed:
        return None
    for value in _VALUES:
        alone, further, two = (
            calls(*each).partition(_NAME)[2].removeprefix(middle).removeprefix(_KEY)
            for each in (({_KEY: value},), ({_KEY: value, _NEXT: "qzvalb"},), ({_KEY: value}, {_KEY: value}))
        )
        forms = [json.dumps(value), json.dumps(value, separators=(",", ":"))] if value != _VALUES[0] else [value]
        shown = next((form for form in forms if form in alone), None)
        if shown is None or _NEXT not in further:
            continue  # written in a way of the template's own
        inside, _, closing = alone.partition(shown)
        between = two.removeprefix(inside + shown).partition(_OTHER)[0] if _OTHER in two else ""
        parameter = _Parameter(inside, further.removeprefix(inside + shown).partition(_NEXT)[0], between, closing)
        found.setdefault(inside, (parameter, set()))[1].add("text" if value == _VALUES[0] else "json")
    parameters = [replace(each, kind=kinds.pop() if len(kinds) == 1 else None) for each, kinds in found.values()]
    parameters.sort(key=lambda each: -len(each.inside))  # a longer one may begin as a shorter one does
    bare, pair = calls({}).partition(_NAME)[2], calls({}, {}).partition(_NAME)[2].partition(_OTHER)
    if not parameters:
        return None
    return _CallFormat(
        opening.removeprefix(filler), middle, "", "", tuple(parameters), (pair[0] if pair[1] else "", bare)
    )
