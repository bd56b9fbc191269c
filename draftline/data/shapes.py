"""Turns a row of any of the shapes that people have into one of the forms of `conversations.py`.

A row is told by its keys: token ids, a list of messages under one of several names, a list of turns, a pair of prompt
and completion, instructions, a lone prompt, or formatted text. A message is one of any dialect: role names, content
types, tool calls, reasoning, train flags. Keys beyond those are ignored (data sets carry ids, scores and sources); a
value of the wrong type under a known key is refused with its reason. Null counts as absent, because tables fill every
field of every row.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from pydantic import ValidationError

from draftline.data.conversations import (
    Chat,
    Conversation,
    FinishReason,
    FormattedText,
    FunctionCall,
    Message,
    ParsedRow,
    ReasoningField,
    TokenRow,
    ToolCall,
    Unusable,
)
from draftline.data.parts import unclosed_reasoning

_CHAT_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_PAIRS = (
    ("prompt", ("completion", "response", "chosen", "output")),
    ("question", ("response", "output", "completion")),
    ("query", ("response", "answer")),
    ("input", ("output",)),
)
_REASONING_KEYS = frozenset(get_args(ReasoningField))
_IMAGE_KEYS, _MEDIA_KEYS = ("image", "images"), ("video", "videos", "audio", "audios")
_PROMPT_KEYS = ("prompt", "question", "instruction", "query", "problem")
TEMPLATE_ARGUMENTS = frozenset(
    {"conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
     "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
     "return_assistant_tokens_mask", "sanitize_control_tokens", "messages"}
)  # fmt: skip
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
    """A row cannot be used; the message is the reason's name in the report."""


def parse_row(value: Any, *, strip_images: bool = False) -> ParsedRow:
    """Tell the shape of a row and convert it. Never raises: what cannot be used comes back as `Unusable`."""
    try:
        return _parse(value, strip_images)
    except BadRow as bad:
        return Unusable(str(bad))


def _parse(value: Any, strip_images: bool) -> ParsedRow:
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise BadRow("not_an_object")
    row = _present(value)
    if "input_ids" in row:
        return _token_row(row)
    for reason, keys in (("has_image", _IMAGE_KEYS), ("has_media", _MEDIA_KEYS)):
        if not strip_images and any(row.get(key) for key in keys):
            raise BadRow(reason)
    reader = _Reader(strip_images)
    messages = reader.messages_of(row)
    if messages is None:
        if isinstance(row.get("text"), str):
            return FormattedText(row["text"])
        raise BadRow("unknown_shape")
    messages = _with_system(row, messages)
    if any("\0" in message.content or "\0" in (message.reasoning_content or "") for message in messages):
        raise BadRow("nul_character")
    conversation = Conversation(
        messages=tuple(messages),
        tools=_tools(row.get("tools", row.get("functions"))),
        template_options=_template_options(row),
    )
    return Chat(conversation, tuple(dict.fromkeys([*reader.notes, *_notes(messages)])))


@dataclass
class _Reader:
    """Reads the messages of one row, and notes what is worth a look."""

    strip_images: bool
    notes: list[str] = field(default_factory=list)

    def messages_of(self, row: dict[str, Any]) -> list[Message] | None:
        """The messages of a row; None if it holds none in any known shape."""
        chats = [key for key in _CHAT_KEYS if key in row]
        if chats:
            if len(chats) > 1:
                self.notes.append("several_chat_keys")
            return self._list(_as_list(row[chats[0]]))
        if "turns" in row:
            turns = _as_list(row["turns"])
            texts = all(isinstance(turn, str) for turn in turns)
            return [Message(role="user", content=turn) for turn in turns] if texts else self._list(turns)
        if "instruction" in row:
            return self._alpaca(row)
        for prompt_key, answer_keys in _PAIRS:
            answer_key = next((key for key in answer_keys if key in row), None)
            if prompt_key in row and answer_key is not None:
                self.notes.append("template_applied_to_pair")
                asked = self._turns(row[prompt_key], "user")
                answered = self._turns(row[answer_key], "assistant", beside=row)
                # A preference row may repeat the prompt at the head of its chosen answer.
                return answered if asked and answered[: len(asked)] == asked else asked + answered
        key = next((key for key in _PROMPT_KEYS if key in row), None)
        return None if key is None else self._turns(row[key], "user")

    def _list(self, values: Iterable[Any]) -> list[Message]:
        return [self._message(value) for value in values]

    def _turns(self, value: Any, role: str, *, beside: dict[str, Any] | None = None) -> list[Message]:
        """A text as one turn, with reasoning that the row has `beside` it; or a list of messages as it is."""
        if isinstance(value, list):
            return self._list(value)
        if not isinstance(value, str):
            raise BadRow("bad_content")
        thoughts = {key: text for key, text in (beside or {}).items() if key in _REASONING_KEYS}
        thoughts = {key: text for key, text in thoughts.items() if isinstance(text, str)}
        return [self._message({"role": role, "content": value, **thoughts})]

    def _alpaca(self, row: dict[str, Any]) -> list[Message]:
        """Instruction and input (or context) as one question, behind the earlier turns that `history` has as pairs."""
        instruction = row["instruction"]
        given = row.get("input") or row.get("context") or ""
        if not isinstance(instruction, str) or not isinstance(given, str):
            raise BadRow("bad_content")
        earlier = row.get("history") or []
        if not isinstance(earlier, list) or not all(isinstance(turns, list) and len(turns) == 2 for turns in earlier):
            raise BadRow("bad_history")
        messages = [
            message
            for turns in earlier
            for role, text in zip(("user", "assistant"), turns, strict=True)
            for message in self._turns(text, role)
        ]
        messages.append(Message(role="user", content=f"{instruction}\n\n{given}" if given else instruction))
        answer = next((row[key] for key in ("output", "response") if key in row), None)
        return messages if answer is None else messages + self._turns(answer, "assistant", beside=row)

    def _message(self, value: Any) -> Message:
        """A message of OpenAI or ShareGPT style."""
        if not isinstance(value, dict):
            raise BadRow("message_not_an_object")
        fields = _present(value)
        said = _first(fields, ("role", "from", "speaker"))
        if not isinstance(said, str):
            raise BadRow("message_without_role")
        said = said.strip().lower()
        role = _ROLES.get(said, said)
        content, thought = self._content(_first(fields, ("content", "value", "text")), role)
        calls = _tool_calls(fields)
        if said in _CALL_ROLES:
            calls, content = self._shared_call(content)
        reasoning_field, reasoning = _reasoning(fields)
        reason = fields.get("finish_reason")
        if role == "assistant" and reasoning is None and unclosed_reasoning(content) is not None:
            self.notes.append("unclosed_reasoning")
            reason = "length"
        try:
            return Message(
                role=role,
                content=content,
                reasoning_content=thought if thought and reasoning is None else reasoning,
                reasoning_field=reasoning_field,
                tool_calls=calls,
                tool_call_id=_text_or_none(fields.get("tool_call_id")),
                name=_text_or_none(fields.get("name")),
                train=self._train_flag(fields),
                finish_reason=reason if reason in get_args(FinishReason) else None,
            )
        except ValidationError:
            raise BadRow("bad_message") from None

    def _content(self, value: Any, role: str) -> tuple[str, str]:
        """The text of a message, and the reasoning that stands among its parts."""
        if value is None:
            return "", ""
        if isinstance(value, str):
            return value, ""
        if isinstance(value, list) and all(isinstance(part, str) or _is_part(part) for part in value):
            return self._join_parts(value)
        if role == "tool":
            return json.dumps(value, ensure_ascii=False), ""
        raise BadRow("bad_content")

    def _join_parts(self, parts: list[Any]) -> tuple[str, str]:
        """Text parts joined by line breaks, as servers join them for text-only models; so with reasoning parts."""
        texts: list[str] = []
        thoughts: list[str] = []
        for part in parts:
            kind = "text" if isinstance(part, str) else part.get("type") or "text"
            text = part if isinstance(part, str) else _first(part, ("text", "thinking", "reasoning"))
            if not isinstance(kind, str):
                raise BadRow("bad_content")
            if kind in _IMAGE_PARTS or kind in _MEDIA_PARTS:
                if not self.strip_images:
                    raise BadRow("has_image" if kind in _IMAGE_PARTS else "has_media")
            elif isinstance(text, str) and kind in _TEXT_PARTS | _REASONING_PARTS:
                (thoughts if kind in _REASONING_PARTS else texts).append(text)
            else:
                raise BadRow(f"unknown_content_part: {kind[:40]}")
        return "\n".join(texts), "\n".join(thoughts)

    def _train_flag(self, fields: dict[str, Any]) -> bool:
        key = next((key for key in _WEIGHT_KEYS if key in fields), "")
        flag = fields.get(key, True)
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
            value = _load(content, "bad_tool_calls")
            return tuple(parse_call(call) for call in (value if isinstance(value, list) else [value])), ""
        except BadRow:
            self.notes.append("call_is_not_json")
            return (), content


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if value is not None}


def _first(fields: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((fields[key] for key in keys if key in fields), None)


def _text_or_none(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _is_part(value: Any) -> bool:
    return isinstance(value, dict) and ("type" in value or "text" in value)


def _reasoning(fields: dict[str, Any]) -> tuple[ReasoningField, str | None]:
    for name in get_args(ReasoningField):
        if name in fields:
            if not isinstance(fields[name], str):
                raise BadRow("bad_reasoning")
            return name, fields[name]
    return "reasoning_content", None


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
    """A call as OpenAI nests it, or only its name and arguments; raises `BadRow` if it is neither.

    Arguments are an object, or its JSON text; none, an empty text and null mean an empty object.
    """
    if not isinstance(value, dict):
        raise BadRow("bad_tool_calls")
    function = value.get("function", value)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("bad_tool_calls")
    arguments = function.get("arguments", function.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            raise BadRow(f"arguments_not_an_object: {function['name'][:40]}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(f"arguments_not_an_object: {function['name'][:40]}")
    return ToolCall(
        id=_text_or_none(value.get("id")), function=FunctionCall(name=function["name"], arguments=arguments)
    )


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
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


def _as_list(value: Any) -> list[Any]:
    """A list, also when it is written as JSON text."""
    if isinstance(value, str):
        value = _load(value, "messages_not_json")
    if not isinstance(value, list):
        raise BadRow("messages_not_a_list")
    return value


def _with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    for key in ("system", "system_prompt"):
        text = row.get(key)
        if isinstance(text, str) and text and not (messages and messages[0].role == "system"):
            return [Message(role="system", content=text), *messages]
    return messages


def _template_options(row: dict[str, Any]) -> dict[str, Any]:
    options = row.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or TEMPLATE_ARGUMENTS & options.keys():
        raise BadRow("bad_chat_template_kwargs")
    return _present(options)


def _notes(messages: list[Message]) -> list[str]:
    spoken = [message for message in messages if message.role not in ("system", "developer")]
    notes = []
    if spoken and spoken[0].role == "assistant":
        notes.append("starts_with_assistant")
    if spoken and spoken[-1].role == "user" and any(message.role == "assistant" for message in spoken):
        notes.append("ends_with_user")
    return notes


def _token_row(row: dict[str, Any]) -> TokenRow:
    ids = row["input_ids"]
    if not isinstance(ids, list):
        raise BadRow("bad_input_ids")
    for key in ("loss_mask", "assistant_masks", "completion_mask"):
        if isinstance(row.get(key), list):
            return TokenRow(ids, row[key])
    labels = row.get("labels")
    if not isinstance(labels, list):
        return TokenRow(ids, None)
    if any(label not in (-100, token) for label, token in zip(labels, ids, strict=False)):
        raise BadRow("labels_differ_from_input_ids")
    return TokenRow(ids, [int(label != -100) for label in labels])
