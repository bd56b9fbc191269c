import json

import pytest

from draftline.data.conversations import Chat, FormattedText, TokenRow, Unusable
from draftline.data.shapes import parse_row

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
DEEP: list[object] = [{"name": "f", "parameters": {}}]
for _ in range(480):
    DEEP = [{"name": "f", "parameters": {"a": DEEP}}]
HI_YO = [("user", "hi"), ("assistant", "yo")]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def said(row: object) -> list[tuple[str, str]]:
    parsed = parse_row(row)
    assert isinstance(parsed, Chat), parsed
    return [(message.role, message.content) for message in parsed.conversation.messages]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]},
        {"conversations": [{"from": "USER", "value": "hi"}, {"from": "bing", "value": "yo"}], "id": 1},
        {"conversations": [{"from": "user", "value": "hi"}, {"from": "chatgpt", "value": "yo"}], "id": "a"},
        {"conversations": [{"from": "prompter", "text": "hi"}, {"from": "bard", "value": "yo"}]},
        {"messages": [USER, ANSWER]},
        {"messages": json.dumps([USER, ANSWER])},
        {"messages": [USER, ANSWER], "conversations": [{"from": "human", "value": "other"}]},
        {"messages": None, "conversations": [USER, ANSWER]},
        {"messages": [{**USER, "tool_calls": None, "name": None, "reasoning_content": None}, ANSWER], "tools": None},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER]},
        [USER, ANSWER],
        {"prompt": "hi", "completion": "yo"},
        {"prompt": "hi", "response": "yo"},
        {"question": "hi", "response": "yo"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": "hi", "chosen": [USER, ANSWER], "rejected": [USER]},
        {"instruction": "hi", "input": "", "output": "yo"},
        {"turns": [USER, ANSWER]},
        {"messages": {"role": ["user", "assistant"], "content": ["hi", "yo"]}},
        {"messages": [json.dumps(USER), json.dumps(ANSWER)]},
        {"chosen": [USER, ANSWER], "rejected": [USER]},
        {"question": "hi", "chosen": "yo", "rejected": "no"},
        {"query": "hi", "response": "yo"},
        {"problem": "hi", "generated_solution": "yo"},
        {"problem": "hi", "solution": "yo"},
        {"prompt": "hi", "responses": ["yo", "no"]},
        {"prompt": "hi", "generation": "yo"},
        {"inputs": "hi", "targets": "yo"},
        {"user": "hi", "assistant": "yo"},
        {"human": "hi", "bot": "yo"},
        {"instruction": "hi", "response": "yo"},
        {"instruction": "hi", "demonstration": "yo"},
        {"data": ["hi", "yo"]},
        {"input": [USER], "output": "yo"},
        {"prompt": "hi", "completion": {"role": "assistant", "content": "yo"}},
        {"messages": [USER, {"role": "assistant", "content": None, "refusal": "yo"}]},
        {"messages": [USER, {**ANSWER, "audio": None, "annotations": [], "function_call": None, "tool_calls": []}]},
    ],
)
def test_dialects_of_one_conversation(row: object) -> None:
    assert said(row) in (HI_YO, [*HI_YO[:1], *HI_YO])


def test_preference_row_does_not_repeat_its_prompt() -> None:
    assert said({"prompt": [USER], "chosen": [USER, ANSWER], "rejected": []}) == HI_YO


def test_alpaca_joins_instruction_and_input() -> None:
    assert said({"instruction": "Add", "input": "1 2", "output": "3"}) == [("user", "Add\n\n1 2"), ("assistant", "3")]


def test_alpaca_shows_its_context_and_its_history() -> None:
    row = {"instruction": "Add", "context": "1 2", "response": "3", "history": [["hi", "yo"]]}
    assert said(row) == [*HI_YO, ("user", "Add\n\n1 2"), ("assistant", "3")]
    assert parse_row({**row, "history": ["hi"]}) == Unusable("bad_history")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "completion": "yo", "reasoning": "why"},
        {"instruction": "hi", "output": "yo", "thinking": "why"},
        {"messages": [USER, {**ANSWER, "reasoning_content": "why"}]},
        {"messages": [USER, {**ANSWER, "content": [{"type": "thinking", "thinking": "why"}, "yo"]}]},
        {"messages": [USER, {**ANSWER, "content": [{"type": "reasoning", "text": "why"}, "yo"]}]},
    ],
)
def test_reasoning_is_kept_apart_wherever_the_row_has_it(row: object) -> None:
    parsed = parse_row(row)
    assert isinstance(parsed, Chat)
    answer = parsed.conversation.messages[-1]
    assert (answer.content, answer.reasoning_content) == ("yo", "why")


@pytest.mark.parametrize(("key", "reason"), [("image", "has_image"), ("images", "has_image"), ("audio", "has_media")])
def test_media_beside_the_messages(key: str, reason: str) -> None:
    row = {"messages": [USER, ANSWER], key: ["a.png"]}
    assert parse_row(row) == Unusable(reason)
    assert isinstance(parse_row(row, strip_images=True), Chat)
    assert isinstance(parse_row({**row, key: []}), Chat)


@pytest.mark.parametrize(
    "row", [{"turns": ["Q1", "Q2"]}, {"messages": [{"role": "user", "content": q} for q in ("Q1", "Q2")]}]
)
def test_prompts_only(row: object) -> None:
    assert said(row) == [("user", "Q1"), ("user", "Q2")]


@pytest.mark.parametrize("row", [{"prompt": "Q"}, {"question": "Q", "answer": "A"}, {"instruction": "Q"}])
def test_lone_prompts(row: object) -> None:
    assert said(row) == [("user", "Q")]


def test_row_level_system_prompt() -> None:
    assert said({"system": "Be terse.", "messages": [USER, ANSWER]}) == [("system", "Be terse."), *HI_YO]


def test_tool_calls_in_both_dialects() -> None:
    arguments = {"a": 1}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": json.dumps(arguments)}}
    openai = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": {"x": 1}}]
    shared = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": arguments})},
        {"from": "observation", "value": '{"x": 1}'},
    ]
    for row in ({"messages": openai}, {"conversations": shared}):
        parsed = parse_row(row)
        assert isinstance(parsed, Chat)
        _, called, result = parsed.conversation.messages
        assert (called.role, called.content) == ("assistant", "")
        assert called.tool_calls[0].function.model_dump() == {"name": "f", "arguments": arguments}
        assert (result.role, result.content) == ("tool", '{"x": 1}')


def called(arguments: object) -> object:
    """The row's own arguments of a call as they are read, or why they are not."""
    function = {"name": "f", "arguments": arguments}
    parsed = parse_row({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": function}]}]})
    return parsed.conversation.messages[1].tool_calls[0].function.arguments if isinstance(parsed, Chat) else parsed


@pytest.mark.parametrize(
    ("given", "read"), [("", {}), ("  ", {}), (None, {}), ("null", {}), ("{}", {}), ('{"a": null}', {"a": None})]
)
def test_no_arguments_are_an_empty_object(given: object, read: object) -> None:
    assert called(given) == read


@pytest.mark.parametrize("given", ['{"text": "cut he', '{"a": 1}{"b": 2}', '"{}"', "[1]", [1], 3, True])
def test_arguments_that_are_no_object_are_named(given: object) -> None:
    assert called(given) == Unusable("arguments_not_an_object: f")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [TOOL["function"]], TOOL])
def test_tools_in_any_form(tools: object) -> None:
    parsed = parse_row({"messages": [USER, ANSWER], "tools": tools})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.tools == (TOOL,)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"finish_reason": "length"}, "length"),
        ({"stop_reason": "max_tokens"}, "length"),
        ({"stop_reason": "end_turn"}, None),
        ({"finish_reason": "stop"}, "stop"),
    ],
)
def test_an_answer_that_a_row_calls_cut_is_cut(fields: dict[str, str], reason: str | None) -> None:
    in_row = parse_row({"messages": [USER, ANSWER, USER, ANSWER], **fields})
    in_message = parse_row({"messages": [USER, {**ANSWER, **fields}]})
    beside = parse_row({"prompt": "hi", "completion": "yo", **fields})
    for parsed in (in_row, in_message, beside):
        assert isinstance(parsed, Chat)
        last = parsed.conversation.messages[-1].finish_reason
        assert last == reason or (reason == "stop" and last is None)
        assert all(message.finish_reason is None for message in parsed.conversation.messages[:-1])


def test_a_switch_is_no_thought_and_its_column_is_named() -> None:
    parsed = parse_row({"input": [USER], "output": "yo", "reasoning": "on", "score": 3})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.messages[-1].reasoning_content is None
    assert parsed.unread == ("reasoning", "score")


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"text": "why"}},
        {"reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {"thinking": ["why"]},
    ],
)
def test_reasoning_in_a_structure(fields: dict[str, object]) -> None:
    parsed = parse_row({"messages": [USER, {**ANSWER, **fields}]})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.messages[1].reasoning_content == "why"
    assert parsed.unread == ()


def test_calls_and_results_among_the_parts_of_a_content() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "ls", "input": {"p": 1}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "ok"}]}
    parsed = parse_row(
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": "Look."}, use]},
                {"role": "user", "content": [result]},
                ANSWER,
            ]
        }
    )
    assert isinstance(parsed, Chat)
    _, called, answered, _ = parsed.conversation.messages
    assert (called.content, called.tool_calls[0].id) == ("Look.", "t1")
    assert called.tool_calls[0].function.model_dump() == {"name": "ls", "arguments": {"p": 1}}
    assert (answered.role, answered.content, answered.tool_call_id) == ("tool", "ok", "t1")


@pytest.mark.parametrize(
    "calls",
    ['[{"name": "f", "arguments": {"a": 1}}]', "f(a=1)", '[{"name": "f", "arguments": "{\\"a\\": 1}"}]', "[f(a=1)]"],
)
def test_function_calls_in_a_field_of_text(calls: str) -> None:
    asked = {"role": "system", "content": "", "functions": json.dumps([TOOL["function"]])}
    answer = {"role": "assistant", "content": "", "function_calls": calls}
    parsed = parse_row({"messages": [asked, USER, answer, {"role": "environment", "content": "7"}]})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.tools == (TOOL,)
    assert parsed.conversation.messages[2].tool_calls[0].function.model_dump() == {"name": "f", "arguments": {"a": 1}}
    assert parsed.conversation.messages[3].role == "tool"


def test_calls_as_the_answer_to_a_query() -> None:
    parsed = parse_row({"query": "Heat?", "answers": '[{"name": "f", "arguments": {}}]', "tools": "[]"})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.messages[1].tool_calls[0].function.name == "f"


def test_nulls_of_the_users_json_stay() -> None:
    schema = {"type": "object", "properties": {"day": {"default": None, "enum": ["mon", None]}}}
    function = {"name": "book", "parameters": schema}
    call = {"function": {"name": "book", "arguments": {"day": None}}}
    parsed = parse_row(
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [{"function": function}]}
    )
    assert isinstance(parsed, Chat)
    assert parsed.conversation.tools[0]["function"] == function
    assert parsed.conversation.messages[1].tool_calls[0].function.arguments == {"day": None}


def test_a_flat_tool_has_its_type_once() -> None:
    function = {"name": "book", "description": "Books.", "parameters": {"type": "object"}}
    parsed = parse_row({"messages": [USER, ANSWER], "tools": [{"type": "function", **function}]})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize(
    ("details", "train", "note"),
    [
        ([{"begin_offset": 0, "end_offset": 8, "train": False}], False, ()),
        ([{"train": True}], True, ()),
        ([{"train": True}, {"train": False}], False, ("partly_trained_turn_left_out",)),
    ],
)
def test_flags_of_parts_of_a_turn(details: object, train: bool, note: tuple[str, ...]) -> None:
    parsed = parse_row({"messages": [USER, {**ANSWER, "train_detail": details}]})
    assert isinstance(parsed, Chat)
    assert (parsed.conversation.messages[1].train, parsed.notes) == (train, note)


def test_columns_and_fields_that_are_not_read_are_named() -> None:
    parsed = parse_row({"question": "Q", "answer": "A", "id": 3})
    assert isinstance(parsed, Chat)
    assert parsed.unread == ("answer", "id")
    parsed = parse_row({"messages": [{**USER, "mood": "sad"}, ANSWER], "tools": None})
    assert isinstance(parsed, Chat)
    assert parsed.unread == ("messages.mood",)


@pytest.mark.parametrize(("flag", "train"), [({"weight": 0}, False), ({"weight": 1}, True), ({"train": False}, False)])
def test_train_flags(flag: dict[str, object], train: bool) -> None:
    parsed = parse_row({"messages": [USER, {**ANSWER, **flag}]})
    assert isinstance(parsed, Chat)
    assert parsed.conversation.messages[1].train is train


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("text", "not_an_object"),
        (7, "not_an_object"),
        (None, "not_an_object"),
        ({}, "unknown_shape"),
        ({"id": 1, "b": 2}, "unknown_shape: id, b"),
        ({"messages": "{not json"}, "messages_not_json"),
        ({"messages": {"role": "user"}}, "messages_not_a_list"),
        ({"messages": ["hi"]}, "message_not_an_object"),
        ({"messages": [{"content": "hi"}]}, "message_without_role"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "message_without_role"),
        ({"messages": [{"role": "user", "content": 3}]}, "bad_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "has_image"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "has_media"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "unknown_content_part: sound"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {}}]}]}, "bad_tool_calls"),
        ({"messages": [USER, ANSWER], "tools": "[not json"}, "bad_tools"),
        ({"messages": [USER, ANSWER], "tools": [{"type": "function", "function": {}}]}, "bad_tools"),
        ({"messages": [USER, {**ANSWER, "weight": "0"}]}, "bad_weight"),
        ({"messages": [USER, {**ANSWER, "weight": -1}]}, "bad_weight"),
        ({"messages": [USER, {**ANSWER, "loss_weight": float("nan")}]}, "bad_loss_weight"),
        ({"messages": [USER, {**ANSWER, "train": "false"}]}, "bad_train"),
        ({"messages": [USER, {**ANSWER, "reasoning_content": 3}]}, "bad_reasoning"),
        ({"messages": [USER, ANSWER], "weight": 0}, "row_not_to_be_learned"),
        ({"prompt": "hi", "completion": "BAD", "label": False}, "row_not_to_be_learned"),
        ({"messages": [USER, ANSWER], "tools": DEEP}, "nested_too_deep"),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": DEEP[0]}]}]},
            "nested_too_deep",
        ),
        ({"messages": [USER, ANSWER], "chat_template_kwargs": {"tokenize": 1}}, "bad_chat_template_kwargs"),
        ({"messages": [USER, {**ANSWER, "content": "a\0b"}]}, "nul_character"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "labels_differ_from_input_ids"),
        ({"input_ids": "1 2", "loss_mask": [1, 1]}, "bad_input_ids"),
        ({"prompt": 3, "completion": "A"}, "bad_content"),
    ],
)
def test_unusable_rows_say_why(row: object, reason: str) -> None:
    assert parse_row(row) == Unusable(reason)


def test_images_are_stripped_on_request() -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "a.png"}}]
    parsed = parse_row({"messages": [{"role": "user", "content": content}, ANSWER]}, strip_images=True)
    assert isinstance(parsed, Chat)
    assert parsed.conversation.messages[0].content == "see"


@pytest.mark.parametrize(
    ("row", "note"),
    [
        ({"messages": [USER, ANSWER], "conversations": []}, "several_chat_keys"),
        ({"messages": [ANSWER, USER, ANSWER]}, "starts_with_assistant"),
        ({"messages": [USER, ANSWER, USER]}, "ends_with_user"),
        ({"prompt": "hi", "completion": "yo"}, "template_applied_to_pair"),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "fractional_weight_taken_as_one"),
        ({"conversations": [USER, {"from": "function_call", "value": "call f"}]}, "call_is_not_json"),
    ],
)
def test_notes(row: object, note: str) -> None:
    parsed = parse_row(row)
    assert isinstance(parsed, Chat)
    assert parsed.notes == (note,)


def test_rows_without_messages() -> None:
    assert parse_row({"text": "<|im_start|>"}) == FormattedText("<|im_start|>")
    assert parse_row({"input_ids": [1, 2], "loss_mask": [0, 1]}) == TokenRow([1, 2], [0, 1])
    assert parse_row({"input_ids": [1, 2], "labels": [-100, 2]}) == TokenRow([1, 2], [0, 1])
