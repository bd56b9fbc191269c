"""Reads back what a target wrote: its reasoning, its text and its calls, as its own template writes them.

How a template writes each of these is learned by rendering an answer of texts that occur nowhere else. White space does
not count, numbers of calls and ids may be others, and the called functions must be among the tools. Text that does not
fit is left as it is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from draftline.data.conversations import Conversation, FunctionCall, ToolCall
from draftline.data.messages import BadRow, parse_calls
from draftline.data.template import ChatTemplate, Refused, shared_start

_QUESTION, _TEXT, _THOUGHT, _NAME, _OTHER, _ID = "qzASKzq", "qzTEXTzq", "qzWHYzq", "qzNAMEzq", "qzOTHERzq", "qzid00000"
_ARGUMENTS = {"qzkeya": "qzvala", "qzkeyb": "qzvalb"}


@dataclass(frozen=True)
class _CallFormat:
    """How a template writes calls: the texts before the name, before the arguments, between calls, and behind all.

    Attributes:
        parameter: texts before, inside and behind an argument, where each is written by itself; None for JSON.
        python: arguments are written as those of a Python call.
    """

    opening: str
    middle: str
    between: str
    closing: str
    parameter: tuple[str, str] | None = None
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
        opened = re.search(_flexible(form.opening), text) if form is not None and form.opening.strip() else None
        if form is None or opened is None:
            return None
        try:
            calls, rest = (self._python if form.python else self._calls)(form, text, opened.end())
        except (ValueError, BadRow, RecursionError):
            return None
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
            ahead = r"(?=\s*\{)" if form.parameter is None else ""
            middle = re.compile(rf"\s*(?P<name>[\w.:/-]+?)(?P<middle>{_flexible(form.middle)}){ahead}").match(text, at)
            if middle is None:
                raise ValueError("no call")
            name = middle.group("name")
            if form.parameter is None:
                begin = len(text) - len(text[middle.end() :].lstrip())
                arguments, at = json.JSONDecoder().raw_decode(text, begin)
                if not isinstance(arguments, dict):
                    raise ValueError("no object")
            else:
                arguments, at = self._parameters(form, name, text, middle.start("middle"))
            named = middle.groupdict().get("id")
            calls.append(ToolCall(id=named, function=FunctionCall(name=name, arguments=arguments)))
            following = re.compile(_flexible(form.between)).match(text, at) if form.between.strip() else None
            if following is None:
                return calls, text[at:]
            at = following.end()

    def _parameters(self, form: _CallFormat, name: str, text: str, at: int) -> tuple[dict[str, Any], int]:
        """Arguments that are written one by one, as their schema types them, and the place behind the last value."""
        assert form.parameter is not None
        schema = self.tools.get(name, {}).get("properties", {})
        inside, behind = form.parameter
        before = f"(?:{_flexible(form.middle)}|{_flexible(behind)})"
        value = rf"(?P<value>.*?)(?={_flexible(behind, half=True)})"
        pattern = re.compile(rf"(?s){before}(?P<key>\w+){_flexible(inside)}{value}")
        arguments: dict[str, Any] = {}
        while found := pattern.match(text, at):
            key, said = found.group("key"), found.group("value")
            kind = schema.get(key, {}).get("type") if isinstance(schema.get(key), dict) else None
            try:
                arguments[key] = said if kind == "string" else json.loads(said)
            except ValueError:
                arguments[key] = said
            at = found.end()
        return arguments, at


def _flexible(literal: str, *, half: bool = False) -> str:
    """A pattern of markup in which white space, numbers and ids may be others; `half` takes its first mark alone."""
    if half:
        literal = re.match(r"\s*(<[^<>]*>|\S+)?", literal).group()  # type: ignore[union-attr]
    pieces: list[str] = []
    for number, known in enumerate(literal.split(_ID)):
        if number:
            pieces.append(r"(?P<id>[\w-]+)" if number == 1 and not half else r"[\w-]+")
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
    one, two = (written(tool_calls=[_call(name) for name in names]) for names in ((_NAME,), (_NAME, _OTHER)))
    ending = plain.partition(_TEXT)[2] if _TEXT in plain else ""
    return AnswerFormat(filler, thought, _call_format(one, two, filler, ending))


def _call(name: str) -> dict[str, Any]:
    return {"id": _ID, "type": "function", "function": {"name": name, "arguments": _ARGUMENTS}}


def _call_format(one: str, two: str, filler: str, ending: str) -> _CallFormat | None:
    """The format of calls, from how one and two of them are written; None where it is not one that is read."""
    opening, found, rest = one.partition(_NAME)
    keys, values = list(_ARGUMENTS), list(_ARGUMENTS.values())
    if not found or any(rest.count(each) != 1 for each in (*keys, *values)):
        return None
    place = rest.index(keys[0])
    python = rest[:place].endswith("(") and rest[place + len(keys[0])] == "="
    parameter = None
    if rest[place - 1] == '"':
        begin = rest.rfind("{", 0, place)
        try:
            arguments, end = json.JSONDecoder().raw_decode(rest, begin)
        except ValueError:
            return None
        if arguments != _ARGUMENTS:
            return None
        middle = rest[:begin]
    else:
        first, second = (rest.index(value) for value in values)
        middle, end = rest[:place], second + len(values[1])
        parameter = (rest[place + len(keys[0]) : first], rest[first + len(values[0]) : rest.index(keys[1])])
    between = ""
    if _OTHER in two:
        behind = two.partition(_OTHER)[0].partition(_NAME)[2]
        between = behind[end:]
    closing = rest[end:].removesuffix(ending)
    return _CallFormat(opening.removeprefix(filler), middle, between, closing, parameter, python)
