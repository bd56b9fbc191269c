import pytest

from draftline.data.conversations import Chat, Conversation, FunctionCall, Message, TokenRow, ToolCall, Unusable
from draftline.data.render import RenderedConversation, check_tokens, render_conversation, text_pieces
from draftline.data.shapes import parse_row
from draftline.data.template import ChatTemplate
from draftline.errors import TemplateError
from draftline.options import MaskOptions
from tests.data.chat_tokenizers import (
    CHATML,
    TEMPLATES,
    THINKING,
    byte_tokenizer,
    make_tokenizer,
    sentencepiece_tokenizer,
)


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


@pytest.mark.parametrize("inside", [True, False])
def test_reasoning_is_supervised_where_the_template_shows_it(inside: bool) -> None:
    last = {"content": "<think>\nIn Paris.\n</think>\n\nThe same."} if inside else {"reasoning_content": "In Paris."}
    conversation = chat("What is 2+2?", "It is four.", "And in Paris?", "The same.", **last)
    _, runs = render(THINKING, conversation)
    assert runs == ["It is four.<|im_end|>", "<think>\nIn Paris.\n</think>\n\nThe same.<|im_end|>"]
    _, without = render(THINKING, conversation, reasoning=False)
    assert without == ["It is four.<|im_end|>", "The same.<|im_end|>"]


# Has a field for reasoning, and takes a block inside the content for a part of the answer.
FIELD_ONLY = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}{{ m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    "content", ["<think>2+2 is 4</think>4", "<think>\n2+2 is 4\n</think>\n\n4", "2+2 is 4</think>4"]
)
def test_one_block_of_reasoning_wherever_the_row_keeps_it(content: str) -> None:
    rendered, runs = render(FIELD_ONLY, chat("2+2?", content))
    assert rendered.text.count("<think>") == 1
    assert runs == ["<think>\n2+2 is 4\n</think>\n\n4<|im_end|>"]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_shown_under_the_name_that_the_template_reads(field: str, name: str) -> None:
    answer = Message(role="assistant", content="4", reasoning_content="two", reasoning_field=field)  # type: ignore[arg-type]
    template = FIELD_ONLY.replace("reasoning_content", name)
    _, runs = render(template, Conversation(messages=(TWO_TURNS.messages[0], answer)))
    assert runs == ["<think>\ntwo\n</think>\n\n4<|im_end|>"]


@pytest.mark.parametrize(("template", "run"), [(FIELD_ONLY, "<think>\n2+3 is"), (CHATML, "<think>2+3 is")])
def test_reasoning_that_was_cut_has_no_end(template: str, run: str) -> None:
    parsed = parse_row(
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<think>2+3 is"}]}
    )
    assert isinstance(parsed, Chat)
    assert parsed.notes == ("unclosed_reasoning",)
    _, runs = render(template, parsed.conversation)
    assert runs == [run]


def test_an_opening_tag_alone_is_an_answer_like_any_other() -> None:
    _, runs = render(FIELD_ONLY, chat("?", "<think>", "!", "So.", finish_reason="stop"))
    assert runs == ["<think><|im_end|>", "So.<|im_end|>"]


def test_dropped_reasoning_is_reported() -> None:
    answer = Message(role="assistant", content="It is four.", reasoning_content="Two and two.")
    history = Conversation(messages=(TWO_TURNS.messages[0], answer, *TWO_TURNS.messages[2:]))
    rendered, _ = render(THINKING, history)
    assert rendered.notes == ("earlier_reasoning_dropped",)
    rendered, _ = render(CHATML, Conversation(messages=history.messages[:2]))
    assert rendered.notes == ("reasoning_not_rendered",)


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


def test_generated_ids_are_what_is_trained() -> None:
    """The ids of another tokenisation of the same answer, and of a call that was written without spaces."""
    tokenizer = make_tokenizer(THINKING)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    letters = [token for letter in "It is four." for token in tokenizer(letter)["input_ids"]]
    assert letters != tokenizer("It is four.")["input_ids"]
    template = ChatTemplate(tokenizer)
    for ids, finish in (([*letters, end], "stop"), (letters, "length")):
        rendered = render_conversation(template, chat("?", "It is four.", output_ids=ids, finish_reason=finish))
        assert isinstance(rendered, RenderedConversation)
        assert rendered.input_ids[rendered.loss_mask].tolist() == ids
        assert rendered.notes == ("generated_ids_kept",)
        assert tokenizer.decode(rendered.input_ids) == rendered.text
    compact = '<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>'
    written = [*tokenizer(compact)["input_ids"], end]
    call = ToolCall(function=FunctionCall(name="f", arguments={"a": 1}))
    answer = {"tool_calls": (call,), "output_ids": written, "finish_reason": "tool_calls"}
    asked = chat("?", "", "!", "So.").messages
    rendered = render_conversation(
        template, Conversation(messages=(asked[0], asked[1].model_copy(update=answer), *asked[2:]))
    )
    assert isinstance(rendered, RenderedConversation)
    assert tokenizer.decode(rendered.input_ids[rendered.loss_mask]) == compact + "<|im_end|>So.<|im_end|>"
    assert rendered.text.count("\n") > tokenizer.decode(rendered.input_ids).count("\n")


def test_generated_ids_of_another_text_stay_out_and_are_named() -> None:
    tokenizer = make_tokenizer(CHATML)
    ids = tokenizer("It is five.")["input_ids"]
    rendered = render_conversation(
        ChatTemplate(tokenizer), chat("?", "It is four.", output_ids=ids, finish_reason="length")
    )
    assert isinstance(rendered, RenderedConversation)
    assert tokenizer.decode(rendered.input_ids[rendered.loss_mask]) == "It is four."
    assert rendered.notes == ("generated_ids_do_not_fit",)


def test_token_shared_with_the_header_is_not_supervised() -> None:
    """The answer's first line break merges with the header's, into a token that no target generates there."""
    rendered, runs = render(CHATML, chat("Hi", "\n\nHello "))
    assert runs[0].lstrip("\n") == "Hello <|im_end|>"
    assert "assistant\n\n\nHello" in rendered.text


def test_refusal_of_the_template_is_returned() -> None:
    conversation = Conversation(messages=(Message(role="system", content="x"), *TWO_TURNS.messages))
    result = render_conversation(ChatTemplate(make_tokenizer(TEMPLATES["gemma"][0])), conversation)
    assert result == Unusable("template_refused: System role not supported")


def test_missing_template_is_an_error() -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        render_conversation(ChatTemplate(make_tokenizer(None)), TWO_TURNS)


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


@pytest.mark.parametrize(
    ("supervise", "given", "mask"),
    [
        ("answers", [0, 1, 0, 1, 1], [0, 1, 0, 1, 1]),
        ("last", [0, 1, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("last", [1, 1, 1, 0, 0], [1, 1, 1, 0, 0]),
        ("all", [0, 1, 0, 1, 1], [1, 1, 1, 1, 1]),
        ("all", None, [1, 1, 1, 1, 1]),
    ],
)
def test_what_is_supervised_of_token_rows(supervise: str, given: list[int] | None, mask: list[int]) -> None:
    options = MaskOptions(supervise=supervise)  # type: ignore[arg-type]
    result = check_tokens(TokenRow([5, 6, 7, 8, 9], given), 10, options)
    assert isinstance(result, RenderedConversation)
    assert result.loss_mask.tolist() == [bool(value) for value in mask]


def test_token_rows_without_a_mask() -> None:
    assert check_tokens(TokenRow([5, 6], None), 10, MaskOptions()) == Unusable("no_loss_mask")


TOKENIZERS = {"bytes": byte_tokenizer(), "sentencepiece": sentencepiece_tokenizer()}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["plain words", "naïve 数学 🙂🙂 end", "🙂", "", " two  spaces ", "\ufffd kept"])
def test_pieces_join_to_the_text_and_none_is_half_a_character(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer(text)["input_ids"]
    pieces = text_pieces(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == tokenizer.decode(ids) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_every_token_has_the_text_that_it_adds() -> None:
    ids = TOKENIZERS["bytes"]("aé🙂")["input_ids"]
    assert text_pieces(TOKENIZERS["bytes"], ids) == ["a", "", "é", "", "", "", "🙂"]
    ids = TOKENIZERS["sentencepiece"]("It four four")["input_ids"]
    assert text_pieces(TOKENIZERS["sentencepiece"], ids) == ["", "It", " four", " four"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_output_that_ends_inside_a_character_loses_nothing(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer("ab🙂")["input_ids"][:-1]
    assert "".join(text_pieces(tokenizer, ids)) == tokenizer.decode(ids)
    assert "".join(text_pieces(tokenizer, ids)).startswith("ab")
