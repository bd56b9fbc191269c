"""Reads one message of any dialect: role names, content types, tool calls, reasoning, flags.

A value of the wrong type under a known field is refused with its reason. A null field counts as absent; nulls inside
the arguments of a call and inside a tool's schema are the user's, and stay.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from pydantic import ValidationError

from draftline.data.conversations import FinishReason, FunctionCall, Message, ReasoningField, ToolCall
from draftline.data.parts import unclosed_reasoning

_ROLES = {
    "human": "user", "user": "user", "prompter": "user", "usr": "user", "customer": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "chatbot": "assistant", "ai": "assistant", "agent": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "tool_result": "tool", "environment": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_EXCHANGES = (("input", "output"), ("human", "assistant"), ("user", "assistant"), ("prompt", "response"))
"""Fields of a question and its answer that stand in one entry of a list of messages."""
_CALL_ROLES = frozenset({"function_call", "tool_call"})
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "reasoning"})
_MEDIA_PARTS = frozenset({"video", "video_url", "audio", "audio_url", "input_audio", "file"})
_CALL_PART, _RESULT_PART = "tool_use", "tool_result"
FLAG_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
"""Fields of a message, or of a row, that say whether it is learned, and how much."""
REASON_KEYS = ("finish_reason", "stop_reason")
"""Fields of a message, or of a row, that say why an answer ended."""
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length"})
_FIELDS = frozenset(
    {"role", "from", "speaker", "content", "value", "text", "refusal", "tool_calls", "function_call", "function_calls",
     "functions", "tool_call_id", "name", "reasoning_details", "train_detail", *FLAG_KEYS, *REASON_KEYS,
     *get_args(ReasoningField)}
)  # fmt: skip
_DEEPEST = 100
"""Levels of arguments and tool schemas; templates and JSON writers end in an error somewhere beyond."""


class BadRow(Exception):
    """A row cannot be used; the message is the reason's name in the report."""


@dataclass
class MessageReader:
    """Reads the messages of one row.

    Attributes:
        notes: what is worth a look, as reasons of the report.
        unread: fields that were not understood.
        tools: schemas that stood in a message.
    """

    strip_images: bool = False
    notes: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    tools: Any = None

    def messages(self, values: Iterable[Any]) -> list[Message]:
        """The messages of a list."""
        return [message for value in values for message in self._messages(value)]

    def message(self, role: str, content: str, **fields: Any) -> Message:
        """An answer or a question that stands in a row by itself."""
        return self._messages({"role": role, "content": content, **fields})[-1]

    def _messages(self, value: Any) -> list[Message]:
        """A message of OpenAI, ShareGPT or Anthropic style; the last may hold results of tools beside its text."""
        if not isinstance(value, dict):
            raise BadRow("message_not_an_object")
        fields = present(value)
        said = first_of(fields, ("role", "from", "speaker"))
        pair = next((keys for keys in _EXCHANGES if said is None and fields.keys() >= set(keys)), ())
        if pair:
            self.unread |= {f"messages.{key}" for key in fields.keys() - set(pair)}
            roles = zip(("user", "assistant"), pair, strict=True)
            return [self.message(role, fields[key]) for role, key in roles]
        if not isinstance(said, str):
            raise BadRow("message_without_role")
        said = said.strip().lower()
        role = _ROLES.get(said, said)
        self.unread |= {
            f"messages.{key}" for key, item in fields.items() if key not in _FIELDS and item not in ([], {})
        }
        if "functions" in fields:
            self.tools = fields["functions"]
        content = first_of(fields, ("content", "value", "text"))
        content = fields.get("refusal") if content is None else content
        results, content = self._results(content)
        text, thought, calls = self._content(content, role)
        calls += _tool_calls(fields)
        if said in _CALL_ROLES:
            calls, text = self._shared_call(text)
        if results and not text:
            return results
        return [*results, self._built(fields, role, text, thought, calls)]

    def _built(
        self, fields: dict[str, Any], role: str, text: str, thought: str, calls: tuple[ToolCall, ...]
    ) -> Message:
        name, reasoning = _reasoning(fields)
        reasoning = thought if thought and reasoning is None else reasoning
        reason = finish_reason(fields)
        if role == "assistant" and reasoning is None and unclosed_reasoning(text) is not None:
            self.notes.append("unclosed_reasoning")
            reason = "length"
        try:
            return Message(
                role=role,
                content=text,
                reasoning_content=reasoning,
                reasoning_field=name,
                tool_calls=calls,
                tool_call_id=text_or_none(fields.get("tool_call_id")),
                name=text_or_none(fields.get("name")),
                train=self.train_flag(fields),
                finish_reason=reason,
            )
        except ValidationError:
            raise BadRow("bad_message") from None

    def _results(self, content: Any) -> tuple[list[Message], Any]:
        """The results of tools among content parts, as messages of their own, and the other parts."""
        if not isinstance(content, list):
            return [], content
        found = [part for part in content if isinstance(part, dict) and part.get("type") == _RESULT_PART]
        results = [
            Message(
                role="tool",
                content=self._content(part.get("content"), "tool")[0],
                tool_call_id=text_or_none(part.get("tool_use_id")),
            )
            for part in found
        ]
        return results, [part for part in content if part not in found] if found else content

    def _content(self, value: Any, role: str) -> tuple[str, str, tuple[ToolCall, ...]]:
        """The text of a message, and the reasoning and the calls that stand among its parts."""
        if value is None:
            return "", "", ()
        if isinstance(value, str):
            return value, "", ()
        if isinstance(value, list) and all(isinstance(part, str) or _is_part(part) for part in value):
            return self._join_parts(value)
        if role == "tool":
            return json.dumps(value, ensure_ascii=False), "", ()
        raise BadRow("bad_content")

    def _join_parts(self, parts: list[Any]) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Text parts joined by line breaks, as servers join them for text-only models; so with reasoning parts."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for part in parts:
            kind = "text" if isinstance(part, str) else part.get("type") or "text"
            text = part if isinstance(part, str) else first_of(part, ("text", "thinking", "reasoning"))
            if not isinstance(kind, str):
                raise BadRow("bad_content")
            if kind in _IMAGE_PARTS or kind in _MEDIA_PARTS:
                if not self.strip_images:
                    raise BadRow("has_image" if kind in _IMAGE_PARTS else "has_media")
            elif kind == _CALL_PART:
                calls.append(parse_call({**part, "arguments": part.get("input")}))
            elif isinstance(text, str) and kind in _TEXT_PARTS | _REASONING_PARTS:
                (thoughts if kind in _REASONING_PARTS else texts).append(text)
            else:
                raise BadRow(f"unknown_content_part: {kind[:40]}")
        return "\n".join(texts), "\n".join(thoughts), tuple(calls)

    def train_flag(self, fields: dict[str, Any]) -> bool:
        """Whether a message, or a row, is to be learned."""
        key = next((key for key in FLAG_KEYS if key in fields), "")
        flag = fields.get(key, True)
        if isinstance(details := fields.get("train_detail"), list) and not key:
            flags = {part.get("train", True) is True for part in details if isinstance(part, dict)}
            if flags == {True, False}:
                self.notes.append("partly_trained_turn_left_out")
            return False not in flags
        if isinstance(flag, bool):
            return flag
        if not isinstance(flag, int | float) or not flag >= 0:
            raise BadRow(f"bad_{key}")
        if flag not in (0, 1):
            self.notes.append("fractional_weight_taken_as_one")
        return flag > 0

    def _shared_call(self, content: str) -> tuple[tuple[ToolCall, ...], str]:
        """The calls in a ShareGPT `function_call` turn; text that is not a call stays content."""
        try:
            value = load(content, "bad_tool_calls")
            return tuple(parse_call(call) for call in (value if isinstance(value, list) else [value])), ""
        except BadRow as bad:
            if str(bad) != "bad_tool_calls":
                raise
            self.notes.append("call_is_not_json")
            return (), content


def present(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that are not null."""
    return {key: value for key, value in fields.items() if value is not None}


def first_of(fields: dict[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first of the keys that is there."""
    return next((fields[key] for key in keys if key in fields), None)


def text_or_none(value: Any) -> str | None:
    """A text, or what JSON makes of another value."""
    return value if value is None or isinstance(value, str) else json.dumps(value)


def load(text: str, reason: str) -> Any:
    """The value of a JSON text; raises `BadRow` with the reason if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(reason) from None


def finish_reason(fields: dict[str, Any]) -> FinishReason | None:
    """Why an answer ended, as a message or a row says it; None if it does not."""
    for key in REASON_KEYS:
        said = fields.get(key)
        if said in _CUT:
            return "length"
        if said in get_args(FinishReason):
            return cast(FinishReason, said)
    return None


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and ("type" in value or "text" in value)


def _reasoning(fields: dict[str, Any]) -> tuple[ReasoningField, str | None]:
    """The name under which a message has reasoning, and its text; texts in lists are joined by line breaks."""
    for name in (*get_args(ReasoningField), "reasoning_details"):
        if name in fields:
            text = _reasoning_text(fields[name])
            return (name if name != "reasoning_details" else "reasoning_content"), text
    return "reasoning_content", None


def _reasoning_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _reasoning_text(first_of(value, ("text", "content", "summary", "thinking")))
    if isinstance(value, list):
        return "\n".join(map(_reasoning_text, value))
    raise BadRow("bad_reasoning")


def _tool_calls(fields: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = fields.get("tool_calls", [])
    if isinstance(calls, str):
        calls = load(calls, "bad_tool_calls") if calls else []
    if not isinstance(calls, list):
        raise BadRow("bad_tool_calls")
    if not calls and isinstance(fields.get("function_call"), dict):
        calls = [fields["function_call"]]
    if not calls and fields.get("function_calls"):
        return parse_calls(fields["function_calls"])
    return tuple(parse_call(call) for call in calls)


def parse_calls(value: Any) -> tuple[ToolCall, ...]:
    """Calls as a list, as JSON text of one, or as Python calls, one a line; raises `BadRow` if they are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return _python_calls(value)
    return tuple(parse_call(call) for call in (value if isinstance(value, list) else [value]))


def _python_calls(text: str) -> tuple[ToolCall, ...]:
    """Calls such as `look_up(city="Oslo", days=3)`."""
    calls = []
    try:
        for line in ast.parse(text.strip()).body:
            said: Any = getattr(line, "value", None)
            found: list[Any] = said.elts if isinstance(said, ast.List) else [said]
            for call in found:
                if call.args:
                    raise ValueError("arguments without a name")
                arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
                calls.append(ToolCall(function=FunctionCall(name=ast.unparse(call.func), arguments=arguments)))
    except (ValueError, SyntaxError, AttributeError, RecursionError, ValidationError):
        raise BadRow("bad_tool_calls") from None
    return tuple(calls)


def parse_call(value: Any) -> ToolCall:
    """A call as OpenAI nests it, or only its name and arguments; raises `BadRow` if it is neither.

    Arguments are an object, or its JSON text; none, an empty text and null mean an empty object.
    """
    if not isinstance(value, dict):
        raise BadRow("bad_tool_calls")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_calls")
    arguments = first_of(present(function), ("arguments", "parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise BadRow(f"arguments_not_an_object: {function['name'][:40]}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(f"arguments_not_an_object: {function['name'][:40]}")
    refuse_deep(arguments)
    return ToolCall(id=text_or_none(value.get("id")), function=FunctionCall(name=function["name"], arguments=arguments))


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tool schemas from a list, from JSON text, or from nothing; bare function schemas are wrapped."""
    if isinstance(value, str):
        value = load(value, "bad_tools") if value.strip() else None
    if value is None:
        return ()
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow("bad_tools")
    return tuple(_tool(load(tool, "bad_tools") if isinstance(tool, str) else tool) for tool in value)


def _tool(value: Any) -> dict[str, Any]:
    """A schema as OpenAI nests it; one without `function` is the function itself, beside its `type` or without one."""
    refuse_deep(value)
    if not isinstance(value, dict):
        raise BadRow("bad_tools")
    if "function" in value:
        tool = value
    elif value.get("type", "function") == "function":
        tool = {"type": "function", "function": {key: item for key, item in value.items() if key != "type"}}
    else:
        tool = {"type": "function", "function": value}
    if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
        raise BadRow("bad_tools")
    return tool


def refuse_deep(value: Any) -> None:
    """Raise `BadRow` where a value is nested deeper than what comes after can take."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise BadRow("nested_too_deep")
