"""Layouts of data sets of the hub: columns as published, contents made up; what is read, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from draftline.data.conversations import Chat, FormattedText, Unusable
from draftline.data.shapes import parse_row

Q, A = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
PAIR, OTHER = [Q, A], [Q, {"role": "assistant", "content": "no"}]
SHARED = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
NAMED = [{"from": "user", "value": "hi"}, {"from": "assistant", "value": "yo"}]
TOOLS = json.dumps([{"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}])
CALL = json.dumps({"name": "f", "arguments": {}})

KNOWN: dict[str, dict[str, Any]] = {
    "alpaca": {"instruction": "hi", "input": "", "output": "yo", "text": "Below is an instruction. hi yo"},
    "alpaca-cleaned": {"instruction": "hi", "input": "", "output": "yo"},
    "dolly-15k": {"instruction": "hi", "context": "", "response": "yo", "category": "open_qa"},
    "ultrachat_200k": {"prompt": "hi", "prompt_id": "1", "messages": PAIR},
    "ultrachat": {"id": "0", "data": ["hi", "yo"]},
    "ultrafeedback_binarized": {
        "prompt": "hi",
        "chosen": PAIR,
        "rejected": OTHER,
        "messages": PAIR,
        "score_chosen": 8.0,
    },
    "hh-rlhf": {"chosen": "\n\nHuman: hi\n\nAssistant: yo", "rejected": "\n\nHuman: hi\n\nAssistant: no"},
    "OpenOrca": {"id": "niv.1", "system_prompt": "", "question": "hi", "response": "yo"},
    "SlimOrca": {
        "conversations": [
            {"from": "human", "value": "hi", "weight": None},
            {"from": "gpt", "value": "yo", "weight": 1.0},
        ]
    },
    "OpenHermes-2.5": {"conversations": SHARED, "source": "x", "category": None, "system_prompt": None, "idx": None},
    "GPTeacher": {"instruction": "hi", "input": "", "response": "yo"},
    "lmsys-chat-1m": {"conversation_id": "a", "model": "m", "conversation": PAIR, "turn": 1, "redacted": False},
    "WildChat-1M": {
        "conversation": [{**Q, "country": "X", "toxic": False, "turn_identifier": 1}, {**A, "toxic": False}],
        "turn": 1,
    },
    "chatbot_arena": {
        "conversation_a": OTHER,
        "conversation_b": PAIR,
        "winner": "model_b",
        "model_a": "x",
        "judge": "y",
    },
    "ShareGPT_Vicuna": {"id": "x_0", "conversations": SHARED},
    "xlam-function-calling": {"id": 0, "query": "hi", "answers": f"[{CALL}]", "tools": TOOLS},
    "hermes-function-calling": {"id": "1", "conversations": SHARED, "tools": TOOLS, "category": "c", "task": "t"},
    "ToolACE": {"system": "", "conversations": NAMED},
    "APIGen-MT": {"conversations": SHARED, "system": "", "tools": TOOLS},
    "Nemotron-Post-Training-v1": {
        "uuid": "u",
        "messages": PAIR,
        "reasoning": "off",
        "category": "chat",
        "metadata": "{}",
    },
    "Llama-Nemotron": {"input": [Q], "output": "yo", "category": "math", "reasoning": "off", "system_prompt": ""},
    "OpenMathInstruct-1": {"question": "hi", "expected_answer": "4", "generated_solution": "yo", "is_correct": True},
    "OpenMathInstruct-2": {"problem": "hi", "generated_solution": "yo", "expected_answer": "4", "problem_source": "x"},
    "OpenMathReasoning": {
        "problem": "hi",
        "generated_solution": "yo",
        "expected_answer": "4",
        "pass_rate_72b_tir": "0.9",
    },
    "OpenCodeReasoning": {
        "id": "1",
        "input": "hi",
        "output": "yo",
        "source": "s",
        "license": "l",
        "solution": "print()",
    },
    "OpenCodeInstruct": {"id": "1", "input": "hi", "output": "yo", "domain": "generic", "unit_tests": "[]"},
    "HelpSteer2": {"prompt": "hi", "response": "yo", "helpfulness": 4, "verbosity": 2},
    "HelpSteer3": {"domain": "general", "context": [Q], "response1": "yo", "response2": "no", "overall_preference": -1},
    "Daring-Anteater": {
        "system": "",
        "mask": "User",
        "conversations": [{"from": "User", "value": "hi"}, {"from": "Assistant", "value": "yo"}],
    },
    "OpenThoughts-114k": {"system": "", "conversations": NAMED},
    "OpenR1-Math-220k": {"problem": "hi", "solution": "no", "answer": "4", "generations": ["no"], "messages": PAIR},
    "Mixture-of-Thoughts": {"messages": PAIR, "num_tokens": 7, "source": "s"},
    "Bespoke-Stratos": {"system": "", "conversations": NAMED},
    "LIMO": {"question": "hi", "solution": "yo", "answer": "4"},
    "s1K": {"question": "hi", "solution": "yo", "cot_type": "math", "thinking_trajectories": ["t"], "attempt": "a"},
    "dolphin": {"instruction": "hi", "input": "", "output": "yo"},
    "dolphin-r1": {"messages": PAIR, "model": "m", "score": 0.3},
    "medical-o1": {"Question": "hi", "Complex_CoT": "hm", "Response": "yo"},
    "MetaMathQA": {"type": "t", "query": "hi", "original_question": "q", "response": "yo"},
    "MathInstruct": {"source": "s", "output": "yo", "instruction": "hi"},
    "agentinstruct-1M": {"messages": json.dumps(PAIR)},
    "smoltalk": {"messages": PAIR, "source": "s"},
    "smoltalk2": {"messages": PAIR, "chat_template_kwargs": {"enable_thinking": False}, "source": "s"},
    "tulu-3-sft": {"id": "1", "messages": PAIR, "source": "s"},
    "tulu-3-preference": {"id": "1", "prompt": "hi", "chosen": PAIR, "rejected": OTHER, "chosen_model": "m"},
    "Capybara": {"source": "s", "conversation": [{"input": "hi", "output": "yo"}]},
    "capybara-dpo": {
        "source": "s",
        "conversation": [{"input": "hi", "output": "yo"}],
        "chosen": PAIR,
        "rejected": OTHER,
    },
    "Puffin": {"id": "1", "conversations": SHARED},
    "orca_dpo_pairs": {"system": "", "question": "hi", "chosen": "yo", "rejected": "no"},
    "ultrafeedback-cleaned": {"source": "s", "prompt": "hi", "chosen": PAIR, "rejected": OTHER, "chosen-rating": 5.0},
    "PKU-SafeRLHF": {
        "prompt": "hi",
        "response_0": "no",
        "response_1": "yo",
        "better_response_id": 1,
        "is_response_0_safe": True,
    },
    "CodeAlpaca": {"instruction": "hi", "input": "", "output": "yo"},
    "Evol-Instruct-Code": {"instruction": "hi", "output": "yo"},
    "Magicoder-OSS": {"lang": "py", "raw_index": 1, "index": 1, "seed": "s", "problem": "hi", "solution": "yo"},
    "Magicoder-Evol": {"instruction": "hi", "response": "yo"},
    "CodeFeedback": {"query": "hi", "answer": "yo", "resource": "r", "lang": "py"},
    "Code-Feedback": {"id": 1, "messages": PAIR},
    "WizardLM_evol_V2": {"idx": "1", "conversations": SHARED},
    "Magpie-Pro": {"uuid": "u", "instruction": "hi", "response": "yo", "conversations": SHARED, "gen_input_config": {}},
    "no_robots": {"prompt": "hi", "prompt_id": "1", "messages": PAIR, "category": "c"},
    "LongAlign-10k": {"messages": PAIR, "length": 7},
    "Infinity-Instruct": {"id": 1, "conversations": SHARED, "label": {"ability_en": []}, "langdetect": "en"},
    "aya_dataset": {"inputs": "hi", "targets": "yo", "language": "English", "annotation_type": "original"},
    "FLAN": {"inputs": "hi", "targets": "yo", "_task_name": "t"},
    "Open-Platypus": {"input": "", "output": "yo", "instruction": "hi", "data_source": "s"},
    "MATH-500": {"problem": "hi", "solution": "yo", "answer": "4", "level": 1},
    "AM-R1-Distilled": {"messages": [{**Q, "info": {"source": "s"}}, {**A, "info": {"think_content": None}}]},
    "SYNTHETIC-1": {
        "problem_id": "1",
        "prompt": "hi",
        "llm_response": "yo",
        "gold_standard_solution": "x",
        "score": 1.0,
    },
    "kto-mix": {"prompt": [Q], "completion": [A], "label": True},
    "self-oss-instruct": {"fingerprint": None, "prompt": "no", "instruction": "hi", "response": "yo", "seed": "s"},
    "moss-like": {"conversation_id": "1", "conversation": [{"human": "hi", "assistant": "yo"}], "category": "c"},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "oasst1 (a tree, one message a row)": (
        {"message_id": "1", "parent_id": None, "text": "hi", "role": "prompter"},
        "one_message_a_row",
    ),
    "glaive-v2 (dialogues as text)": (
        {"system": "SYSTEM: x", "chat": "USER: hi\n\n\nASSISTANT: yo <|endoftext|>"},
        "messages_not_json",
    ),
    "SHP": ({"post_id": "1", "history": "hi", "human_ref_A": "yo", "human_ref_B": "no", "labels": 1}, "unknown_shape"),
    "summarize_from_feedback": ({"info": {"post": "hi"}, "summaries": [{"text": "yo"}], "choice": 0}, "unknown_shape"),
    "webgpt_comparisons": ({"question": {"full_text": "hi"}, "answer_0": "yo", "score_0": 1.0}, "bad_content"),
    "trec-like (labels)": ({"label": 3, "sentence": "hi"}, "unknown_shape"),
    "snli-like (three texts)": ({"premise": "hi", "hypothesis": "yo", "label": 1}, "unknown_shape"),
}
"""Layouts that hold no conversation, or one that cannot be told; the reason names them in the report."""


def test_most_of_the_hubs_layouts_are_known() -> None:
    assert (len(KNOWN), len(KNOWN) + len(REFUSED)) == (71, 78)


@pytest.mark.parametrize("name", KNOWN)
def test_question_and_answer_are_read(name: str) -> None:
    parsed = parse_row(KNOWN[name])
    assert isinstance(parsed, Chat), parsed
    messages = [message for message in parsed.conversation.messages if message.role != "system"]
    said = [(message.role, message.content) for message in messages]
    if name == "xlam-function-calling":
        assert [call.function.name for call in messages[-1].tool_calls] == ["f"]
        said[-1] = ("assistant", "yo")
    assert said == [("user", "hi"), ("assistant", "yo")]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_conversation_is_refused_by_name(name: str) -> None:
    row, reason = REFUSED[name]
    parsed = parse_row(row)
    assert isinstance(parsed, Unusable), parsed
    assert parsed.reason.partition(":")[0] == reason


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"question": "hi", "answer": "4"}, Chat),  # gsm8k: a result, not what a model says
        (
            {"source": "s", "instruction": "hi", "completions": [{"model": "m", "response": "yo"}]},
            Chat,
        ),  # UltraFeedback
        ({"prompt": "\n\nHuman: hi\n\nAssistant: ", "answers": [{"answer": "yo", "rank": 1}]}, Chat),  # Nectar
        ({"text": "<|prompter|>hi<|endoftext|>", "title": "t"}, FormattedText),
    ],
)
def test_prompts_and_texts(row: dict[str, Any], kind: type) -> None:
    parsed = parse_row(row)
    assert isinstance(parsed, kind)
    if isinstance(parsed, Chat):
        assert [message.role for message in parsed.conversation.messages] == ["user"]
