"""Every family: answers in a batch and in blocks are the target's own, and a drafter for it learns three steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftline.audit import run_audit
from draftline.audit.life import MemoryConversations
from draftline.audit.subject import subject_to_come
from draftline.config import load_run_config
from draftline.data.split import choose_conversations
from draftline.errors import TargetError
from draftline.evaluate.generate import GREEDY, decode
from draftline.evaluate.target_state import decoding_fault
from draftline.records import Sample
from draftline.run import assemble, train
from draftline.targets.model import Target, build_target
from draftline.targets.regenerate import generate_batch, largest_batch
from tests.data.chat_tokenizers import CHATML, make_tokenizer
from tests.evaluate.pairs import Clairvoyant
from tests.targets.families import FAMILIES, FEW, RECURRENT, UNSUPPORTED, random_ids, tiny
from tests.targets.lives import PAGE, QUESTIONS, call, line_of, live, page, read_lines, write_target
from tests.targets.lives import SETTINGS as STEPS

NOT_DECODED = {
    "jamba": "transformers gives other logits for several tokens behind a cache than without one",
    "minimax": "transformers cannot read several tokens behind a cache (MiniMax uses cache of its own",
}
"""What is said of families whose blocks transformers cannot verify."""

PROMPTS = [random_ids(length, seed=length).tolist() for length in (9, 3, 6)]
TOKENS = 6

SETTINGS = (
    "drafter.num_layers=1",
    "drafter.block_size=4",
    "drafter.target_layer_ids=[0,2]",
    "drafter.mask_token_id=95",
    "train.tokens_per_row=64",
    "train.num_anchors=4",
    "train.max_steps=3",
    "train.eval_every=3",
    "data.heldout_fraction=0.2",
)


def quick(*families: str) -> list[Any]:
    """Every family; those that are not named take part in the slow tests only."""
    return [name if name in families else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


@torch.no_grad()
def naive_answer(target: Target, prompt: list[int]) -> list[int]:
    """One whole forward for each token: no cache, no batch, no padding."""
    ids = torch.tensor([prompt])
    for _ in range(TOKENS):
        ids = torch.cat([ids, target.model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()


def stop_of(answers: list[list[int]]) -> frozenset[int]:
    """A token at which the answers end after as many different lengths as possible."""
    tokens = {token for answer in answers for token in answer}
    return max((frozenset({token}) for token in tokens), key=lambda stop: len({len(cut(a, stop)) for a in answers}))


def cut(answer: list[int], stop_ids: frozenset[int]) -> list[int]:
    """An answer up to its first stop token, which stays."""
    return answer[: next((i + 1 for i, token in enumerate(answer) if token in stop_ids), TOKENS)]


@pytest.mark.parametrize("family", quick(*FEW, *RECURRENT))
def test_answers_in_a_batch_and_in_blocks_are_the_targets_own(family: str) -> None:
    target = build_target(family, tiny(family), None)
    answers = [naive_answer(target, prompt) for prompt in PROMPTS]
    stop_ids = stop_of(answers)  # so that rows leave the batch at different times
    assert largest_batch(target.model, 16) == 16
    found = dict(generate_batch(target.model, PROMPTS, stop_ids, TOKENS))
    assert found == {row: cut(answer, stop_ids) for row, answer in enumerate(answers)}
    assert len({len(answer) for answer in found.values()}) > 1
    if family in NOT_DECODED:
        assert decoding_fault(target).startswith(NOT_DECODED[family])
        with pytest.raises(TargetError, match="can be drafted for, but not decoded here") as caught:
            decode(target, Clairvoyant(9, answers[0]), torch.tensor(PROMPTS[:1]), TOKENS, (), GREEDY, None)
        assert "\n" not in str(caught.value)
        return
    drafter = Clairvoyant(9, answers[0], wrong_from=1)
    generation = decode(target, drafter, torch.tensor(PROMPTS[:1]), TOKENS, (), GREEDY, None)
    assert generation.output_ids == answers[0]
    assert set(generation.accepted_per_forward[:-1]) == {1}
    assert (generation.replayed_forwards > 0) == (family in RECURRENT)


@pytest.mark.parametrize("family", NOT_DECODED)
def test_what_is_not_decoded_does_not_stop_an_audit_of_evaluations(family: str) -> None:
    target = build_target(family, tiny(family, 420, 256), make_tokenizer(CHATML))
    config = load_run_config(None, [*SETTINGS, f"target.name={family}", "drafter.mask_token_id=419"])
    report = run_audit(subject_to_come(config, target), ("EVL",))
    assert [finding.code for finding in report.findings] == []


@pytest.mark.parametrize("family", quick(*FEW))
def test_a_drafter_learns_three_steps(family: str, tmp_path: Path) -> None:
    samples = [Sample(i, random_ids(12 + i, seed=i), torch.arange(12 + i) > 3) for i in range(8)]
    config = load_run_config(None, [*SETTINGS, f"target.name={family}"])
    data = choose_conversations(config, MemoryConversations(samples, "memory"), None)
    run = assemble(config, build_target(family, tiny(family), None), data)
    before = {name: weight.detach().clone() for name, weight in run.drafter.model.named_parameters()}
    assert train(run, tmp_path).step == 3
    moved = [name for name, weight in run.drafter.model.named_parameters() if not torch.equal(weight, before[name])]
    assert len(moved) == len(before)
    assert all(bool(weight.isfinite().all()) for weight in run.drafter.model.parameters())


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_what_cannot_be_a_target_is_told_why(family: str) -> None:
    with pytest.raises(TargetError) as caught:
        build_target(family, tiny(family), None)
    assert UNSUPPORTED[family][1] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_page_has_forty_families_or_more_and_what_is_said_of_the_others() -> None:
    lines = read_lines()
    assert PAGE.read_text(encoding="utf-8") == page(lines)
    assert len(lines.keys() & FAMILIES.keys()) >= 40


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", [family for family in read_lines() if family in FAMILIES])
@pytest.mark.filterwarnings("default")
def test_a_whole_life_ends_as_the_page_says(family: str, tmp_path: Path) -> None:
    assert line_of(family, live(family, tmp_path)) == read_lines()[family]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.filterwarnings("default")
def test_a_whole_life_in_float16_ends_without_a_finding(family: str, tmp_path: Path) -> None:
    """Answers, states, audit, steps, export, decoding, and the audit of what was exported."""
    write_target(family, tmp_path / "target")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": question}) + "\n" for question in QUESTIONS))
    target = ["--target", str(tmp_path / "target"), "--target-dtype", "float16"]
    prompts, data, run, drafter = (str(tmp_path / name) for name in ("prompts.jsonl", "data", "run", "drafter"))
    asked = ["--data", prompts, "--regenerate", "--max-new-tokens", "24"]
    assert call(["prepare", *target, *asked, "--out", data]) == ""
    assert call(["train", *target, "--data", data, "--out", run, *STEPS]) == ""
    assert call(["export", run, "--out", drafter]) == ""
    decoding = ["--draft", drafter, "--prompts", prompts, "--max-new-tokens", "16", "--json", str(tmp_path / "e.json")]
    assert call(["evaluate", *target, *decoding]) == ""
    assert json.loads((tmp_path / "e.json").read_text())["target_dtype"] == "float16"
    assert call(["audit", drafter, *target]) == ""
