import json
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftline.data.answers import AnswerStore
from draftline.data.conversations import Conversation, Message
from draftline.data.dataset import PreparedDataset
from draftline.data.prepare import prepare
from draftline.data.template import render_prompt
from draftline.errors import ConfigError, DataError
from draftline.options import GenerationSettings, PrepareOptions, Sampling
from draftline.records import Sample
from draftline.targets.model import weights_fingerprint
from draftline.targets.regenerate import Agreement, Drawn, TargetAnswers, generate_batch, measure_agreement
from tests.data.chat_tokenizers import CHATML, GEMMA, make_tokenizer
from tests.data.test_prepare import reasons, write

CONTEXT = 40
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


def test_a_sampled_answer_is_drawn_from_the_filtered_distribution_and_depends_on_no_other(
    model: LlamaForCausalLM,
) -> None:
    """Against a whole forward per token, transformers' own filters, and the generator of that answer alone."""
    generator = torch.Generator().manual_seed(1)
    asked = [torch.randint(300, (length,), generator=generator).tolist() for length in (3, 17, 9, 1, 12)] * 2
    stop_ids, seeds = frozenset(range(0, 300, 9)), list(range(70, 70 + len(asked)))
    sampling = Sampling(temperature=1.7, top_k=50, top_p=0.9)
    found = dict(generate_batch(model, asked, stop_ids, 9, Drawn(sampling, seeds)))
    filters = [TemperatureLogitsWarper(1.7), TopKLogitsWarper(50), TopPLogitsWarper(0.9)]
    for row, (prompt, seed) in enumerate(zip(asked, seeds, strict=True)):
        generator, output = generator.manual_seed(seed), list[int]()
        while len(output) < 9 and not (output and output[-1] in stop_ids):
            ids = torch.tensor([[*prompt, *output]])
            with torch.no_grad():
                scores = model(input_ids=ids, use_cache=False).logits[:, -1].double()
            for each in filters:
                scores = each(ids, scores)
            output.append(int(torch.multinomial(scores.softmax(-1), 1, generator=generator)))
        assert found[row] == output
    assert len({tuple(answer) for answer in found.values()}) > 7
    assert len({len(answer) for answer in found.values()}) > 2  # rows left the batch at different times


def test_samples_are_stored_each_under_its_own_key(model: LlamaForCausalLM, tmp_path: Path) -> None:
    settings = GenerationSettings(max_new_tokens=12, sampling=Sampling(temperature=2.0))
    asked = [Conversation(messages=(Message(role="user", content="Sort"),), sample=n) for n in range(4)]
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        answerer = TargetAnswers(model, make_tokenizer(CHATML), store, settings)
        two = answerer(asked[:2])
        assert len(store) == 2
        four = answerer(asked)
        assert len(store) == 4
    assert four[:2] == two
    texts = [chat.messages[-1].output_ids for chat in four if isinstance(chat, Conversation)]
    assert len(set(texts)) == 4
    for other in (
        settings.model_copy(update={"seed": 1}),
        settings.model_copy(update={"sampling": Sampling(temperature=2.0, top_k=5)}),
        settings.model_copy(update={"sampling": Sampling(temperature=2.0, top_p=0.5)}),
        settings.model_copy(update={"sampling": Sampling(temperature=1.0)}),
        settings.model_copy(update={"sampling": Sampling()}),
    ):
        assert other.identity() != settings.identity()


def test_greedy_samples_would_all_be_the_same() -> None:
    with pytest.raises(ConfigError, match="--temperature"):
        GenerationSettings(answers_per_prompt=2)


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


@pytest.fixture(scope="module")
def small_model() -> LlamaForCausalLM:
    """A target that reads few tokens at once."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer(GEMMA)), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=None,
        max_position_embeddings=CONTEXT, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_refused_and_too_long_prompts_are_counted_drops(small_model: LlamaForCausalLM, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be kind."}
    rows = [
        {"turns": ["one"]},
        {"messages": [system, {"role": "user", "content": "two"}]},
        {"turns": ["word " * CONTEXT]},
        {"turns": ["three"]},
    ]
    data, tokenizer = write(tmp_path / "data.jsonl", rows), make_tokenizer(GEMMA)
    with AnswerStore(tmp_path / "out" / "answers.jsonl") as store:
        answerer = TargetAnswers(small_model, tokenizer, store, GenerationSettings(max_new_tokens=3 * CONTEXT))
        report = prepare(tokenizer, [data], tmp_path / "out", PrepareOptions(), answerer)
    assert report["rows_out"] == 2
    assert reasons(report["dropped"]) == {
        "template_refused: System role not supported": (1, 2),
        "prompt_fills_context": (1, 3),
    }
    assert len(PreparedDataset.open(tmp_path / "out")) == 2


def test_prompt_and_answer_together_fit_the_context(small_model: LlamaForCausalLM) -> None:
    asked = [[5] * 10, [6] * 35, [7] * 39]
    answers = dict(generate_batch(small_model, asked, frozenset(), 20))
    assert [len(answers[row]) for row in range(3)] == [20, 5, 1]


def test_nothing_is_written_before_the_first_answer(small_model: LlamaForCausalLM, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(GEMMA)
    for out, data, message in (
        (tmp_path / "out", str(tmp_path / "missing.jsonl"), "does not exist"),
        (tmp_path / "file", write(tmp_path / "data.jsonl", [{"turns": ["one"]}]), "is a file"),
        (tmp_path / "full", str(tmp_path / "data.jsonl"), "holds no prepared data"),
    ):
        if out.name == "file":
            out.write_text("mine")
        if out.name == "full":
            out.mkdir()
            (out / "thesis.txt").write_text("mine")
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(DataError, match=message), AnswerStore(out / "answers.jsonl") as store:
            prepare(
                tokenizer,
                [data],
                out,
                PrepareOptions(),
                TargetAnswers(small_model, tokenizer, store, GenerationSettings()),
            )
        assert sorted(tmp_path.rglob("*")) == before
