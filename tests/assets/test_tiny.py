"""The embedded target: its files load, its tokenizer and table fit each other, and it answers."""

import importlib
import json
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "draftline" / "assets" / "tiny"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("tiny_corpus")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("make_tiny_target")


def shipped_prompts() -> list[list[str]]:
    return [json.loads(line)["turns"] for line in (FOLDER / "prompts.jsonl").read_text().splitlines()]


def test_files_are_small() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000
    assert (FOLDER / "prompts.jsonl").stat().st_size <= 200_000


def test_shape_leaves_layers_after_the_captured_ones(model: PreTrainedModel) -> None:
    config = model.config
    assert config.model_type == "qwen3"
    assert config.num_hidden_layers >= 8
    assert config.head_dim in (32, 64)
    assert next(iter(model.parameters())).isfinite().all()


def test_embedding_table_has_padding_rows(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    assert model.get_input_embeddings().num_embeddings > len(tokenizer)
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id


def test_chat_template_is_plain_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Sort 3, 1."},
        {"role": "assistant", "content": "Sorted: 1, 3"},
        {"role": "user", "content": "Thanks, naïve 猫!"},
    ]
    expected = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == expected
    expected += "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.eos_token_id) == len(messages)


def test_digits_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.tokenize("4096") == list("4096")


@pytest.mark.parametrize("index", [0, 1, 2])
def test_greedy_answer_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, index: int) -> None:
    messages = [{"role": "user", "content": shipped_prompts()[index][0]}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=250, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert answer[-1] == tokenizer.eos_token_id
    assert len(answer) > 5


def test_shipped_prompts_are_distinct_and_varied() -> None:
    prompts = shipped_prompts()
    assert len(prompts) == 1500
    assert len({tuple(turns) for turns in prompts}) == len(prompts)
    assert {1, 2, 3} <= {len(turns) for turns in prompts}
    assert all(turn.strip() for turns in prompts for turn in turns)


def test_corpus_is_seeded(corpus: ModuleType) -> None:
    random.seed(0)
    first = list(corpus.conversations(5, 60))
    random.seed(1)
    assert list(corpus.conversations(5, 60)) == first
    assert list(corpus.conversations(6, 60)) != first
    assert corpus.prompts(5, 40) == corpus.prompts(5, 40)


def test_shipped_prompts_come_from_the_corpus(corpus: ModuleType) -> None:
    training = {turn for c in corpus.conversations(1_000_000, 2_000) for turn in (c.turns[0].user,)}
    prompts = shipped_prompts()
    assert prompts == corpus.prompts(2, 1500)
    seen = sum(turns[0] in training for turns in prompts)
    assert seen < 0.02 * len(prompts)


def test_every_key_is_in_its_answer(corpus: ModuleType) -> None:
    conversations = list(corpus.conversations(7, 400))
    assert len({c.kind for c in conversations}) == len(corpus.TASKS)
    for conversation in conversations:
        for turn in conversation.turns:
            assert turn.key in turn.answer
            assert turn.answer == turn.answer.strip()


def test_arithmetic_of_the_corpus_is_right(corpus: ModuleType) -> None:
    sums = [
        line.split(": ")[-1].rstrip(".")
        for c in corpus.conversations(8, 400)
        if c.kind in ("gain_and_loss", "chain_of_sums")
        for line in c.turns[0].answer.splitlines()
        if "=" in line
    ]
    assert len(sums) > 80
    for equation in sums:
        left, right = equation.split(" = ")
        first, sign, second = left.split()
        assert int(first) + (int(second) if sign == "+" else -int(second)) == int(right)


def test_last_captured_layer_does_not_settle_the_prediction(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: ModuleType, script: ModuleType
) -> None:
    agreed, positions = torch.zeros(model.config.num_hidden_layers), 0
    for conversation in corpus.conversations(9, 40):
        ids, said = script.encode(conversation, tokenizer)
        agreed += script.agreeing_layers(model, ids, said)
        positions += sum(said)
    assert agreed[-1] == positions
    assert 0.4 < agreed[script.EARLY_LAYER] / positions < 0.85


def test_early_penalty_is_the_unlikelihood_of_the_labels(model: PreTrainedModel, script: ModuleType) -> None:
    states_ND = torch.randn(6, model.config.hidden_size, requires_grad=True)
    logits_NV = model.lm_head(model.model.norm(states_ND.detach()))
    labels_N = logits_NV.argmax(-1)
    assert script.early_penalty(model, states_ND, labels_N, early_share=1.0) == 0
    penalty = script.early_penalty(model, states_ND, labels_N, early_share=0.9)
    chances = [row.exp()[label] / row.exp().sum() for row, label in zip(logits_NV, labels_N, strict=True)]
    naive = -script.EARLY_WEIGHT * sum(torch.log(1 - min(chance, 0.99)) for chance in chances) / 6
    assert penalty.item() == pytest.approx(naive.item(), rel=1e-4)
    penalty.backward()
    assert states_ND.grad is not None
    assert model.lm_head.weight.grad is None
