"""The one form of a conversation: what a template is given of it, and which two count as the same."""

from __future__ import annotations

import json

import pytest

from draftline.data.conversations import Chat, Conversation, FunctionCall, Message, ToolCall, hash_json
from draftline.data.shapes import parse_row

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_with_its_own_name(field: str) -> None:
    parsed = parse_row({"messages": [USER, {**ANSWER, field: "2+2"}]})
    assert isinstance(parsed, Chat)
    message = parsed.conversation.messages[1]
    assert (message.reasoning_content, message.reasoning_field) == ("2+2", field)
    assert message.for_template() == {"role": "assistant", "content": "yo", "reasoning_content": "2+2"}


def test_arguments_are_given_as_they_are_or_as_text() -> None:
    arguments = {"a": "é", "b": None}
    call = ToolCall(function=FunctionCall(name="f", arguments=arguments))
    chat = Conversation(messages=(Message(role="assistant", tool_calls=(call,)),))
    for as_text, wanted in ((False, arguments), (True, '{"a": "é", "b": null}')):
        (message,) = chat.for_template(text_arguments=as_text)
        assert message["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": wanted}}]


def test_prompts_are_the_same_whatever_was_answered_and_however_it_is_wrapped() -> None:
    def asked(question: str, *others: tuple[str, str]) -> str:
        turns = (("user", question), *others)
        return Conversation(messages=tuple(Message(role=role, content=text) for role, text in turns)).prompt_hash()

    assert asked("What  is\n2+2?", ("assistant", "4")) == asked("what is 2+2?", ("system", "Be kind."))
    assert asked("What is 2+2?") != asked("What is 2+2?", ("user", "And 3+3?"))


def test_a_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert hash_json({"a": 1, "b": "\ud800"}) == hash_json(json.loads('{"b": "\\ud800", "a": 1}'))
    assert hash_json(["a", "b"]) != hash_json(["b", "a"])
