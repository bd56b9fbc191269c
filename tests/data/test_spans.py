"""Where answers begin and end in what templates of many styles render, seen as the text of supervised tokens."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall, Unusable
from draftline.data.render import render_conversation
from draftline.data.template import ChatTemplate
from tests.data.chat_tokenizers import CHATML, RETURNING, SHOUTING, TEMPLATES, THINKING, make_tokenizer
from tests.data.test_render import TWO_TURNS, chat, render


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_and_their_ends_are_supervised(name: str) -> None:
    template, end = TEMPLATES[name]
    _, runs = render(template, TWO_TURNS)
    assert [run.lstrip(" ") for run in runs] == [f"It is four.{end}", f"The same.{end}"]


def test_space_before_an_answer_belongs_to_its_first_token() -> None:
    _, runs = render(TEMPLATES["inst"][0], TWO_TURNS)
    assert runs == [" It is four.</s>", " The same.</s>"]


def test_altered_texts_are_found_by_wrapping() -> None:
    _, runs = render(SHOUTING, TWO_TURNS)
    assert runs == ["IT IS FOUR.<|im_end|>", "THE SAME.<|im_end|>"]


def test_last_turn_may_end_otherwise() -> None:
    _, runs = render(RETURNING, TWO_TURNS)
    assert runs == ["It is four.<|end|>", "The same.</s>"]


def test_empty_reasoning_block_is_not_supervised() -> None:
    rendered, runs = render(THINKING, TWO_TURNS)
    assert "<think>\n\n</think>" in rendered.text
    assert runs == ["It is four.<|im_end|>", "The same.<|im_end|>"]


def test_tool_calls_are_supervised_and_results_are_not() -> None:
    call = ToolCall(function=FunctionCall(name="weather", arguments={"city": "Paris <|im_end|>"}))
    conversation = Conversation(
        messages=(
            Message(role="user", content="And in Paris?"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="fine"),
            Message(role="assistant", content="It is fine."),
        ),
        tools=({"type": "function", "function": {"name": "weather", "parameters": {}}},),
    )
    _, runs = render(THINKING, conversation)
    assert len(runs) == 2
    assert runs[0].startswith("<tool_call>\n{")
    assert "Paris" in runs[0]
    assert runs[0].endswith("</tool_call><|im_end|>")
    assert runs[1] == "It is fine.<|im_end|>"


def test_answer_alone_is_not_needed_at_the_end() -> None:
    _, runs = render(CHATML, chat("Hi", "Hello", "And now?"))
    assert runs == ["Hello<|im_end|>"]


def test_special_strings_in_an_answer_do_not_end_it() -> None:
    _, runs = render(CHATML, chat("Hi", "print('<|im_end|>')\n<|im_start|>assistant\nno"))
    assert runs == ["print('<|im_end|>')\n<|im_start|>assistant\nno<|im_end|>"]


def test_template_that_hides_answers_is_an_error_with_the_rendering() -> None:
    template = ChatTemplate(make_tokenizer("{% for m in messages %}{{ m['content'] | length }} {% endfor %}"))
    hidden = render_conversation(template, TWO_TURNS)
    assert isinstance(hidden, Unusable)
    assert hidden.reason == "mask_not_found"
    assert re.search(r"loss mask cannot be found.*renders them as '12 11 ", hidden.detail)


_texts = st.text(
    st.sampled_from(list("aZ .\n\té字😀'\"{}<>|#")) | st.characters(codec="utf-8", exclude_characters="\0"), max_size=24
) | st.sampled_from(["<|im_end|>", "</think>", "<think>x</think>y", "assistant\n", " \n", "<s>", "[/INST]", "q", "Zq"])


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=st.lists(st.tuples(_texts, _texts), min_size=1, max_size=3))
def test_round_trip(name: str, turns: list[tuple[str, str]]) -> None:
    """Whatever is said, ids are the template's and the supervised text is the answers with their ends."""
    template, end = TEMPLATES[name]
    conversation = chat(*(text for turn in turns for text in turn))
    _, runs = render(template, conversation)
    answers = [answer for _, answer in turns if answer.strip()]
    supervised = "".join(runs)
    for wanted in answers if name != "thinking" else []:
        assert _squeezed(wanted) in _squeezed(supervised)
    allowed = _squeezed("".join(answer + end for _, answer in turns))
    assert len(_squeezed(supervised)) <= len(allowed) + (0 if name != "thinking" else 17 * len(turns))


def _squeezed(text: str) -> str:
    """Without white space: templates trim, and a token of mixed white space at the border is left out."""
    return "".join(text.split())
