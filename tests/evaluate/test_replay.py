"""Answers as evidence: what is kept of a decoding, and what a replay says of another one."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from draftline.draft.model import DFlashDraftModel
from draftline.evaluate.generate import generate
from draftline.evaluate.replay import Departure, KeptAnswer, Replay, keep_answers, replay_answers
from draftline.targets.model import Target, build_target
from tests.evaluate.pairs import new_drafter, prompts, random_target, trained_pair

SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "stop_token_ids": (3,)}


def kept(count: int = 4) -> list[KeptAnswer]:
    target, drafter, _ = trained_pair()
    return list(keep_answers(target, drafter, prompts(count), **SETTINGS))


def replayed(drafter: DFlashDraftModel, target: Target | None = None, **words: Any) -> Replay:
    return replay_answers(target or random_target(), drafter, kept(), **SETTINGS, **words)


def test_what_is_kept_is_what_was_decoded() -> None:
    target, drafter, _ = trained_pair()
    for answer in kept():
        decoded = generate(target, drafter, torch.tensor([answer.input_ids]), **SETTINGS)
        assert list(answer.output_ids) == decoded.output_ids
        assert [list(block) for block in answer.drafted_blocks] == decoded.drafted_blocks
        grown = list(answer.kept_per_forward())
        assert [n - 1 for n in grown[:-1]] == decoded.accepted_per_forward[:-1]
        assert sum(grown) == len(decoded.output_ids) - 1


def test_the_gaps_of_the_drafter_are_those_of_its_own_logits() -> None:
    target, drafter, _ = trained_pair()
    answer = kept(1)[0]
    ids = torch.tensor([[*answer.input_ids, answer.output_ids[0], *[drafter.config.mask_token_id] * 5]])
    states = target.model(input_ids=ids[:, : len(answer.input_ids)], output_hidden_states=True).hidden_states
    cache = drafter.new_cache()
    drafter.extend_cache(cache, torch.cat([states[i + 1] for i in drafter.config.target_layer_ids], dim=-1))
    said = drafter.draft(cache, target.embedding(ids[:, len(answer.input_ids) :]))[0, 1:]
    best = target.model.lm_head(said).topk(2).values
    assert answer.draft_gaps[0] == pytest.approx((best[:, 0] - best[:, 1]).tolist(), rel=1e-2, abs=1e-4)


def test_gaps_that_decide_are_those_up_to_the_first_that_fell() -> None:
    answer = KeptAnswer(
        input_ids=(9,),
        output_ids=(1, 2, 3, 4, 5),
        text=None,
        plain_text=None,
        target_forwards=2,
        drafted_blocks=((2, 7, 8), (4, 5, 6)),
        output_gaps=(1.0,) * 5,
        draft_gaps=((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)),
        largest_logit=8.0,
    )
    assert list(answer.kept_per_forward()) == [2, 2]
    assert answer.deciding_gaps() == [0.1, 0.2, 0.4, 0.5]
    for wrong in ({"target_forwards": 3}, {"output_ids": (1, 2)}, {"output_gaps": (1.0,) * 4 + (math.nan,)}):
        with pytest.raises(ValidationError):
            KeptAnswer(**{**answer.model_dump(), **wrong})


@pytest.mark.parametrize("step_by_step", [False, True])
def test_the_same_pair_gives_the_same(step_by_step: bool) -> None:
    found = replayed(trained_pair()[1], step_by_step=step_by_step)
    assert (found.departures, found.astray, found.equal_drafted, found.equal_said) == ([], [], 1.0, 1.0)
    assert found.sentence().endswith("all the same")


def test_another_drafter_departs_where_its_first_block_differs() -> None:
    found = replayed(new_drafter(random_target()))
    first = found.departures[0]
    expected = kept()[first.prompt]
    assert first.block is not None
    assert first.expected == list(expected.drafted_blocks[first.block])
    assert first.found != first.expected
    assert first.gap > 0
    assert found.equal_said == 1.0  # the target goes the written way, whatever is drafted
    assert found.equal_drafted < 0.5
    assert not any(departure.is_tie(1e-4) for departure in found.departures if departure.gap > 1)


def test_the_written_way_is_gone_to_its_end_after_a_difference() -> None:
    edited = copy.deepcopy(trained_pair()[1])
    edited.layers[1].self_attn.o_proj.weight.data.zero_()
    places = [(departure.prompt, departure.block) for departure in replayed(edited).departures]
    assert {prompt for prompt, _ in places} == {0, 1, 2, 3}
    assert max(block for _, block in places if block is not None) > 2
    assert places == sorted(places)


def test_a_target_that_says_otherwise_is_told_from_the_drafter() -> None:
    target, trained, _ = trained_pair()
    model = copy.deepcopy(target.model)
    model.model.norm.weight.data[::2] *= 3.0
    found = replayed(trained, build_target("other", model, None))
    assert found.equal_said < 1.0
    assert any("the target says" in departure.sentence() for departure in found.departures)


def test_a_decoder_that_goes_astray_is_told_from_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = kept()
    monkeypatch.setattr(
        "draftline.evaluate.generate.verify_greedy", lambda _drafted, logits: (0, int(logits[0].argmax()))
    )
    target, trained, _ = trained_pair()
    found = replay_answers(target, trained, answers, **SETTINGS)
    assert found.departures == []
    assert found.astray[0] == (0, len(answers[0].output_ids) - 1)


def test_sentences_count_from_one() -> None:
    block = Departure(prompt=2, block=4, token=1, found=[7, 8], expected=[7, 9], gap=1.25, largest_logit=20.0)
    assert block.sentence() == "prompt 3, block 5, slot 2: drafted 7 8, expected 7 9 (logits 1.2 apart)"
    said = Departure(prompt=0, block=None, token=3, found=[7], expected=[9], gap=math.inf, largest_logit=20.0)
    assert said.sentence() == "prompt 1, token 4: the target says 7, expected 9 (a token that cannot be said)"
    assert block.is_tie(0.0625)
    assert not block.is_tie(0.0624)
