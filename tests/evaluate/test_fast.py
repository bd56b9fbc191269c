"""`evaluate --fast` gives the figures of decoding every prompt, and says so where it does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftline.config import DrafterConfig, TargetConfig
from draftline.data.conversations import Conversation, Message
from draftline.data.prompts import Prompt
from draftline.data.template import render_prompt
from draftline.draft.model import DFlashDraftModel
from draftline.errors import TargetError
from draftline.evaluate import fast as fast_module
from draftline.evaluate.benchmark import evaluate_prompts
from draftline.evaluate.generate import Generation
from draftline.evaluate.result import EvaluationResult
from draftline.formats.beginning import set_first_weights
from draftline.options import EvaluationSettings
from draftline.targets.drafter_shape import resolve_drafter_config
from draftline.targets.model import Target, load_target
from tests.evaluate.pairs import overfit

TURNS = [
    ["Sort these numbers: 5 2 9", "Now in reverse."],
    ["What is 12 + 7?"],
    ["Spell the word cat."],
    ["What is 12 + 7?"],
    ["Count from 3 to 9."],
]
PROMPTS = [
    Prompt("prompts.jsonl", i, Conversation(messages=tuple(Message(role="user", content=turn) for turn in turns)))
    for i, turns in enumerate(TURNS, start=1)
]
NEW_TOKENS = 36
"""Some answers are shorter, others are cut."""

CLOCK = {"tokens_per_second", "baseline_tokens_per_second", "speedup", "best_num_speculative_tokens"}


@pytest.fixture(scope="module")
def pair() -> tuple[Target, DFlashDraftModel]:
    """The embedded target, and a drafter that has learned some of these answers."""
    target = load_target(TargetConfig(name="tiny", device="cpu"))
    wanted = DrafterConfig(num_layers=2)
    draft_model = DFlashDraftModel(resolve_drafter_config(target, wanted, None))
    draft_model.init_weights(torch.Generator().manual_seed(1))
    set_first_weights(draft_model, wanted, target, None)
    asked = [each for each in PROMPTS if len(each.conversation.messages) == 1]
    rendered = [render_prompt(target.require_tokenizer(), each.conversation, {}) for each in asked]
    overfit(target, draft_model, rendered, steps=70)
    return target, draft_model.eval()


def evaluated(
    pair: tuple[Target, DFlashDraftModel], at_once: int | None, prompts: Sequence[Prompt] = PROMPTS
) -> EvaluationResult:
    settings = EvaluationSettings(max_new_tokens=NEW_TOKENS, num_speculative_tokens=5)
    return evaluate_prompts(*pair, prompts, settings, answers_at_once=at_once)


def test_it_gives_the_figures_of_decoding(pair: tuple[Target, DFlashDraftModel]) -> None:
    decoded, fast = (evaluated(pair, at_once).to_json() for at_once in (None, 3))
    assert decoded["acceptance_length"] > 1.2, "a drafter that is never right would show nothing"
    assert len({len(turn["output_ids"]) for turn in decoded["per_prompt"]}) > 1, "some answers end, others are cut"
    lengths = [[row["acceptance_length"] for row in tree.pop("by_draft_length")] for tree in (decoded, fast)]
    assert lengths[0] == lengths[1]
    assert (decoded.pop("decoded_prompts"), fast.pop("decoded_prompts")) == (5, 4)
    assert [fast.pop(name) for name in sorted(CLOCK - {"best_num_speculative_tokens"})] == [None, None, None]
    for tree in (decoded, fast):  # of all prompts and of those that were decoded
        assert tree.pop("greedy_equal") == 1.0
        tree.pop("greedy_equal_interval")
    assert fast == {name: value for name, value in decoded.items() if name not in CLOCK} | {
        "best_num_speculative_tokens": fast["best_num_speculative_tokens"]
    }


def test_a_decoder_that_needs_other_forwards_is_named(
    pair: tuple[Target, DFlashDraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fast_module.generate

    def one_at_a_time(*args: Any, **settings: Any) -> Generation:
        answer = right(*args, **settings)
        return replace(answer, accepted_per_forward=[0] * (len(answer.output_ids) - 1))

    monkeypatch.setattr(fast_module, "generate", one_at_a_time)
    with pytest.raises(TargetError, match=r"counts \d+ forwards .* decoding took \d+ \(first at prompts.jsonl"):
        evaluated(pair, 4, PROMPTS[1:3])


def test_an_output_that_differs_is_shown(
    pair: tuple[Target, DFlashDraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fast_module.generate

    def another_end(*args: Any, **settings: Any) -> Generation:
        answer = right(*args, **settings)
        return replace(answer, output_ids=[*answer.output_ids[:-1], answer.output_ids[-1] ^ 1])

    monkeypatch.setattr(fast_module, "generate", another_end)
    found = evaluated(pair, 4, PROMPTS[1:3])
    assert found.greedy_equal == 0.0
    decoded = {found.per_prompt[each.turn].number for each in found.differences}
    assert len(decoded) == found.decoded_prompts == 2
    assert json.dumps(found.to_json(), allow_nan=False)
