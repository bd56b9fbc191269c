"""Answers read back in the form in which templates of many families write them."""

from __future__ import annotations

import pytest

from draftline.data.answers import parse_answer
from draftline.data.calls import AnswerFormat, answer_format
from draftline.data.conversations import Conversation, FunctionCall, ToolCall
from draftline.data.render import RenderedConversation, render_conversation
from draftline.data.template import ChatTemplate
from tests.data.chat_tokenizers import make_tokenizer
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


def _in_marks(call: str, value: str, opening: str = "", closing: str = "") -> str:
    """A template that writes calls argument by argument."""
    arguments = f"{{% for k, v in f.arguments.items() %}}{value}{{% endfor %}}"
    calls = (
        f"{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call.replace('ARGUMENTS', arguments)}{{% endfor %}}"
    )
    said = f"{{{{ m.content }}}}{{% if m.tool_calls %}}{opening}{calls}{closing}{{% endif %}}"
    turns = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{said}<|end|>{{% endfor %}}"
    return turns + "{% if add_generation_prompt %}<|assistant|>{% endif %}"


_TYPED = "{{ v if v is string else v|tojson }}"
_FLAG = "{{ 'true' if v is string else 'false' }}"
_QUOTED = """{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v|tojson }}{% endif %}"""
_KIND = "{{ 'string' if v is string else 'boolean' if v is boolean else 'number' }}"
NESTED = {
    "attributes": _in_marks(
        '<invoke name="{{ f.name }}">\nARGUMENTS</invoke>\n',
        f'<parameter name="{{{{ k }}}}">{_TYPED}</parameter>\n',
        "<calls>\n",
        "</calls>",
    ),
    "a flag for text": _in_marks(
        '<|x|invoke name="{{ f.name }}">ARGUMENTS</|x|invoke>\n',
        f'<p name="{{{{ k }}}}" string="{_FLAG}">{_TYPED}</p>\n',
        "\n\n<|x|calls>\n",
    ),
    "names as tags": _in_marks(
        '<call><invoke name="{{ f.name }}">ARGUMENTS</invoke></call>', f"<{{{{ k }}}}>{_TYPED}</{{{{ k }}}}>"
    ),
    "quotes of its own": _in_marks(
        "<|call>call:{{ f.name ~ '{' }}ARGUMENTS{{ '}' }}<call|>",
        f"{{{{ k }}}}:{_QUOTED}{{% if not loop.last %}},{{% endif %}}",
    ),
    "kinds and numbers": _in_marks(
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        f'<|open|>argument key="{{{{ k }}}}" type="{_KIND}"<|sep|>{_TYPED}<|close|>argument<|sep|>',
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "the name twice": _in_marks(
        ' to={{ f.name }}<|m|><invoke name="{{ f.name }}">ARGUMENTS</invoke>', f'<p name="{{{{ k }}}}">{_TYPED}</p>'
    ),
    "the name first": _in_marks("{{ f.name }}\n{{ f.arguments|tojson }}", ""),
}
SCHEMA = {"town": "string", "deep": "integer", "sure": "boolean", "note": "string", "days": "array", "where": "object"}
MANY = {"town": "Saint Malo, 7", "deep": -3, "sure": True, "note": "12", "days": ["a", 2], "where": {"x": 1.5}}
_PROPERTIES = {"properties": {key: {"type": kind} for key, kind in SCHEMA.items()}}
LISTED = tuple(
    {"type": "function", "function": {"name": name, "parameters": _PROPERTIES}}
    for name in ("look_up", "look_up_all", "stop")
)


@pytest.mark.parametrize("name", NESTED)
def test_arguments_that_are_written_one_by_one_are_read_with_their_kinds(name: str) -> None:
    """Every kind of value, two calls, none without arguments, a text before them; and nothing that does not fit."""
    template = ChatTemplate(make_tokenizer(NESTED[name]))
    asked = Conversation(messages=(user("q"),), tools=LISTED)
    form = answer_format(template, asked)
    said = {"town": 'a\n  b <c> & "d"'} if name != "the name first" else {"town": "x"}
    for calls in (
        [("look_up", MANY)],
        [("stop", {})],
        [("look_up_all", {"deep": 2}), ("look_up", said)],
        [("stop", {"sure": False})],
    ):
        if len(calls) > 1 and name in ("the name twice", "the name first"):
            continue  # what stands before a name is part of no call
        for text in ("", "Let me look."):
            if text and name == "the name first":
                continue
            chat = [call_of(*each) for each in calls]
            prompt = template.render([{"role": "user", "content": "q"}], asked, ask=True).text
            answer = {
                "role": "assistant",
                "content": text,
                "tool_calls": [c.for_template(text_arguments=False) for c in chat],
            }
            whole = template.render([{"role": "user", "content": "q"}, answer], asked).text
            written = whole.removeprefix(prompt).removesuffix("<|end|>")
            content, _, read = parse_answer(written, with_tools=True, form=form)
            assert content == text
            assert [(each.function.name, each.function.arguments) for each in read] == calls
            for wrong in (
                written[:-4],
                written.replace("look_up", "other").replace("stop", "other"),
                written + " more",
            ):
                assert parse_answer(wrong, with_tools=True, form=form)[2] == ()


def call_of(name: str, arguments: dict[str, object]) -> ToolCall:
    return ToolCall(id="qz1", function=FunctionCall(name=name, arguments=arguments))
