"""One message of any dialect as a `Message`: role names, content types, tool calls, reasoning, train flags."""

from __future__ import annotations

import json
from typing import Any, get_args

from pydantic import ValidationError

from draftline.data.conversations import FinishReason, FunctionCall, Message, ReasoningField, ToolCall

_ROLES = {
    "human": "user", "user": "user", "prompter": "user", "usr": "user", "customer": "user",
    "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant", "bot": "assistant", "chatbot": "assistant", "ai": "assistant", "agent": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "tool", "function_response": "tool", "tool_response": "tool",
    "tool_result": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_CALL_ROLES = frozenset({"function_call", "tool_call"})
_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_REASONING_PARTS = frozenset({"thinking", "reasoning"})
_WEIGHT_KEYS = ("weight", "loss_weight", "train", "training", "trainable", "loss")
_MEDIA_PARTS = frozenset({"video", "video_url", "audio", "audio_url", "input_audio", "file"})


class BadRow(Exception):
    """A row cannot be used; `reason` is its name in the report."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def parse_message(value: Any, notes: list[str], *, strip_images: bool) -> list[Message]:
    """A message of OpenAI or ShareGPT style; `notes` collects what is worth a look.

    Returns one message. Null fields count as absent, because tables fill every field of every row.
    """
    if not isinstance(value, dict):
        raise BadRow("message_not_an_object")
    fields = {key: item for key, item in value.items() if item is not None}
    said = _first(fields, ("role", "from", "speaker"))
    if not isinstance(said, str):
        raise BadRow("message_without_role")
    role = _ROLES.get(said.strip().lower(), said.strip().lower())
    content, thought = _content(_first(fields, ("content", "value", "text")), role, strip_images)
    calls = _tool_calls(fields)
    if said.strip().lower() in _CALL_ROLES:
        calls, content = _shared_call(content, notes)
    reasoning_field, reasoning = _reasoning(fields)
    if thought and reasoning is None:
        reasoning = thought
    reason = fields.get("finish_reason")
    try:
        return [
            Message(
                role=role,
                content=content,
                reasoning_content=reasoning,
                reasoning_field=reasoning_field,
                tool_calls=calls,
                tool_call_id=_text_or_none(fields.get("tool_call_id")),
                name=_text_or_none(fields.get("name")),
                train=_train_flag(fields, notes),
                finish_reason=reason if reason in get_args(FinishReason) else None,
            )
        ]
    except ValidationError:
        raise BadRow("bad_message") from None


def _first(fields: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((fields[key] for key in keys if key in fields), None)


def _text_or_none(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _content(value: Any, role: str, strip_images: bool) -> tuple[str, str]:
    """The text of a message, and the reasoning that stands among its parts."""
    if value is None:
        return "", ""
    if isinstance(value, str):
        return value, ""
    if isinstance(value, list) and all(isinstance(part, str) or _is_part(part) for part in value):
        return _join_parts(value, strip_images)
    if role == "tool":
        return json.dumps(value, ensure_ascii=False), ""
    raise BadRow("bad_content")


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and ("type" in value or "text" in value)


def _join_parts(parts: list[Any], strip_images: bool) -> tuple[str, str]:
    """Text parts joined by line breaks, as servers join them for text-only models, and the same of reasoning parts."""
    texts: list[str] = []
    thoughts: list[str] = []
    for part in parts:
        kind = "text" if isinstance(part, str) else part.get("type") or "text"
        text = part if isinstance(part, str) else _first(part, ("text", "thinking", "reasoning"))
        if not isinstance(kind, str):
            raise BadRow("bad_content")
        if kind in _IMAGE_PARTS or kind in _MEDIA_PARTS:
            if not strip_images:
                raise BadRow("has_image" if kind in _IMAGE_PARTS else "has_media")
        elif isinstance(text, str) and kind in _TEXT_PARTS | _REASONING_PARTS:
            (thoughts if kind in _REASONING_PARTS else texts).append(text)
        else:
            raise BadRow(f"unknown_content_part: {kind[:40]}")
    return "\n".join(texts), "\n".join(thoughts)


def _reasoning(fields: dict[str, Any]) -> tuple[ReasoningField, str | None]:
    for name in get_args(ReasoningField):
        if name in fields:
            if not isinstance(fields[name], str):
                raise BadRow("bad_reasoning")
            return name, fields[name]
    return "reasoning_content", None


def _train_flag(fields: dict[str, Any], notes: list[str]) -> bool:
    key = next((key for key in _WEIGHT_KEYS if key in fields), "")
    flag = fields.get(key, True)
    if isinstance(flag, bool):
        return flag
    if not isinstance(flag, int | float) or not flag >= 0:
        raise BadRow(f"bad_{key}")
    if flag not in (0, 1):
        notes.append("fractional_weight_taken_as_one")
    return flag > 0


def _tool_calls(fields: dict[str, Any]) -> tuple[ToolCall, ...]:
    calls = fields.get("tool_calls", [])
    if isinstance(calls, str):
        calls = _load(calls, "bad_tool_calls") if calls else []
    if not isinstance(calls, list):
        raise BadRow("bad_tool_calls")
    if not calls and isinstance(fields.get("function_call"), dict):
        calls = [fields["function_call"]]
    return tuple(parse_call(call) for call in calls)


def parse_call(value: Any) -> ToolCall:
    """A call as OpenAI nests it, or only its name and arguments; raises `BadRow` if it is neither."""
    if not isinstance(value, dict):
        raise BadRow("bad_tool_calls")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_calls")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict | str):
        raise BadRow("bad_tool_calls")
    return ToolCall(
        id=_text_or_none(value.get("id")), function=FunctionCall(name=function["name"], arguments=arguments)
    )


def _shared_call(content: str, notes: list[str]) -> tuple[tuple[ToolCall, ...], str]:
    """The calls in a ShareGPT `function_call` turn; text that is not a call stays content."""
    try:
        value = json.loads(content)
        return tuple(parse_call(call) for call in (value if isinstance(value, list) else [value])), ""
    except (ValueError, RecursionError, BadRow):
        notes.append("call_is_not_json")
        return (), content


def parse_tools(value: Any) -> tuple[dict[str, Any], ...]:
    """Tool schemas from a list, from JSON text, or from nothing; bare function schemas are wrapped."""
    if isinstance(value, str):
        value = _load(value, "bad_tools") if value.strip() else None
    if value is None:
        return ()
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow("bad_tools")
    return tuple(_tool(tool) for tool in value)


def _tool(value: Any) -> dict[str, Any]:
    tool = value if isinstance(value, dict) and "function" in value else {"type": "function", "function": value}
    if not isinstance(tool["function"], dict) or not isinstance(tool["function"].get("name"), str):
        raise BadRow("bad_tools")
    cleaned: dict[str, Any] = _without_nulls(tool)
    return cleaned


def _without_nulls(value: Any) -> Any:
    """Nested dictionaries without null entries, which tables add to give all rows the same fields."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _load(text: str, reason: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(reason) from None
