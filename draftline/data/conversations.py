"""The one form that every conversation takes before it is rendered.

Whatever a file calls its roles and fields, the readers (`shapes.py`) turn each row into a `Conversation`. Everything
after them (rendering, regeneration, reports) knows only this form. Keys that a row carries beyond it have been left
out or refused by then, so an unknown key here is a fault of Draftline and is refused.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]
ReasoningField = Literal["reasoning_content", "reasoning", "thinking"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionCall(_Strict):
    """The call of one function; `arguments` is an object, or a text that is not a JSON object."""

    name: str
    arguments: dict[str, Any] | str


class ToolCall(_Strict):
    """One entry of `tool_calls`, as the OpenAI interface names it."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class Message(_Strict):
    """One turn.

    Attributes:
        role: as the template is to see it: `system`, `user`, `assistant`, `tool`, or what the row said.
        content: the text; never None.
        reasoning_content: what a reasoning model thought before its answer.
        reasoning_field: the name under which the row had it; the template is given it under the same name.
        train: whether an assistant turn is supervised (a row's own `weight` or `train` flag).
        finish_reason: why a regenerated answer ended; `length` means that it was cut and has no end token.
    """

    role: str
    content: str = ""
    reasoning_content: str | None = None
    reasoning_field: ReasoningField = "reasoning_content"
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    train: bool = True
    finish_reason: FinishReason | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as a chat template wants it: absent fields absent, because templates test `is defined`."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message[self.reasoning_field] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.model_dump(exclude_none=True) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        return message


class Conversation(_Strict):
    """A chat, or only its prompts.

    Attributes:
        messages: the turns in order.
        tools: JSON schemas of the functions that the assistant may call; empty means none.
        template_options: this row's own keyword arguments of the chat template (`enable_thinking`, for instance).
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = {}

    def for_template(self) -> list[dict[str, Any]]:
        """All messages as the chat template wants them."""
        return [message.for_template() for message in self.messages]

    def prompt_hash(self) -> str:
        """Identity of what was asked, for deduplication and for the split: all turns that no assistant wrote.

        Two rows with the same questions fall on the same side of the split, whatever was answered. Case and runs of
        white space do not count, so that a re-wrapped copy of a held-out prompt does not slip into training.
        """
        asked = [
            [message.role, " ".join(message.content.lower().split())]
            for message in self.messages
            if message.role not in ("assistant", "system")
        ]
        return hash_json(asked)

    def content_hash(self) -> str:
        """Identity of the whole row, to find exact duplicates."""
        return hash_json(self.model_dump(mode="json"))


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, in hex; independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def dump_arguments(arguments: dict[str, Any]) -> str:
    """Arguments of a call as the JSON text that the OpenAI interface carries."""
    return json.dumps(arguments, ensure_ascii=False)
