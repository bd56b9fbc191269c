"""What every row becomes before it is rendered, and the one form that every conversation takes.

Whatever a file calls its roles and fields, `shapes.py` turns each row into one of the forms at the end of this file.
Everything after it (rendering, regeneration, reports) knows only these. Keys that a row carries beyond them have been
left out or refused by then, so an unknown key here is a fault of Draftline and is refused.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length", "tool_calls"]
ReasoningField = Literal["reasoning_content", "reasoning", "thinking"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunctionCall(_Strict):
    """The call of one function."""

    name: str
    arguments: dict[str, Any]


class ToolCall(_Strict):
    """One entry of `tool_calls`, as the OpenAI interface names it."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall

    def for_template(self, *, text_arguments: bool) -> dict[str, Any]:
        """The call as a chat template wants it, with its arguments as JSON text on request."""
        arguments = self.function.arguments
        function = {
            "name": self.function.name,
            "arguments": json.dumps(arguments, ensure_ascii=False) if text_arguments else arguments,
        }
        call = {} if self.id is None else {"id": self.id}
        return {**call, "type": self.type, "function": function}


class Message(_Strict):
    """One turn.

    Attributes:
        role: as the template is to see it: `system`, `user`, `assistant`, `tool`, or what the row said.
        content: the text; never None.
        reasoning_content: what a reasoning model thought before its answer.
        reasoning_field: the name under which the row had it; the template is given it under the same name if that is
            one under which it shows reasoning.
        train: whether an assistant turn is supervised (a row's own `weight` or `train` flag).
        finish_reason: why an answer ended; `length` means that it was cut and has no end token.
        output_ids: the generated tokens of a regenerated answer, with the stop token, if they are known.
        note: what is worth a look about an answer, as a reason of the report.
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
    output_ids: tuple[int, ...] = ()
    note: str | None = None

    def for_template(self, *, text_arguments: bool = False) -> dict[str, Any]:
        """The message as a chat template wants it: absent fields absent, because templates test `is defined`.

        Reasoning is named `reasoning_content` here; `ChatTemplate` gives it the name that the template reads.

        Args:
            text_arguments: write the arguments of calls as JSON text, as the OpenAI interface carries them.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning_content is not None:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [call.for_template(text_arguments=text_arguments) for call in self.tool_calls]
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
        sample: which of several sampled answers it is to get.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = {}
    sample: int = 0

    def for_template(self, *, text_arguments: bool = False) -> list[dict[str, Any]]:
        """All messages, see `Message.for_template`."""
        return [message.for_template(text_arguments=text_arguments) for message in self.messages]

    def without_answers(self) -> Conversation:
        """What is asked when the target answers: two rows in which this is equal are one prompt, asked once."""
        messages = [Message(role="assistant") if m.role == "assistant" else m for m in self.messages]
        while messages and messages[-1].role == "assistant":
            messages.pop()
        return self.model_copy(update={"messages": tuple(messages)})

    def with_system_prompt(self, text: str | None) -> Conversation:
        """The conversation with a system prompt in front, unless it has one or none is given."""
        if text is None or any(message.role in ("system", "developer") for message in self.messages):
            return self
        return self.model_copy(update={"messages": (Message(role="system", content=text), *self.messages)})

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


@dataclass(frozen=True)
class Chat:
    """A conversation, or prompts without answers.

    Attributes:
        notes: reasons of the `flagged` table.
        unread: columns of the row, and fields of its messages, that were not read.
    """

    conversation: Conversation
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class FormattedText:
    """Text to which somebody already applied a template."""

    text: str


@dataclass(frozen=True)
class TokenRow:
    """Token ids and their mask, as the row has them; not checked yet. The mask is None where the row has none."""

    input_ids: list[Any]
    loss_mask: list[Any] | None


@dataclass(frozen=True)
class Unusable:
    """A row that is dropped: the reason's name in the report, and more for whoever wants to fix it."""

    reason: str
    detail: str = ""


ParsedRow = Chat | FormattedText | TokenRow | Unusable


def hash_json(value: Any) -> str:
    """SHA-256 of a JSON value, in hex; independent of the order of keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
