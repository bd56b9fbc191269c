"""Prompts as the target's chat template writes them."""

from __future__ import annotations

import pytest

from draftline.data.answers import Answer, Dialogue
from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall
from draftline.data.template import ChatTemplate, render_prompt
from draftline.errors import TemplateError
from tests.data.chat_tokenizers import CHATML, GEMMA, TEMPLATES, THINKING, make_tokenizer

# Joins the arguments of a call as text, as templates do that come with an OpenAI-like server.
TEXT_ARGUMENTS = CHATML.replace(
    "m['content'] +", "(m['tool_calls'][0].function.arguments if m.tool_calls else m['content']) +"
)


def asked(*texts: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", content=text) for text in texts))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_what_the_tokenizer_makes_of_it(name: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[name][0])
    chat = asked("What is 2+2?")
    wanted = tokenizer.apply_chat_template(chat.for_template(), add_generation_prompt=True)["input_ids"]
    assert render_prompt(tokenizer, chat, {}) == wanted


def test_calls_in_a_prompt_have_the_arguments_that_the_template_reads() -> None:
    call = ToolCall(function=FunctionCall(name="f", arguments={"city": "Paris"}))
    messages = (*asked("And in Paris?").messages, Message(role="assistant", tool_calls=(call,)))
    chat = Conversation(messages=(*messages, Message(role="tool", content="fine")))
    tokenizer = make_tokenizer(TEXT_ARGUMENTS)
    assert ChatTemplate(tokenizer).dialect(chat).text_arguments
    assert '<|im_start|>assistant\n{"city": "Paris"}<|im_end|>' in tokenizer.decode(render_prompt(tokenizer, chat, {}))


def test_refusal_outside_of_preparation_is_one_line() -> None:
    chat = Conversation(messages=(Message(role="system", content="x"), Message(role="user", content="y")))
    with pytest.raises(TemplateError, match=r"refuses the roles system, user \(System role not supported\)") as caught:
        render_prompt(make_tokenizer(GEMMA), chat, {})
    assert "\n" not in str(caught.value)


def test_reasoning_survives_into_the_next_prompt() -> None:
    dialogue = Dialogue(asked("one", "two"))
    dialogue.add(Answer(key="1", content="so", reasoning_content="why", finish_reason="stop"))
    assert dialogue.prompt().messages[1].reasoning_content == "why"
    tokenizer = make_tokenizer(THINKING.replace("loop.index0 > ns.last", "true"))
    assert "<think>\nwhy\n</think>\n\nso" in tokenizer.decode(render_prompt(tokenizer, dialogue.prompt(), {}))


def test_options_that_a_template_does_not_read_are_named_with_those_it_does() -> None:
    reads = """{%- set quick = enable_thinking is defined and not enable_thinking -%}
    {%- if builtin_tools %}x{% endif -%}
    {%- macro said(m) -%}{{ m.content ~ effort | default('low') }}{%- endmacro -%}
    {%- for m in messages %}{% generation %}{{ bos_token ~ said(m) }}{% endgeneration %}{% break %}{% endfor -%}
    {%- if add_generation_prompt %}{{ strftime_now('%Y') }}{{ raise_exception(quick ~ tools) }}{% endif -%}"""
    template = ChatTemplate(make_tokenizer(reads), {"enable_thinking": False, "thinking": True})
    assert template.reads == {"enable_thinking", "builtin_tools", "effort"}
    assert template.unread_options() == (
        "the chat template does not read thinking, which changes nothing: it reads builtin_tools, effort, "
        "enable_thinking"
    )
    assert ChatTemplate(make_tokenizer(reads), {"effort": "high"}).unread_options() is None
    assert ChatTemplate(make_tokenizer(CHATML), {"thinking": True}).unread_options() == (
        "the chat template does not read thinking, which changes nothing: it reads none"
    )
    with pytest.raises(TemplateError, match="line 2"):
        _ = ChatTemplate(make_tokenizer("{% for m in messages %}\n{{ m. }}{% endfor %}")).reads
