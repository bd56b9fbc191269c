import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.data.answers import AnswerStore
from draftline.data.conversations import Conversation, Message
from draftline.data.pipeline import PrepareOptions
from draftline.data.template import render_prompt
from draftline.records import Sample
from draftline.targets.model import weights_fingerprint
from draftline.targets.regenerate import (
    Agreement,
    GenerationSettings,
    TargetAnswers,
    generate_batch,
    given_samples,
    measure_agreement,
)
from tests.data.chat_tokenizers import CHATML, make_tokenizer

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
            (answered,) = TargetAnswers(model, tokenizer, store, SETTINGS)([given])
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
        whole = TargetAnswers(model, tokenizer, store, SETTINGS)(asked)

    def kill(done: int, _total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    path = tmp_path / "answers.jsonl"
    store = AnswerStore(path)
    with pytest.raises(KeyboardInterrupt):
        TargetAnswers(model, tokenizer, store, SETTINGS, progress=kill)(asked)
    assert len(path.read_text().splitlines()) == 4  # on disk although the store was never closed
    with path.open("a") as file:
        file.write('{"key": "cut')
    counts: list[int] = []
    with AnswerStore(path) as again:
        assert len(again) == 4
        answerer = TargetAnswers(model, tokenizer, again, SETTINGS, progress=lambda done, _total: counts.append(done))
        answered = answerer(asked[::-1])
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
