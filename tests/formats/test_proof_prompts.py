"""Which prompts a drafter is proven on."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from draftline.config import DataConfig, RunConfig, TargetConfig
from draftline.data.dataset import PreparedDataset
from draftline.data.prepare import prepare
from draftline.draft.loss import StepMetrics
from draftline.formats import proof_prompts
from draftline.formats.proof import ProofPrompts
from draftline.formats.proof_prompts import before_answer, choose_prompts
from draftline.options import PrepareOptions
from draftline.records import Sample
from draftline.targets.model import TINY_FOLDER, Target, build_target, load_target
from draftline.train.checkpoint import Checkpoint, TrainState, write_checkpoint
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.data.test_prepare import row, write
from tests.evaluate.pairs import random_target
from tests.formats.drafters import make_drafter
from tests.formats.proofs import PROMPTS, edit_proof, proven_folder


def _run(folder: Path, data: DataConfig, fingerprint: str) -> Path:
    model = make_drafter()
    write_checkpoint(
        folder / "best",
        Checkpoint(
            weights=model.state_dict(),
            moments={},
            random={},
            state=TrainState(StepMetrics.zero(4), step=12, tokens=3456),
            run_config=RunConfig(target=TargetConfig(name="a/target"), data=data),
            drafter_config=model.config,
            data_fingerprint=fingerprint,
        ),
    )
    return folder


def _prepared(folder: Path, heldout: int) -> str:
    """Twelve conversations, some of them held out; the fingerprint of both."""
    rows = write(folder.with_suffix(".jsonl"), [row(f"question {n}", f"answer {n}") for n in range(12)])
    prepare(make_tokenizer(CHATML), [rows], folder, PrepareOptions(heldout=heldout))
    places = [folder, folder / "heldout"] if heldout else [folder]
    return "+".join(PreparedDataset.open(place).fingerprint for place in places)


@functools.cache
def _wide_target(template: str | None = None) -> Target:
    """One whose table has a row for every token of the test tokenizer."""
    config = copy.deepcopy(random_target().model.config)
    config.vocab_size = 600
    return build_target("wide", Qwen3ForCausalLM(config), make_tokenizer(template))


def test_held_out_prompts_come_first(tmp_path: Path) -> None:
    data = tmp_path / "data"
    found = choose_prompts(_run(tmp_path / "run", DataConfig(path=data), _prepared(data, heldout=3)), _wide_target())
    asked = [make_tokenizer(CHATML).decode(ids) for ids in found.ids]
    assert found.source == "held-out"
    assert len(asked) == 3
    assert all("question" in text and "answer" not in text and text.endswith("assistant\n") for text in asked)


@pytest.mark.parametrize(("fraction", "source", "count"), [(0.25, "held-out", 3), (0.0, "training", 12)])
def test_training_prompts_come_where_none_is_held_out(tmp_path: Path, fraction: float, source: str, count: int) -> None:
    place = tmp_path / "data"
    data = DataConfig(path=place, heldout_fraction=fraction)
    found = choose_prompts(_run(tmp_path / "run", data, _prepared(place, heldout=0)), _wide_target())
    assert (found.source, len(found.ids)) == (source, count)


def test_data_that_is_gone_or_another_is_not_asked(tmp_path: Path) -> None:
    data = tmp_path / "data"
    fingerprint = _prepared(data, heldout=3)
    other = _run(tmp_path / "other", DataConfig(path=data), "f1n9er")
    assert choose_prompts(other, _wide_target()).source == "random"
    assert choose_prompts(other, _wide_target(CHATML)).source == "embedded"
    run = _run(tmp_path / "run", DataConfig(path=data), fingerprint)
    shutil.rmtree(data)
    assert choose_prompts(run, _wide_target()).source == "random"


def test_an_export_is_asked_its_own_prompts(tmp_path: Path) -> None:
    folder, target = proven_folder(tmp_path / "drafter"), random_target()
    assert choose_prompts(folder, target) == ProofPrompts("proof", PROMPTS.ids)
    assert choose_prompts(folder, _wide_target()).source == "random"  # they mean nothing to another target
    edit_proof(folder, lambda tree: tree["answers"].clear())
    assert choose_prompts(folder, target).source == "random"


def test_embedded_prompts_go_through_the_targets_template(tmp_path: Path) -> None:
    target = load_target(TargetConfig(name="tiny"))
    found = choose_prompts(tmp_path, target)
    lines = (TINY_FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    said = [{"role": "user", "content": json.loads(line)["turns"][0]} for line in lines[:20]]
    rendered = (
        target.require_tokenizer().apply_chat_template([turn], add_generation_prompt=True, return_dict=True)
        for turn in said
    )
    assert (found.source, found.ids) == ("embedded", [list(prompt["input_ids"]) for prompt in rendered])


def test_random_tokens_are_known_ones_and_the_same_each_time(tmp_path: Path) -> None:
    target = _wide_target()
    found = choose_prompts(tmp_path, target)
    assert found == choose_prompts(tmp_path, target)
    assert (found.source, len(found.ids)) == ("random", 20)
    assert max(max(ids) for ids in found.ids) < len(target.require_tokenizer())


def test_prompts_leave_room_for_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    run = _run(tmp_path / "run", DataConfig(path=data), _prepared(data, heldout=3))
    whole = choose_prompts(run, _wide_target()).ids
    monkeypatch.setattr(proof_prompts, "LONGEST", 5)
    assert choose_prompts(run, _wide_target()).ids == [ids[-5:] for ids in whole]


def test_what_stands_before_an_answer() -> None:
    def sample(mask: list[int]) -> Sample:
        return Sample(0, torch.arange(len(mask)), torch.tensor(mask).bool())

    assert before_answer(sample([0, 0, 1, 1, 0, 1])) == [0, 1]
    assert before_answer(sample([1] * 40)) == list(range(16))  # plain text, learned from its beginning
    assert before_answer(sample([0, 0, 0])) == [0, 1, 2]
