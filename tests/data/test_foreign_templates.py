"""Spans in templates of many families, against text that was put together by hand."""

from __future__ import annotations

import functools

import pytest
from transformers import PreTrainedTokenizerFast

from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall, Unusable
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate
from scripts.template_table import supervised_runs
from tests.data.chat_tokenizers import byte_tokenizer
from tests.data.foreign_templates import FAMILIES, Answer, Family

MARKS = [
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<|head|>", "<|/head|>", "<|eot|>", "[INST]",
    "[/INST]", "<start_of_turn>", "<end_of_turn>", "<tool>", "</tool>",
]  # fmt: skip
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("fetch_heat", "roll_die")
)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def says(text: str = "", *calls: ToolCall, thought: str | None = None) -> Message:
    return Message(role="assistant", content=text, tool_calls=calls, reasoning_content=thought)


def result(text: str, call: ToolCall) -> Message:
    return Message(role="tool", content=text, tool_call_id=call.id, name=call.function.name)


HEAT = ToolCall(id="call00001", function=FunctionCall(name="fetch_heat", arguments={"town": 'Le "Bé"', "deep": 7431}))
DIE = ToolCall(id="xy", function=FunctionCall(name="roll_die", arguments={"sides": [2, {"more": "six"}], "fair": True}))
NOW = ToolCall(id="c3", function=FunctionCall(name="fetch_heat", arguments={}))
START = Message(role="system", content="Be kind.")
PLAIN = (user("How are you?"), says("Very well."), user("And now?"), says("Still well."))
CHATS = {
    "plain": PLAIN,
    "plain with system": (START, *PLAIN),
    "one turn": PLAIN[:2],
    "ends with a question": PLAIN[:3],
    "long dialogue": PLAIN * 4,
    "the same text twice": (user("ok"), says("ok"), user("ok"), says("ok")),
    "spaces": (user("a"), says("two\n\nlines"), user("b"), says("x  y")),
    "call alone": (user("How hot?"), says("", HEAT)),
    "text and call": (user("How hot?"), says("Let me see.", HEAT)),
    "parallel calls": (user("How hot?"), says("", HEAT, DIE)),
    "result and answer": (user("How hot?"), says("", HEAT), result('{"heat": 21}', HEAT), says("It is warm.")),
    "text, call and result": (user("q"), says("Let me see.", HEAT), result("21", HEAT), says("Warm.")),
    "parallel calls and results": (
        user("q"), says("", HEAT, DIE), result("21", HEAT), result("5", DIE), says("Done."), user("r"), says("Bye."),
    ),
    "two calls in a row": (
        START, user("q"), says("", DIE), result("5", DIE), says("", HEAT), result("21", HEAT), says("Done."),
    ),
    "call without arguments": (user("q"), says("", NOW), result("noon", NOW), says("Noon.")),
    "dialogue around a call": (*PLAIN, user("q"), says("", HEAT), result("21", HEAT), says("Warm."), *PLAIN),
    "reasoning": (user("a"), says("b", thought="Hm one."), user("c"), says("d", thought="Hm two.")),
    "reasoning and call": (user("q"), says("", HEAT, thought="Need it."), result("21", HEAT), says("W", thought="So")),
    "reasoning, text and call": (user("q"), says("Let me.", DIE, thought="Need it."), result("5", DIE), says("Five.")),
}  # fmt: skip


@functools.cache
def tokenizer_of(family: Family) -> PreTrainedTokenizerFast:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": sorted({*MARKS, *family.tokens})}
    )
    # Line breaks behind a block are taken away where templates are compiled.
    tokenizer.chat_template = family.template.replace("\n", "{{ '\\n' }}")
    return tokenizer


def expected(family: Family, messages: tuple[Message, ...]) -> list[str]:
    """The supervised runs by hand, one after another: runs that touch are one."""
    answers = [Answer.of(messages, n) for n, message in enumerate(messages) if message.role == "assistant"]
    return [run for answer in answers for run in family.writes(answer) or []]


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_the_model_writes_is_supervised(family: Family, chat: str) -> None:
    messages = CHATS[chat]
    calls = any(message.tool_calls for message in messages)
    tokenizer = tokenizer_of(family)
    template = ChatTemplate(tokenizer)
    conversation = Conversation(messages=messages, tools=TOOLS if calls else ())
    rendered = render_conversation(template, conversation)
    wanted = expected(family, messages)
    if isinstance(rendered, Unusable):
        refused = rendered.reason.startswith("template_refused")
        assert refused or rendered.reason == "tool_call_not_rendered", rendered
        assert not (refused and family.tools and not calls and "without tools" not in rendered.reason), rendered
        return
    assert isinstance(rendered, RenderedConversation)
    given = tokenizer.apply_chat_template(template.messages(conversation), tools=list(conversation.tools) or None)
    assert rendered.input_ids.tolist() == given["input_ids"]
    assert "".join(supervised_runs(tokenizer, rendered)) == "".join(wanted)
    dropped = sum(
        family.writes(Answer.of(messages, n)) is None for n, m in enumerate(messages) if m.role == "assistant"
    )
    unproven = {"turn_end_not_proven", "tool_call_not_rendered", "turn_rendered_in_two", "call_after_result"}
    assert sum(note in unproven for note in rendered.notes) == dropped
