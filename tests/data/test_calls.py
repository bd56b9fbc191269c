"""Answers read back in the form in which templates of many families write them."""

from __future__ import annotations

import pytest

from draftline.data.answers import parse_answer
from draftline.data.calls import AnswerFormat, answer_format
from draftline.data.conversations import Conversation
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate
from tests.data.foreign_templates import FAMILIES, Family
from tests.data.test_foreign_templates import DIE, HEAT, TOOLS, says, tokenizer_of, user

READ = {
    "a prompt that the history lacks", "no chat without tools", "call before text", "channels, ends of three kinds",
    "no end at the end, results in the turn", "reasoning dropped in history, prompt '', calls in XML",
    "opens the next answer always", "closes every conversation", "results and text behind the call",
    "no generation prompt", "the next header ends a turn", "python tag, text beside a call dropped",
    "ids on both sides of a call, no prompt",
}  # fmt: skip


def written(family: Family, *calls: object) -> tuple[str, AnswerFormat]:
    """What the model of the family writes for calls, without the stop token, and how the answer is read."""
    template = ChatTemplate(tokenizer_of(family))
    chat = Conversation(messages=(user("q"), says("", *calls)), tools=TOOLS)  # type: ignore[arg-type]
    rendered = render_conversation(template, chat)
    assert isinstance(rendered, RenderedConversation)
    ids = rendered.input_ids[rendered.loss_mask].tolist()
    if ids[-1] in template.tokenizer.all_special_ids:
        ids.pop()
    return template.tokenizer.decode(ids), answer_format(template, chat)


@pytest.mark.parametrize("name", sorted(READ))
def test_a_call_is_read_as_the_template_writes_it(name: str) -> None:
    (family,) = [family for family in FAMILIES if family.name == name]
    text, form = written(family, HEAT)
    content, _, calls = parse_answer(text, with_tools=True, form=form)
    assert content == ""
    assert [call.function for call in calls] == [HEAT.function]


def test_two_calls_with_other_spaces_and_what_does_not_fit() -> None:
    (family,) = [family for family in FAMILIES if family.name == "a prompt that the history lacks"]
    text, form = written(family, HEAT, DIE)
    for shown in (text, text.replace(": ", ":").replace(", ", ",")):
        content, _, calls = parse_answer(shown, with_tools=True, form=form)
        assert (content, [call.function.name for call in calls]) == ("", ["fetch_heat", "roll_die"])
        assert calls[1].function.arguments == DIE.function.arguments
    for wrong in (text[:-3], text.replace("roll_die", "unknown"), text + "more"):
        assert parse_answer(wrong, with_tools=True, form=form) == (wrong, None, ())


def test_channels_are_taken_apart() -> None:
    (family,) = [family for family in FAMILIES if family.name.startswith("channels")]
    form = answer_format(ChatTemplate(tokenizer_of(family)), Conversation(messages=(), tools=TOOLS))
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four."
    assert parse_answer(thought, with_tools=True, form=form) == ("Four.", "Hm.", ())
    assert parse_answer("<|channel|>final<|message|>Four.", with_tools=True, form=form) == ("Four.", None, ())
