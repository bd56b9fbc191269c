"""Prompts that the target cannot answer are counted, and never end a run; a disk that refuses is one line."""

import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from draftline.data.answers import AnswerStore
from draftline.data.dataset import PreparedDataset
from draftline.data.pipeline import PrepareOptions
from draftline.data.prepare import prepare
from draftline.errors import DataError, StorageError
from draftline.targets.regenerate import GenerationSettings, TargetAnswers, generate_batch
from tests.data.chat_tokenizers import GEMMA, make_tokenizer
from tests.data.test_prepare import reasons, write

CONTEXT = 40


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(make_tokenizer(GEMMA)), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, pad_token_id=None,
        max_position_embeddings=CONTEXT, initializer_range=0.4,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_refused_and_too_long_prompts_are_counted_drops(model: LlamaForCausalLM, tmp_path: Path) -> None:
    system = {"role": "system", "content": "Be kind."}
    rows = [
        {"turns": ["one"]},
        {"messages": [system, {"role": "user", "content": "two"}]},
        {"turns": ["word " * CONTEXT]},
        {"turns": ["three"]},
    ]
    data, tokenizer = write(tmp_path / "data.jsonl", rows), make_tokenizer(GEMMA)
    with AnswerStore(tmp_path / "out" / "answers.jsonl") as store:
        answerer = TargetAnswers(model, tokenizer, store, GenerationSettings(max_new_tokens=3 * CONTEXT))
        report = prepare(tokenizer, [data], tmp_path / "out", PrepareOptions(), answerer)
    assert report["rows_out"] == 2
    assert reasons(report["dropped"]) == {
        "template_refused: System role not supported": (1, 2),
        "prompt_fills_context": (1, 3),
    }
    assert len(PreparedDataset.open(tmp_path / "out")) == 2


def test_prompt_and_answer_together_fit_the_context(model: LlamaForCausalLM) -> None:
    prompts = [[5] * 10, [6] * 35, [7] * 39]
    answers = dict(generate_batch(model, prompts, frozenset(), 20))
    assert [len(answers[row]) for row in range(3)] == [20, 5, 1]


def test_nothing_is_written_before_the_first_answer(model: LlamaForCausalLM, tmp_path: Path) -> None:
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
                tokenizer, [data], out, PrepareOptions(), TargetAnswers(model, tokenizer, store, GenerationSettings())
            )
        assert sorted(tmp_path.rglob("*")) == before


def test_full_disk_says_that_the_work_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make_tokenizer(GEMMA)
    data = write(tmp_path / "data.jsonl", [{"prompt": "hi", "completion": "yo"}])

    def refuse(_: int) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(StorageError, match=r"No space left.*is kept in .*partial, and the same command goes on"):
            prepare(tokenizer, [data], tmp_path / "out", PrepareOptions())
    assert prepare(tokenizer, [data], tmp_path / "out", PrepareOptions())["rows_out"] == 1


def test_a_damaged_archive_is_an_error_unless_allowed(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"prompt": f"{n * n} {n % 7}", "completion": "yo"}) + "\n" for n in range(3000))
    (tmp_path / "cut.gz").write_bytes(gzip.compress(rows.encode())[:-2000])
    data, tokenizer = [str(tmp_path / "cut.gz")], make_tokenizer(GEMMA)
    with pytest.raises(DataError, match=r"cut.gz is damaged from line \d+ on.*--max-unreadable 1"):
        prepare(tokenizer, data, tmp_path / "out", PrepareOptions(max_unreadable=0.5))
    report = prepare(tokenizer, data, tmp_path / "out", PrepareOptions(max_unreadable=1))
    assert report["dropped"]["damaged_file"]["first_line"] == report["rows_in"]
