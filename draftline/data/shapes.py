"""Turns a row of any of the shapes that people have into one of the forms of `conversations.py`.

A row is told by its columns: token ids, a list of messages under one of several names, a list of turns, a pair of
question and answer, instructions, a lone prompt, or formatted text. Columns beyond those are left alone (data sets
carry ids, scores and sources) and named, because one of them may be what was meant.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
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
from draftline.data.messages import (
    REASON_KEYS,
    BadRow,
    MessageReader,
    finish_reason,
    parse_calls,
    parse_tools,
    present,
)
from draftline.options import TEMPLATE_ARGUMENTS

_CHAT_KEYS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "items")
_PAIRS = (
    (
        "prompt",
        (
            "completion",
            "response",
            "chosen",
            "output",
            "generation",
            "answer",
            "responses",
            "completions",
            "llm_response",
        ),
    ),
    ("question", ("response", "output", "completion", "chosen", "generated_solution", "solution", "generation")),
    ("query", ("response", "answer", "answers", "output", "chosen")),
    ("problem", ("generated_solution", "solution", "generation", "response", "output", "generations")),
    ("input", ("output", "response", "target", "chosen")),
    ("inputs", ("targets", "outputs", "output")),
    ("user", ("assistant", "bot", "model")),
    ("human", ("assistant", "gpt", "bot")),
    ("Question", ("Response", "Complex_CoT")),
    ("src", ("tgt",)),
    ("source", ("target",)),
    ("post", ("reply", "response")),
    ("message_1", ("message_2",)),
    ("context", ("response", "response1")),
)
"""Columns of a question, each with those of its answer, the first of which counts."""
_INSTRUCTION_ANSWERS = ("output", "response", "answer", "completion", "chosen", "demonstration", "accepted")
_BETTER = {"conversation_": ("winner", "model_b"), "response_": ("better_response_id", 1)}
"""How the columns of two answers begin, and the column that says which is better, with what it says of the second."""
_SPEAKERS = re.compile(r"(?:\A|\n\n)\s*(Human|Assistant):[ \t]*")
_LISTS_OF_TURNS = ("turns", "data", "dialogs", "utterances")
_TEXTS = ("text", "content")
_IMAGE_KEYS, _MEDIA_KEYS = ("image", "images"), ("video", "videos", "audio", "audios")
_PROMPT_KEYS = ("prompt", "question", "instruction", "query", "problem")
_SYSTEM_KEYS = ("system", "system_prompt", "system_message")
_TOOL_KEYS = ("tools", "functions", "available_tools", "function_description")
_REASONING_KEYS = (*get_args(ReasoningField), "Complex_CoT", "chain_of_thought", "cot")
_SWITCHES = frozenset({"on", "off", "true", "false", "yes", "no", "low", "medium", "high", "none", ""})
"""What a column named like reasoning says where it is a switch and no thought."""
_ROW_FLAGS = ("weight", "loss_weight", "train", "trainable")
_ALWAYS_READ = frozenset({*_SYSTEM_KEYS, *_TOOL_KEYS, *REASON_KEYS, *_IMAGE_KEYS, *_MEDIA_KEYS, "chat_template_kwargs"})
KNOWN_LAYOUTS = "messages (or conversations), prompt with completion, instruction with output, text, input_ids"
"""The layouts in a few words, for a message; docs/guide/data.md lists all."""


def parse_row(value: Any, *, strip_images: bool = False) -> ParsedRow:
    """Tell the shape of a row and convert it. Never raises: what cannot be used comes back as `Unusable`."""
    try:
        return _parse(value, strip_images)
    except BadRow as bad:
        return Unusable(str(bad))
    except RecursionError:
        return Unusable("nested_too_deep")


def _parse(value: Any, strip_images: bool) -> ParsedRow:
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise BadRow("not_an_object")
    row = present(value)
    if "input_ids" in row:
        return _token_row(row)
    for reason, keys in (("has_image", _IMAGE_KEYS), ("has_media", _MEDIA_KEYS)):
        if not strip_images and any(row.get(key) for key in keys):
            raise BadRow(reason)
    reader = _RowReader(MessageReader(strip_images))
    messages = reader.messages_of(row)
    if messages is None:
        text = next((row[key] for key in _TEXTS if isinstance(row.get(key), str)), None)
        if text is not None and isinstance(row.get("role"), str):
            raise BadRow("one_message_a_row")
        if text is not None:
            return FormattedText(text)
        raise BadRow("unknown_shape" + (f": {', '.join(map(str, row))}" if row else ""))
    messages = reader.flagged(row, _with_system(row, messages))
    if any("\0" in message.content or "\0" in (message.reasoning_content or "") for message in messages):
        raise BadRow("nul_character")
    tools = next((row[key] for key in _TOOL_KEYS if key in row), reader.reader.tools)
    conversation = Conversation(
        messages=tuple(messages), tools=parse_tools(tools), template_options=_template_options(row)
    )
    notes = dict.fromkeys([*reader.reader.notes, *_notes(messages)])
    unread = (row.keys() - reader.read - _ALWAYS_READ) | reader.reader.unread
    return Chat(conversation, tuple(notes), tuple(sorted(map(str, unread))))


@dataclass
class _RowReader:
    """Reads the messages of one row, and keeps which of its columns they came from."""

    reader: MessageReader
    read: set[str] = field(default_factory=set)

    def messages_of(self, row: dict[str, Any]) -> list[Message] | None:
        """The messages of a row; None if it holds none in any known shape."""
        row = self._with_the_better(row)
        chats = [key for key in _CHAT_KEYS if key in row]
        if chats:
            self.read |= set(chats)
            if len(chats) > 1:
                self.reader.notes.append("several_chat_keys")
            return self.reader.messages(_as_list(row[chats[0]]))
        for key in _LISTS_OF_TURNS:
            if key in row and (key == "turns" or isinstance(row[key], list)):
                return self._turn_list(key, _as_list(row[key]))
        if "instruction" in row:
            return self._instructed(row)
        for prompt_key, answer_keys in _PAIRS:
            answer_key = next((key for key in answer_keys if key in row), None)
            if prompt_key in row and answer_key is not None:
                return self._pair(row, prompt_key, answer_key)
        for key in ("chosen", "completion"):  # the whole conversation of a preference row
            if isinstance(row.get(key), list):
                self.read.add(key)
                return self.reader.messages(row[key])
        spoken = _SPEAKERS.split(row["chosen"]) if isinstance(row.get("chosen"), str) else []
        if len(spoken) > 2 and not spoken[0].strip():
            self.read.add("chosen")
            turns = zip(spoken[1::2], spoken[2::2], strict=True)
            return self.reader.messages([{"role": who, "content": text.strip()} for who, text in turns])
        asked = next((key for key in _PROMPT_KEYS if key in row), None)
        if asked is None:
            return None
        self.read.add(asked)
        return self._turns(row[asked], "user")

    def _with_the_better(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row; of two answers side by side, with the one that was found better under the name of an answer."""
        for name, (judge, second) in _BETTER.items():
            columns = [f"{name}{each}" for each in (("a", "b") if name == "conversation_" else (0, 1))]
            if judge in row and all(column in row for column in columns):
                self.read |= {judge, *columns}
                return {**row, name.removesuffix("_"): row[columns[row[judge] == second]]}
        return row

    def _turn_list(self, key: str, turns: list[Any]) -> list[Message]:
        """A list of messages, of texts that are all questions (`turns`), or of texts of two speakers in turn."""
        self.read.add(key)
        if not all(isinstance(turn, str) for turn in turns):
            return self.reader.messages(turns)
        roles = ("user", "user") if key == "turns" else ("user", "assistant")
        return [Message(role=roles[number % 2], content=turn) for number, turn in enumerate(turns)]

    def _pair(self, row: dict[str, Any], prompt_key: str, answer_key: str) -> list[Message]:
        self.reader.notes.append("template_applied_to_pair")
        self.read |= {prompt_key, answer_key}
        asked = self._turns(row[prompt_key], "user")
        answer = row[answer_key]
        if answer_key == "answers":
            return [*asked, Message(role="assistant", tool_calls=parse_calls(answer))]
        if isinstance(answer, list) and answer and all(isinstance(text, str) for text in answer):
            if len(answer) > 1:
                self.reader.notes.append("first_of_several_answers")
            answer = answer[0]
        answered = self._turns(answer, "assistant", beside=row)
        # A preference row may repeat the prompt at the head of its chosen answer.
        return answered if asked and answered[: len(asked)] == asked else asked + answered

    def _turns(self, value: Any, role: str, *, beside: dict[str, Any] | None = None) -> list[Message]:
        """A text as one turn, with reasoning that the row has `beside` it; or a list of messages as it is."""
        if isinstance(value, list):
            return self.reader.messages(value)
        if isinstance(value, dict) and "content" in value:
            return self.reader.messages([{"role": role, **value}])
        if not isinstance(value, str):
            raise BadRow("bad_content")
        thoughts = {key: text for key, text in (beside or {}).items() if key in _REASONING_KEYS}
        thoughts = {
            key: text for key, text in thoughts.items() if isinstance(text, str) and text.lower() not in _SWITCHES
        }
        self.read |= thoughts.keys()
        names = get_args(ReasoningField)
        thoughts = {key if key in names else "reasoning_content": text for key, text in thoughts.items()}
        return [self.reader.message(role, value, **thoughts)]

    def _instructed(self, row: dict[str, Any]) -> list[Message]:
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
        self.read |= {"instruction", "input", "context", "history"}
        messages.append(Message(role="user", content=f"{instruction}\n\n{given}" if given else instruction))
        key = next((key for key in _INSTRUCTION_ANSWERS if key in row), None)
        if key is None:
            return messages
        self.read.add(key)
        return messages + self._turns(row[key], "assistant", beside=row)

    def flagged(self, row: dict[str, Any], messages: list[Message]) -> list[Message]:
        """The messages with what the row itself says of them: not to be learned, cut at the end.

        Raises `BadRow` where nothing is left to learn.
        """
        flags = {key: row[key] for key in _ROW_FLAGS if isinstance(row.get(key), bool | int | float)}
        if "completion" in row and isinstance(row.get("label"), bool):  # a liked or disliked answer
            flags = {**flags, "train": row["label"]}
            self.read.add("label")
        self.read |= flags.keys()
        if not self.reader.train_flag(flags):
            raise BadRow("row_not_to_be_learned")
        answers = [number for number, message in enumerate(messages) if message.role == "assistant"]
        if answers and finish_reason(row) == "length":
            last = messages[answers[-1]].model_copy(update={"finish_reason": "length"})
            messages = [*messages[: answers[-1]], last, *messages[answers[-1] + 1 :]]
        return messages


def _as_list(value: Any) -> list[Any]:
    """A list, also when it is written as JSON text, or as one list for each field."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadRow("messages_not_json") from None
    columns = list(value.values()) if isinstance(value, dict) else []
    if columns and all(isinstance(column, list) for column in columns) and len(set(map(len, columns))) == 1:
        value = [dict(zip(value, fields, strict=True)) for fields in zip(*columns, strict=True)]
    if not isinstance(value, list):
        raise BadRow("messages_not_a_list")
    return [_loaded(item) for item in value]


def _loaded(value: Any) -> Any:
    """A message, also when it is written as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _with_system(row: dict[str, Any], messages: list[Message]) -> list[Message]:
    for key in _SYSTEM_KEYS:
        text = row.get(key)
        if isinstance(text, str) and text and not (messages and messages[0].role == "system"):
            return [Message(role="system", content=text), *messages]
    return messages


def _template_options(row: dict[str, Any]) -> dict[str, Any]:
    options = row.get("chat_template_kwargs", {})
    if not isinstance(options, dict) or TEMPLATE_ARGUMENTS & options.keys():
        raise BadRow("bad_chat_template_kwargs")
    return present(options)


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
