import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.data.agreement import Agreement, given_samples, measure_agreement
from draftline.data.answers import Answer, AnswerStore
from draftline.data.conversations import Conversation, FunctionCall, Message, ToolCall
from draftline.data.dialogue import Dialogue, answer_slots
from draftline.data.parse_answer import parse_answer
from draftline.data.pipeline import PrepareOptions
from draftline.data.regenerate import (
    GenerationSettings,
    TargetAnswers,
    generate_answers,
    generate_batch,
    render_prompt,
    weights_fingerprint,
)
from draftline.errors import DataError
from draftline.records import Sample
from tests.data.chat_tokenizers import CHATML, THINKING, make_tokenizer

SETTINGS = GenerationSettings(max_new_tokens=12, batch_size=3)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer(CHATML)), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=None,
        initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompts(*texts: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", content=text) for text in texts))


def naive_greedy(model: LlamaForCausalLM, ids: list[int], stop_ids: frozenset[int], length: int) -> list[int]:
    """Greedy decoding of one prompt without cache, padding or batch."""
    written: list[int] = []
    with torch.no_grad():
        while len(written) < length and not (written and written[-1] in stop_ids):
            written.append(int(model(torch.tensor([ids + written])).logits[0, -1].argmax()))
    return written


def test_batch_equals_one_by_one_decoding(model: LlamaForCausalLM) -> None:
    generator = torch.Generator().manual_seed(0)
    asked = [torch.randint(300, (length,), generator=generator).tolist() for length in (3, 17, 9, 1, 12)]
    alone = [naive_greedy(model, ids, frozenset(), 14) for ids in asked]
    stop_ids = frozenset(alone[1][5:6] + alone[3][2:3])  # so that rows leave the batch at different times
    found = dict(generate_batch(model, asked, stop_ids, 14))
    assert found == {row: naive_greedy(model, ids, stop_ids, 14) for row, ids in enumerate(asked)}
    assert len({len(output) for output in found.values()}) > 1


def test_each_turn_is_answered_given_the_regenerated_history(model: LlamaForCausalLM, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    given = Conversation(
        messages=(
            Message(role="user", content="first"),
            Message(role="assistant", content="an old answer"),
            Message(role="user", content="second"),
        )
    )
    first = naive_greedy(model, render_prompt(tokenizer, prompts("first"), {}), frozenset({2}), 64)
    stop = int(first[4])
    model.generation_config.eos_token_id = [2, stop]
    try:
        with AnswerStore(tmp_path / "answers.jsonl") as store:
            (answered,) = generate_answers(model, tokenizer, [given], store, SETTINGS)
    finally:
        model.generation_config.eos_token_id = 2
    assert [message.role for message in answered.messages] == ["user", "assistant", "user", "assistant"]
    ended = first[: first.index(stop)]
    assert answered.messages[1].content == tokenizer.decode(ended)
    assert answered.messages[1].finish_reason == "stop"
    history = Conversation(messages=answered.messages[:3])
    second = naive_greedy(model, render_prompt(tokenizer, history, {}), frozenset({2, stop}), 12)
    assert answered.messages[3].content == tokenizer.decode(second if stop not in second else second[:-1])


def test_killed_run_keeps_finished_answers(model: LlamaForCausalLM, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CHATML)
    asked = [prompts(f"question {n}") for n in range(7)]
    with AnswerStore(tmp_path / "whole.jsonl") as store:
        whole = generate_answers(model, tokenizer, asked, store, SETTINGS)

    def kill(done: int, _total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    path = tmp_path / "answers.jsonl"
    store = AnswerStore(path)
    with pytest.raises(KeyboardInterrupt):
        generate_answers(model, tokenizer, asked, store, SETTINGS, progress=kill)
    assert len(path.read_text().splitlines()) == 4  # on disk although the store was never closed
    with path.open("a") as file:
        file.write('{"key": "cut')
    counts: list[int] = []
    with AnswerStore(path) as again:
        assert len(again) == 4
        answered = generate_answers(
            model, tokenizer, asked[::-1], again, SETTINGS, progress=lambda done, _total: counts.append(done)
        )
    store.close()
    assert counts[0] == 4
    assert answered[::-1] == whole


def test_cut_answer_ends_the_conversation(model: LlamaForCausalLM, tmp_path: Path) -> None:
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        answerer = TargetAnswers(model, make_tokenizer(CHATML), store, GenerationSettings(max_new_tokens=2))
        (answered,) = answerer([prompts("one", "two")])
    assert [message.finish_reason for message in answered.messages] == [None, "length"]


def test_key_changes_with_target_and_settings(model: LlamaForCausalLM, tmp_path: Path) -> None:
    other = LlamaForCausalLM(model.config)
    assert weights_fingerprint(model) != weights_fingerprint(other)
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        identities = [
            TargetAnswers(target, make_tokenizer(CHATML), store, settings).identity()
            for target, settings in ((model, SETTINGS), (other, SETTINGS), (model, GenerationSettings()))
        ]
    assert len({json.dumps(identity) for identity in identities}) == 3


def test_store_refuses_a_foreign_file(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(DataError, match=r"line 1 of .* is not a stored answer"):
        AnswerStore(tmp_path / "answers.jsonl")


def test_tool_result_needs_a_call() -> None:
    call = ToolCall(function=FunctionCall(name="f", arguments={}))
    chat = Conversation(
        messages=(
            Message(role="user", content="q"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content="42"),
            Message(role="assistant", content="old"),
        )
    )
    assert [[message.role for message in slot] for slot in answer_slots(chat)] == [["user"], ["tool"]]
    without, with_call = Dialogue(chat), Dialogue(chat)
    without.add(Answer(key="1", content="no call", finish_reason="stop"))
    assert without.done
    with_call.add(Answer(key="1", content="", tool_calls=(call,), finish_reason="tool_calls"))
    assert not with_call.done
    assert with_call.prompt().messages[-1].content == "42"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("plain", "plain", None, 0),
        ("<think>\nwhy\n</think>\n\nso", "so", "why", 0),
        ("why\n</think>\n\nso", "so", "why", 0),
        ('ok\n<tool_call>\n{"name": "f", "arguments": {"a": {"b": 1}}}\n</tool_call>', "ok", None, 1),
        ('<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', None, 0),
    ],
)
def test_answers_are_taken_apart(text: str, content: str, reasoning: str | None, calls: int) -> None:
    found = parse_answer(text, with_tools=True)
    assert (found[0], found[1], len(found[2])) == (content, reasoning, calls)


def test_reasoning_survives_into_the_next_prompt() -> None:
    dialogue = Dialogue(prompts("one", "two"))
    dialogue.add(Answer(key="1", content="so", reasoning_content="why", finish_reason="stop"))
    assert dialogue.prompt().messages[1].reasoning_content == "why"
    tokenizer = make_tokenizer(THINKING.replace("loop.index0 > ns.last", "true"))
    assert "<think>\nwhy\n</think>\n\nso" in tokenizer.decode(render_prompt(tokenizer, dialogue.prompt(), {}))


def test_agreement_tells_own_answers_from_others(model: LlamaForCausalLM) -> None:
    own = naive_greedy(model, [5, 6, 7], frozenset(), 40)
    generator = torch.Generator().manual_seed(1)
    others = torch.randint(300, (40,), generator=generator).tolist()
    mask = torch.tensor([False] * 3 + [True] * 40)
    results = [
        measure_agreement(model, [Sample(0, torch.tensor([5, 6, 7, *answer]), mask)]) for answer in (own, others)
    ]
    assert results[0] == Agreement(40, 40)
    assert "train on them" in results[0].advice
    assert results[1].share < 0.2
    assert "--regenerate" in results[1].advice


def test_given_answers_are_those_of_the_data(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]} for n in range(5)
    ]
    rows = [{"prompt": "no answer"}, *chats]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    tokenizer = make_tokenizer(CHATML)
    samples = given_samples(tokenizer, [str(tmp_path / "data.jsonl")], PrepareOptions(), 3)
    assert ["q0" in tokenizer.decode(samples[0].input_ids), len(samples)] == [True, 3]
    assert tokenizer.decode(samples[2].input_ids[samples[2].loss_mask]) == "a<|im_end|>"
