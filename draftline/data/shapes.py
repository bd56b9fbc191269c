"""Turns a row of any of the shapes that people have into one of the forms of `rows.py`.

A row is told by its keys: token ids, a list of messages under one of several names, a list of turns, a pair of prompt
and completion, instructions, a lone prompt, or formatted text. Keys beyond those are ignored (data sets carry ids,
scores and sources); a value of the wrong type under a known key is refused with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, get_args

from draftline.data.conversations import (
    Chat,
    Conversation,
    FormattedText,
    Message,
    ParsedRow,
    ReasoningField,
    TokenRow,
    Unusable,
)
from draftline.data.messages import BadRow, parse_message, parse_tools

CHAT_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
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


def parse_row(value: Any, *, strip_images: bool = False) -> ParsedRow:
    """Tell the shape of a row and convert it. Never raises: what cannot be used comes back as `Unusable`."""
    try:
        return _parse(value, strip_images)
    except BadRow as bad:
        return Unusable(bad.reason)


def _parse(value: Any, strip_images: bool) -> ParsedRow:
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        return Unusable("not_an_object")
    row = {key: item for key, item in value.items() if item is not None}
    if "input_ids" in row:
        return _token_row(row)
    for reason, keys in (("has_image", _IMAGE_KEYS), ("has_media", _MEDIA_KEYS)):
        if not strip_images and any(row.get(key) for key in keys):
            raise BadRow(reason)
    notes: list[str] = []
    messages = _find_messages(row, notes, strip_images)
    if messages is None:
        return FormattedText(row["text"]) if isinstance(row.get("text"), str) else Unusable("unknown_shape")
    messages = _with_system(row, messages)
    _check_texts(messages)
    conversation = Conversation(
        messages=tuple(messages),
        tools=parse_tools(row.get("tools", row.get("functions"))),
        template_options=_template_options(row),
    )
    return Chat(conversation, tuple(dict.fromkeys([*notes, *_notes(messages)])))


def _find_messages(row: dict[str, Any], notes: list[str], strip_images: bool) -> list[Message] | None:
    """The messages of a row; None if it holds none in any known shape."""
    chats = [key for key in CHAT_KEYS if key in row]
    if chats:
        if len(chats) > 1:
            notes.append("several_chat_keys")
        return _parse_messages(_as_list(row[chats[0]]), notes, strip_images)
    if "turns" in row:
        return _parse_turns(_as_list(row["turns"]), notes, strip_images)
    if "instruction" in row:
        return _alpaca(row, notes, strip_images)
    for prompt_key, answer_keys in _PAIRS:
        answer_key = next((key for key in answer_keys if key in row), None)
        if prompt_key in row and answer_key is not None:
            notes.append("template_applied_to_pair")
            asked = _as_turns(row[prompt_key], "user", notes, strip_images)
            answered = _as_turns(row[answer_key], "assistant", notes, strip_images, beside=row)
            # A preference row may repeat the prompt at the head of its chosen answer.
            return answered if asked and answered[: len(asked)] == asked else asked + answered
    for key in _PROMPT_KEYS:
        if key in row:
            return _as_turns(row[key], "user", notes, strip_images)
    return None


def _parse_messages(values: Iterable[Any], notes: list[str], strip_images: bool) -> list[Message]:
    return [message for value in values for message in parse_message(value, notes, strip_images=strip_images)]


def _parse_turns(values: list[Any], notes: list[str], strip_images: bool) -> list[Message]:
    if all(isinstance(value, str) for value in values):
        return [Message(role="user", content=value) for value in values]
    return _parse_messages(values, notes, strip_images)


def _as_turns(
    value: Any, role: str, notes: list[str], strip_images: bool, *, beside: dict[str, Any] | None = None
) -> list[Message]:
    """A text as one turn, with reasoning that the row has `beside` it; or a list of messages as it is."""
    if isinstance(value, list):
        return _parse_messages(value, notes, strip_images)
    if not isinstance(value, str):
        raise BadRow("bad_content")
    thoughts = {key: text for key, text in (beside or {}).items() if key in _REASONING_KEYS and isinstance(text, str)}
    return parse_message({"role": role, "content": value, **thoughts}, notes, strip_images=strip_images)


def _alpaca(row: dict[str, Any], notes: list[str], strip_images: bool) -> list[Message]:
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
        for message in _as_turns(text, role, notes, strip_images)
    ]
    messages.append(Message(role="user", content=f"{instruction}\n\n{given}" if given else instruction))
    answer = next((row[key] for key in ("output", "response") if key in row), None)
    return messages if answer is None else messages + _as_turns(answer, "assistant", notes, strip_images, beside=row)


def _as_list(value: Any) -> list[Any]:
    """A list, also when it is written as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("messages_not_json") from None
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
    return {key: value for key, value in options.items() if value is not None}


def _check_texts(messages: Iterable[Message]) -> None:
    for message in messages:
        if "\0" in message.content or "\0" in (message.reasoning_content or ""):
            raise BadRow("nul_character")


def _notes(messages: list[Message]) -> list[str]:
    spoken = [message for message in messages if message.role not in ("system", "developer")]
    notes = []
    if spoken and spoken[0].role == "assistant":
        notes.append("starts_with_assistant")
    if spoken and spoken[-1].role == "user" and any(message.role == "assistant" for message in spoken):
        notes.append("ends_with_user")
    return notes


def _token_row(row: dict[str, Any]) -> TokenRow | Unusable:
    ids = row["input_ids"]
    if not isinstance(ids, list):
        return Unusable("bad_input_ids")
    for key in ("loss_mask", "assistant_masks", "completion_mask"):
        if isinstance(row.get(key), list):
            return TokenRow(ids, row[key])
    labels = row.get("labels")
    if not isinstance(labels, list):
        return TokenRow(ids, None)
    if any(label not in (-100, token) for label, token in zip(labels, ids, strict=False)):
        return Unusable("labels_differ_from_input_ids")
    return TokenRow(ids, [int(label != -100) for label in labels])
