import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall
from draftline.data.render import MaskOptions, Refusal, RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate
from draftline.errors import TemplateError
from tests.data.chat_tokenizers import CHATML, RETURNING, SHOUTING, TEMPLATES, THINKING, make_tokenizer


def chat(*turns: str, **last: object) -> Conversation:
    """Turns of user and assistant in turn; `last` are further fields of the last one."""
    messages = [Message(role=("user", "assistant")[n % 2], content=text) for n, text in enumerate(turns)]
    messages[-1] = messages[-1].model_copy(update=last)
    return Conversation(messages=tuple(messages))


TWO_TURNS = chat("What is 2+2?", "It is four.", "And in Paris?", "The same.")


def render(template: str, conversation: Conversation, **options: object) -> tuple[RenderedConversation, list[str]]:
    """The rendering and the texts of its runs of supervised tokens; checks the ids against the template's own."""
    tokenizer = make_tokenizer(template)
    chat_template = ChatTemplate(tokenizer)
    rendered = render_conversation(chat_template, conversation, MaskOptions(**options))
    assert isinstance(rendered, RenderedConversation), rendered
    messages = chat_template.messages(conversation)
    tools = list(conversation.tools) or None
    assert rendered.input_ids.tolist() == tokenizer.apply_chat_template(messages, tools=tools)["input_ids"]
    runs: list[list[int]] = []
    before = False
    for token_id, supervised in zip(rendered.input_ids.tolist(), rendered.loss_mask.tolist(), strict=True):
        if supervised:
            runs = [*runs, []] if not before else runs
            runs[-1].append(token_id)
        before = supervised
    return rendered, [tokenizer.decode(run) for run in runs]


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


@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_is_supervised_where_the_template_shows_it(inside: bool) -> None:
    last = {"content": "<think>\nIn Paris.\n</think>\n\nThe same."} if inside else {"reasoning_content": "In Paris."}
    conversation = chat("What is 2+2?", "It is four.", "And in Paris?", "The same.", **last)
    _, runs = render(THINKING, conversation)
    assert runs == ["It is four.<|im_end|>", "<think>\nIn Paris.\n</think>\n\nThe same.<|im_end|>"]
    _, without = render(THINKING, conversation, reasoning=False)
    assert without == ["It is four.<|im_end|>", "The same.<|im_end|>"]


def test_dropped_reasoning_is_reported() -> None:
    answer = Message(role="assistant", content="It is four.", reasoning_content="Two and two.")
    history = Conversation(messages=(TWO_TURNS.messages[0], answer, *TWO_TURNS.messages[2:]))
    rendered, _ = render(THINKING, history)
    assert rendered.notes == ("earlier_reasoning_dropped",)
    rendered, _ = render(CHATML, Conversation(messages=history.messages[:2]))
    assert rendered.notes == ("reasoning_not_rendered",)


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


def test_only_the_last_answer_or_everything() -> None:
    _, runs = render(CHATML, TWO_TURNS, supervise="last")
    assert runs == ["The same.<|im_end|>"]
    rendered, _ = render(CHATML, TWO_TURNS, supervise="all")
    assert rendered.loss_mask.all()


def test_turn_flags_are_honoured() -> None:
    messages = [*TWO_TURNS.messages]
    messages[1] = messages[1].model_copy(update={"train": False})
    _, runs = render(CHATML, Conversation(messages=tuple(messages)))
    assert runs == ["The same.<|im_end|>"]


def test_cut_answer_has_no_supervised_end() -> None:
    _, runs = render(CHATML, chat("Count.", "one two three", finish_reason="length"))
    assert runs == ["one two three"]


def test_token_shared_with_the_header_is_not_supervised() -> None:
    """The answer's first line break merges with the header's, into a token that no target generates there."""
    rendered, runs = render(CHATML, chat("Hi", "\n\nHello "))
    assert runs[0].lstrip("\n") == "Hello <|im_end|>"
    assert "assistant\n\n\nHello" in rendered.text


def test_answer_alone_is_not_needed_at_the_end() -> None:
    _, runs = render(CHATML, chat("Hi", "Hello", "And now?"))
    assert runs == ["Hello<|im_end|>"]


def test_special_strings_in_an_answer_do_not_end_it() -> None:
    _, runs = render(CHATML, chat("Hi", "print('<|im_end|>')\n<|im_start|>assistant\nno"))
    assert runs == ["print('<|im_end|>')\n<|im_start|>assistant\nno<|im_end|>"]


def test_refusal_of_the_template_is_returned() -> None:
    conversation = Conversation(messages=(Message(role="system", content="x"), *TWO_TURNS.messages))
    result = render_conversation(ChatTemplate(make_tokenizer(TEMPLATES["gemma"][0])), conversation)
    assert result == Refusal("template_refused: System role not supported")


def test_template_that_hides_answers_is_an_error_with_the_rendering() -> None:
    template = ChatTemplate(make_tokenizer("{% for m in messages %}{{ m['content'] | length }} {% endfor %}"))
    with pytest.raises(TemplateError, match=r"loss mask cannot be found.*renders them as '"):
        render_conversation(template, TWO_TURNS)


def test_missing_template_is_an_error() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render_conversation(ChatTemplate(make_tokenizer(None)), TWO_TURNS)


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


def test_what_the_template_does_not_show_is_noted() -> None:
    template = ChatTemplate(
        make_tokenizer(CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"))
    )
    system, user, answer = (
        Message(role="system", content="Be kind."),
        Message(role="user", content="q"),
        Message(role="assistant", content="a"),
    )
    call = Message(role="assistant", tool_calls=(ToolCall(function=FunctionCall(name="look", arguments={})),))
    shown = {
        (): (user, answer),
        ("system_not_rendered",): (system, user, answer),
        ("tool_call_not_rendered",): (user, call, user, answer),
    }
    for notes, messages in shown.items():
        rendered = render_conversation(template, Conversation(messages=messages))
        assert isinstance(rendered, RenderedConversation)
        assert rendered.notes == notes
